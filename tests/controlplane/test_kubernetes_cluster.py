"""The adapter to an API server keeps the cluster contract, on a real API server with its garbage collector."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kubernetes.config import kube_config

from tests.cluster.control_plane import ControlPlane
from tests.cluster.processes import wait_until
from tests.contract.jobs import job_body
from tests.fakes.cluster_contract import ClusterContract
from tests.fakes.objects import config_map, eventually
from tpu_training_operator.kube import client as kube_client
from tpu_training_operator.kube.client import Client, connect
from tpu_training_operator.kube.cluster import CONFIG_MAPS, JOBS, PODS, Resource
from tpu_training_operator.kube.credentials import Credentials, load_credentials
from tpu_training_operator.kube.errors import Forbidden
from tpu_training_operator.runtime.cached_cluster import CachedCluster
from tpu_training_operator.runtime.job_watch import JobWatch
from tpu_training_operator.runtime.watching import Watching

pytestmark = pytest.mark.usefixtures("job_definition")


def credentials_of(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> Credentials:
    """What `load_credentials` finds in a process that started with this KUBECONFIG, outside a pod."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    # The library reads the variable when it is imported.
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
    return load_credentials()


def open_sockets() -> set[str]:
    """Returns the sockets of this process, as the kernel names them."""
    links = (Path(entry.path) for entry in os.scandir("/proc/self/fd"))
    return {target for link in links if (target := _target_of(link)).startswith("socket:")}


def _target_of(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""


@pytest.fixture
async def cluster(control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    credentials = credentials_of(control_plane.kubeconfig, monkeypatch)
    async with connect(credentials) as connected:
        yield connected


@pytest.fixture
async def stranger(
    control_plane: ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Client]:
    """The same cluster for a service account without rights."""
    kubeconfig = control_plane.service_account_kubeconfig(namespace, "default")
    async with connect(credentials_of(kubeconfig, monkeypatch)) as connected:
        yield connected


class TestClusterContract(ClusterContract):
    """The tests that local mode's store passes, too."""


class TestCachedClusterContract(ClusterContract):
    """With a memory that watches fill."""

    @pytest.fixture
    async def cluster(
        self, control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[CachedCluster]:
        credentials = credentials_of(control_plane.kubeconfig, monkeypatch)
        before = open_sockets()
        async with connect(credentials) as client:
            jobs = JobWatch(client, credentials, None)
            watching = Watching(client, {None: jobs}, lambda key, version, haste: None)
            tasks = [asyncio.create_task(watch.run()) for watch in (jobs, watching)]
            cached = CachedCluster(client, watching.served)
            await cached.list(JOBS, None)
            yield cached
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        # A connection with TLS is closed once the API server has answered its farewell.
        async def are_closed() -> bool:
            return open_sockets() <= before

        await eventually(are_closed)


@pytest.mark.parametrize("resource", [JOBS, PODS, CONFIG_MAPS], ids=lambda resource: resource.plural)
async def test_without_rights_nothing_is_read(stranger: Client, namespace: str, resource: Resource) -> None:
    with pytest.raises(Forbidden, match="cannot list resource"):
        await stranger.list(resource, namespace)
    with pytest.raises(Forbidden, match="cannot get resource"):
        await stranger.get(resource, namespace, "digits")


async def test_without_rights_nothing_is_written(cluster: Client, stranger: Client, namespace: str) -> None:
    job = await cluster.create(job_body(namespace=namespace))
    with pytest.raises(Forbidden, match="cannot create resource"):
        await stranger.create(config_map(namespace, "data"))
    with pytest.raises(Forbidden, match="cannot update resource"):
        await stranger.update_status({**job, "status": {"state": "Running"}})
    with pytest.raises(Forbidden, match="cannot delete resource"):
        await stranger.delete(JOBS, namespace, "digits", job["metadata"]["uid"])
    assert await cluster.get(JOBS, namespace, "digits") == job


async def test_a_quota_is_a_refusal_and_not_an_invalid_object(
    control_plane: ControlPlane, cluster: Client, namespace: str
) -> None:
    control_plane.kubectl("create", "quota", "none", "--hard=count/configmaps=0", "-n", namespace)
    quota = f"/api/v1/namespaces/{namespace}/resourcequotas/none"
    # The quota holds only from then on.
    wait_until(
        lambda: "hard" in control_plane.api.call("GET", quota)["status"], timeout=60, what="the quota is counted"
    )
    with pytest.raises(Forbidden, match="quota"):
        await cluster.create(config_map(namespace, "data"))


async def test_a_list_longer_than_a_page_is_complete(
    cluster: Client, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_client, "_PAGE", 2)
    names = {f"data-{index}" for index in range(5)}
    for name in names:
        await cluster.create(config_map(namespace, name, labels={"paged": "yes"}))
    found = await cluster.list(CONFIG_MAPS, namespace, {"paged": "yes"})
    assert {item["metadata"]["name"] for item in found} == names
