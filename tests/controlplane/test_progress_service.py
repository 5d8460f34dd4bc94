"""The progress service with a real API server behind it: real tokens, real rights, a worker's TLS."""

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.cluster.control_plane import ControlPlane
from tests.cluster.ports import free_port
from tests.contract.jobs import job_body
from tests.controlplane.bound_tokens import AUDIENCE, claims, token, with_claims
from tests.controlplane.operator_process import ACCOUNT, grant
from tests.controlplane.test_kubernetes_cluster import credentials_of
from tests.fakes.objects import owned_by
from tests.unit.tls_probe import LOOPBACK, trusting
from tpu_training_operator.domain.cluster_state.worker_reports import WorkerReport
from tpu_training_operator.domain.job.naming import WorkerId, worker_labels
from tpu_training_operator.kube.client import Client, connect
from tpu_training_operator.kube.cluster import JobKey, Object
from tpu_training_operator.kube.errors import Forbidden
from tpu_training_operator.runtime.inbox import Inboxes
from tpu_training_operator.runtime.progress.pki import ServiceName, load_authority, server_tls
from tpu_training_operator.runtime.progress.server import ProgressServer, serve
from tpu_training_operator.runtime.progress.tokens import Reviewer

pytestmark = pytest.mark.usefixtures("job_definition")

RBAC = Path(__file__).with_name("progress_rbac.yaml")
GOOD = {"phase": "Training", "step": 7, "loss": 0.25}
PROGRESS = "/apis/tpu-operator.dev/v1alpha1/namespaces/{}/tputrainingjobs/{}/progress"


def now() -> datetime:
    return datetime.now(UTC)


@pytest.fixture
async def operator(
    control_plane: ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Client]:
    """The API server, as the operator may use it."""
    grant(control_plane, namespace)
    control_plane.kubectl("apply", "--namespace", namespace, "-f", str(RBAC))
    name = "tpu-training-operator-progress"
    group, account = "rbac.authorization.k8s.io", {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}
    bindings = [
        {
            "apiVersion": f"{group}/v1",
            "kind": f"{scope}RoleBinding",
            "metadata": {"name": f"{name}-{namespace}", "namespace": namespace},
            "roleRef": {"apiGroup": group, "kind": f"{scope}Role", "name": name},
            "subjects": [account],
        }
        for scope in ("Cluster", "")
    ]
    empty = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "tpu-training-operator-tls", "namespace": namespace},
    }
    control_plane.kubectl("apply", "-f", "-", input=yaml.safe_dump_all([*bindings, empty]))
    credentials = credentials_of(control_plane.service_account_kubeconfig(namespace, ACCOUNT), monkeypatch)
    async with connect(credentials) as connected:
        yield connected


class Space:
    """A job with workers that wait for nodes, and a progress service to report to."""

    def __init__(self, cluster: ControlPlane, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.inboxes = Inboxes(now)
        self.hints: list[JobKey] = []
        self.service = ServiceName("tpu-training-operator", namespace)
        self.port = free_port()
        self.tls: Any = None

    def create(self, body: Object) -> Object:
        plural = {"Pod": "pods", "TPUTrainingJob": "tputrainingjobs"}[body["kind"]]
        root = "api" if body["apiVersion"] == "v1" else "apis"
        path = f"/{root}/{body['apiVersion']}/namespaces/{self.namespace}/{plural}"
        return self.cluster.api.call("POST", path, body)

    def job(self, name: str = "digits") -> Object:
        """Creates a job in its third attempt."""
        body = self.create(job_body(name=name, namespace=self.namespace)) | {"status": {"attempt": 3}}
        path = f"/apis/{body['apiVersion']}/namespaces/{self.namespace}/tputrainingjobs/{name}/status"
        return self.cluster.api.call("PUT", path, body)

    def worker(self, job: Object, *, attempt: int = 1, host: int = 0, owned: bool = True) -> Object:
        worker, metadata = WorkerId(attempt, 0, host), job["metadata"]
        return self.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": worker.pod_name(metadata["name"]),
                    "namespace": self.namespace,
                    "labels": worker_labels(metadata["name"], worker),
                    "ownerReferences": owned_by(job) if owned else [],
                },
                "spec": {
                    "nodeSelector": {"no-such": "node"},
                    "containers": [{"name": "trainer", "image": "registry.example/none:1"}],
                },
            }
        )

    def token(self, pod: Object | None, audience: str = AUDIENCE) -> str:
        return token(self.cluster, self.namespace, pod, audience)

    async def post(
        self, token: str | None, *, job: str = "digits", path: str = PROGRESS, **body: Any
    ) -> tuple[int, Any]:
        """The status, and the JSON of the answer."""
        headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        url = f"https://{LOOPBACK}:{self.port}{path.format(self.namespace, job)}"
        host = self.service.dns_names[0]
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(url, ssl=self.tls, server_hostname=host, **(body or {"json": GOOD})) as response,
        ):
            return response.status, await response.json()

    def report(self, job: str = "digits") -> WorkerReport:
        report = self.inboxes.of(JobKey(self.namespace, job)).report
        assert report is not None
        return report


@pytest.fixture
async def space(control_plane: ControlPlane, namespace: str, operator: Client) -> AsyncIterator[Space]:
    """The service is up."""
    made = Space(control_plane, namespace)
    authority = await load_authority(operator, made.service, now())
    made.tls = trusting(authority)
    service = ProgressServer(
        Reviewer(operator, time.monotonic),
        made.inboxes,
        lambda key, seconds: made.hints.append(key),
        clock=now,
        seconds=time.monotonic,
    )
    async with (
        server_tls(authority, made.service.dns_names, now) as tls,
        serve(service, made.port, tls),
    ):
        yield made


# Accepted


async def test_worker_0_reports_with_its_own_token(space: Space) -> None:
    pod = space.worker(space.job(), attempt=3)
    assert await space.post(space.token(pod)) == (200, {"stacks": False})
    report = space.report()
    assert (report.step, report.loss, report.attempt, report.pod_uid) == (7, "0.25", 3, pod["metadata"]["uid"])
    assert space.hints == [JobKey(space.namespace, "digits")]


# ReportRefused


async def test_without_a_token_or_with_garbage_it_is_401(space: Space) -> None:
    genuine = space.token(space.worker(space.job()))
    for bearer in (None, "garbage", "a.b.c", genuine[:-6] + "AAAAAA", genuine.rpartition(".")[0] + "."):
        status, answer = await space.post(bearer)
        assert (status, "token" in answer["message"]) == (401, True)


@pytest.mark.parametrize("audience", ["https://kubernetes.default.svc", "tpu-operator.dev", "trainer.kubeflow.org"])
async def test_a_token_for_another_audience_is_401(space: Space, audience: str) -> None:
    pod = space.worker(space.job())
    assert (await space.post(space.token(pod, audience)))[0] == 401


async def test_an_expired_token_is_401(space: Space) -> None:
    genuine = space.token(space.worker(space.job()))
    assert (await space.post(with_claims(space.cluster, genuine)))[0] == 200, "a token that is signed again stays valid"
    an_hour_ago = {claim: claims(genuine)[claim] - 3600 for claim in ("iat", "nbf", "exp")}
    assert (await space.post(with_claims(space.cluster, genuine, **an_hour_ago)))[0] == 401


async def test_the_token_of_a_deleted_pod_is_401(space: Space) -> None:
    pod = space.worker(space.job())
    bearer = space.token(pod)
    space.cluster.api.call("DELETE", f"/api/v1/namespaces/{space.namespace}/pods/{pod['metadata']['name']}")
    assert (await space.post(bearer))[0] == 401


async def test_a_token_that_is_not_bound_to_a_pod_is_403(space: Space) -> None:
    space.worker(space.job())
    status, answer = await space.post(space.token(None))
    assert (status, "not bound to a pod" in answer["message"]) == (403, True)


# Rights, and the certificate authority


async def test_without_the_right_to_review_tokens_it_is_503(space: Space) -> None:
    bearer = space.token(space.worker(space.job()))
    space.cluster.kubectl("delete", "clusterrolebinding", f"tpu-training-operator-progress-{space.namespace}")
    status, answer = await space.post(bearer)
    assert (status, "tokenreviews" in answer["message"]) == (503, True)


async def test_the_next_operator_uses_the_same_authority(operator: Client, namespace: str) -> None:
    service = ServiceName("tpu-training-operator", namespace)
    one, other = await asyncio.gather(*(load_authority(operator, service, now()) for _ in range(2)))
    assert one.pem == other.pem == (await load_authority(operator, service, now())).pem


async def test_the_operator_reads_no_other_secret(operator: Client, namespace: str) -> None:
    with pytest.raises(Forbidden, match="cannot get resource"):
        await load_authority(operator, ServiceName("another", namespace), now())
    with pytest.raises(Forbidden, match="cannot get resource"):
        await load_authority(operator, ServiceName("tpu-training-operator", "default"), now())
