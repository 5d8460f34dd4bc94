"""The operator's pod as installed by the chart, for tests that ask where it runs or kill it."""

import time

from tests.cluster.api import Object
from tests.cluster.nodes import RealCluster
from tests.cluster.processes import wait_until
from tests.e2e import containers

PODS = "/api/v1/namespaces/tpu-system/pods"
# Waiting limit; the nodes start a container again after a second.
BACK_SECONDS = 180.0


def operator_pod(cluster: RealCluster) -> Object:
    """The one that is there to stay."""
    found = cluster.api.call("GET", PODS)["items"]
    pod: Object
    [pod] = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
    return pod


def kill_operator(cluster: RealCluster, after: float) -> None:
    """SIGKILL, `after` seconds from when its process was there; it may be serving by then, or still be starting."""
    pods: list[Object] = []

    def runs() -> bool:
        pods[:] = [operator_pod(cluster)]
        [status] = pods[0]["status"]["containerStatuses"]
        return "running" in status["state"] and bool(containers.processes(pods[0]))

    wait_until(runs, timeout=BACK_SECONDS, what="the operator's process is there")
    time.sleep(after)
    containers.kill(pods[0])


def restarts(cluster: RealCluster) -> int:
    """How often its kubelet has started its container again."""
    [status] = operator_pod(cluster)["status"]["containerStatuses"]
    count: int = status["restartCount"]
    return count
