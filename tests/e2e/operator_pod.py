"""The operator's pod as installed by the chart, for tests that ask where it runs or kill it."""

import time

from tests.cluster.api import Object
from tests.cluster.nodes import RealCluster
from tests.cluster.processes import wait_until
from tests.e2e import containers

PODS = "/api/v1/namespaces/tpu-system/pods"
# A waiting limit; the nodes restart a container after a second.
BACK_SECONDS = 180.0


def operator_pod(cluster: RealCluster) -> Object:
    """The operator's pod that is not being deleted."""
    found = cluster.api.call("GET", PODS)["items"]
    pod: Object
    [pod] = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
    return pod


def kill_operator(cluster: RealCluster, after: float) -> None:
    """Sends SIGKILL `after` seconds after its process appeared, whether it is serving by then or still starting."""
    pods: list[Object] = []

    def runs() -> bool:
        pods[:] = [operator_pod(cluster)]
        [status] = pods[0]["status"]["containerStatuses"]
        return "running" in status["state"] and bool(containers.processes(pods[0]))

    wait_until(runs, timeout=BACK_SECONDS, what="the operator's process exists")
    time.sleep(after)
    containers.kill(pods[0])


def restarts(cluster: RealCluster) -> int:
    """How often the kubelet has restarted its container."""
    [status] = operator_pod(cluster)["status"]["containerStatuses"]
    count: int = status["restartCount"]
    return count
