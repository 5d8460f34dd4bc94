"""The operator's pod as installed by the chart, for tests that ask where it runs or kill it; and two of them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.deadlines import kubectl_timeout
from tests.cluster.processes import wait_until
from tests.e2e import containers
from tests.e2e.space import REPOSITORY

NAMESPACE = "tpu-system"
RELEASE = "tpu-training-operator"
CHART = str(REPOSITORY / "build" / "chart")
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{RELEASE}"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
# How long the Lease of a killed leader lasts. controlplane/test_two_operators waits for the ten seconds of a real one.
PROMISED_SECONDS = 2
# A waiting limit; the nodes restart a container after a second.
BACK_SECONDS = 180.0


def operator_pod(cluster: Cluster) -> Object:
    """The operator's pod that is not being deleted."""
    [pod] = _pods(cluster)
    return pod


def kill_operator(cluster: Cluster, after: float) -> None:
    """Sends SIGKILL `after` seconds after its process appeared, whether it is serving by then or still starting."""
    pods: list[Object] = []

    def runs() -> bool:
        pods[:] = [operator_pod(cluster)]
        return _runs(pods[0])

    wait_until(runs, timeout=BACK_SECONDS, what="the operator's process exists")
    time.sleep(after)
    containers.kill(pods[0])


def restarts(cluster: Cluster) -> int:
    """How often the kubelet has restarted its container."""
    [status] = operator_pod(cluster)["status"]["containerStatuses"]
    count: int = status["restartCount"]
    return count


@contextmanager
def two_operators(cluster: Cluster) -> Iterator[None]:
    """The release with `replicas: 2`, within the block."""
    _scale(cluster, 2)
    try:
        yield
    finally:
        _scale(cluster, 1)
        wait_until(lambda: len(_pods(cluster)) == 1, timeout=BACK_SECONDS, what="one operator is left")


def _scale(cluster: Cluster, replicas: int) -> None:
    wanted = (
        "--namespace",
        NAMESPACE,
        "--reuse-values",
        "--set",
        f"replicas={replicas}",
        "--wait",
        kubectl_timeout(300),
    )
    cluster.helm("upgrade", RELEASE, CHART, *wanted)


def kill_leader(cluster: Cluster, after: float) -> None:
    """Sends SIGKILL `after` seconds after an operator began to lead; returns when another process leads."""
    leader: list[str] = []

    def leads() -> bool:
        leader[:] = [_holder(cluster)]
        return any(_is(pod, leader[0]) and _runs(pod) for pod in _pods(cluster))

    wait_until(leads, timeout=BACK_SECONDS, what="an operator leads")
    time.sleep(after)
    containers.kill(next(pod for pod in _pods(cluster) if _is(pod, leader[0])))
    promise = {"spec": {"leaseDurationSeconds": PROMISED_SECONDS}}
    cluster.api.call("PATCH", LEASE, promise, content_type="application/merge-patch+json")
    wait_until(lambda: _holder(cluster) not in ("", leader[0]), timeout=BACK_SECONDS, what="another operator leads")


def transitions(cluster: Cluster) -> int:
    """How often another operator has begun to lead."""
    return int(cluster.api.call("GET", LEASE)["spec"].get("leaseTransitions", 0))


def _holder(cluster: Cluster) -> str:
    return str((cluster.api.call("GET", LEASE).get("spec") or {}).get("holderIdentity") or "")


def _is(pod: Object, identity: str) -> bool:
    """A process is known by its pod's name and a random end."""
    return bool(identity.rpartition("-")[0] == pod["metadata"]["name"])


def _pods(cluster: Cluster) -> list[Object]:
    return [pod for pod in cluster.api.call("GET", PODS)["items"] if "deletionTimestamp" not in pod["metadata"]]


def _runs(pod: Object) -> bool:
    [status] = pod["status"].get("containerStatuses") or [{"state": {}}]
    return "running" in status["state"] and bool(containers.processes(pod))
