"""Local mode's store keeps the cluster contract, and tells its kubelet about every change."""

import pytest

from tests.fakes.cluster_contract import ClusterContract
from tests.fakes.objects import config_map, delete, pod
from tpu_training_operator.kube.cluster import CONFIG_MAPS, PODS, Object
from tpu_training_operator.kube.errors import NotFound
from tpu_training_operator.local.store import LocalStore


@pytest.fixture
def cluster() -> LocalStore:
    return LocalStore()


@pytest.fixture
def namespace() -> str:
    return "test"


class TestClusterContract(ClusterContract):
    """The tests that an API server passes, too."""


async def test_changing_an_object_that_was_read_does_not_change_the_store(cluster: LocalStore) -> None:
    given = config_map("test", "data")
    created = await cluster.create(given)
    read = await cluster.get(CONFIG_MAPS, "test", "data")
    (listed,) = await cluster.list(CONFIG_MAPS, "test")
    for handed_out in (given, created, read, listed):
        handed_out["data"]["hosts"] = "changed"
    assert (await cluster.get(CONFIG_MAPS, "test", "data"))["data"] == {"hosts": "a,b"}


async def test_subscribers_receive_every_change_in_order(cluster: LocalStore) -> None:
    heard: list[tuple[str, str | None, bool]] = []

    def listen(body: Object) -> None:
        heard.append((body["status"]["phase"], body["spec"].get("nodeName"), "deletionTimestamp" in body["metadata"]))

    cluster.subscribe(listen)
    created = await cluster.create(pod("test", "worker"))
    cluster.bind(created, "node")
    cluster.set_pod_status(created, {"phase": "Running"})
    await delete(cluster, created)
    cluster.remove_pod(created)
    assert heard == [
        ("Pending", None, False),
        ("Pending", "node", False),
        ("Running", "node", False),
        ("Running", "node", True),
        ("Running", "node", True),
    ]


async def test_a_pod_that_has_ended_is_deleted_without_its_kubelet(cluster: LocalStore) -> None:
    created = await cluster.create(pod("test", "worker"))
    cluster.bind(created, "node")
    cluster.set_pod_status(created, {"phase": "Succeeded"})
    await delete(cluster, created)
    with pytest.raises(NotFound):
        await cluster.get(PODS, "test", "worker")


async def test_a_kubelets_report_about_an_earlier_pod_of_the_name_is_ignored(cluster: LocalStore) -> None:
    first = await cluster.create(pod("test", "worker"))
    await delete(cluster, first)
    second = await cluster.create(pod("test", "worker"))
    assert not cluster.bind(first, "node")
    cluster.set_pod_status(first, {"phase": "Failed"})
    cluster.remove_pod(first)
    assert await cluster.get(PODS, "test", "worker") == second
