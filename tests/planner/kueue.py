"""What Kueue does to the Workload of a `ModelCluster`, condition by condition as its controllers write them."""

from collections.abc import Collection
from datetime import timedelta
from typing import Any

from tests.planner.model_cluster import ModelCluster, copied
from tpu_training_operator.domain.cluster_state.observed import format_time, parse_time
from tpu_training_operator.domain.cluster_state.workload import Workload, workload_name
from tpu_training_operator.kube.cluster import Object

QUEUE = {"kueue.x-k8s.io/queue-name": "research"}
FLAVOR: Object = {
    "metadata": {"name": "v5e-spot"},
    "spec": {
        "nodeLabels": {"cloud.google.com/gke-spot": "true"},
        "tolerations": [{"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true"}],
    },
}
# The reason for which a Workload has left the queue, and that for which Kueue takes it back. For others it never does.
_TAKEN_BACK = {
    "Deactivated": "Reactivated",
    "PodsReadyTimeout": "BackoffFinished",
    "AdmissionCheck": "BackoffFinished",
    "ClusterQueueStopped": "ClusterQueueRestarted",
    "LocalQueueStopped": "LocalQueueRestarted",
}
BUSY = (
    "Pending",
    "couldn't assign flavors to pod set main: insufficient unused quota for google.com/tpu in flavor v5e-spot, 16 more"
    " needed",
)


def put_in_queue(cluster: ModelCluster) -> None:
    """The job's owner names a queue; the administrator has a flavor for it."""
    cluster.job["metadata"]["labels"] = cluster.job["metadata"].get("labels", {}) | QUEUE
    cluster.flavors["v5e-spot"] = copied(FLAVOR)


def workload(cluster: ModelCluster, number: int | None = None) -> Object | None:
    """The Workload of the present job; of its slice with that number, or the first one."""
    found = cluster.workloads()
    if number is not None:
        name = workload_name(cluster.job["metadata"]["name"], cluster.uid, number)
        found = [body for body in found if body["metadata"]["name"] == name]
    return found[0] if found else None


def numbers(cluster: ModelCluster) -> list[int]:
    """The slices for which the job has a Workload. Rungs of a ladder begin with 101."""
    found = {body["metadata"]["name"] for body in cluster.workloads()}
    slices = (*range(5), *range(101, 105)) if found else ()
    return [number for number in slices if workload_name(cluster.job["metadata"]["name"], cluster.uid, number) in found]


def seen(cluster: ModelCluster, number: int | None = None) -> Workload:
    found = workload(cluster, number)
    assert found is not None, "there is no Workload"
    return Workload(found)


def works(cluster: ModelCluster, *, has_room: bool = True, free: Collection[int] | None = None) -> None:
    """What Kueue does by itself. `free`: the slices for which there is quota, by number."""
    for number in numbers(cluster) or [None]:
        _works(cluster, number, has_room if free is None else number in free)


def mends(cluster: ModelCluster) -> None:
    """Writes a condition again that follows from what it has decided, and that somebody has removed."""
    for found in cluster.workloads():
        seen = Workload(found)
        if seen.raw["status"].get("admission") and not seen.is_evicted and not seen.is_finished:
            _set(cluster, found, "QuotaReserved", "True", "QuotaReserved", "Quota reserved in ClusterQueue tpus")
            _set(cluster, found, "Admitted", "True", "Admitted", "The workload is admitted")


def _works(cluster: ModelCluster, number: int | None, has_room: bool) -> None:
    found = workload(cluster, number)
    if found is None or Workload(found).is_finished:
        return
    if not Workload(found).is_active:
        if not Workload(found).is_evicted:
            evict(cluster, "Deactivated", number)
        return
    left = Workload(found).condition("Requeued")
    if left.get("status") == "False" and left["reason"] not in _TAKEN_BACK:
        return
    if left.get("status") == "False":
        _set(cluster, found, "Requeued", "True", _TAKEN_BACK[left["reason"]], "The workload is back in the queue")
    if not Workload(found).holds_quota and has_room:
        admit(cluster, number)
    elif not Workload(found).condition("QuotaReserved"):
        pend(cluster, *BUSY, number)


def reserve(cluster: ModelCluster, number: int | None = None, **status: Any) -> None:
    """Quota is there, an admission check is not."""
    found = workload(cluster, number)
    if found is None or Workload(found).holds_quota or not Workload(found).is_active:
        return
    count = found["spec"]["podSets"][0]["count"]
    assignment = {"name": "main", "count": count, "flavors": {"google.com/tpu": "v5e-spot", "cpu": "v5e-spot"}}
    found["status"] |= {"admission": {"clusterQueue": "tpus", "podSetAssignments": [assignment]}, **status}
    _set(cluster, found, "QuotaReserved", "True", "QuotaReserved", "Quota reserved in ClusterQueue tpus")
    for kind in ("Evicted", "Preempted"):
        if Workload(found).is_true(kind):
            _set(cluster, found, kind, "False", "QuotaReserved", "Previously: evicted")


def admit(cluster: ModelCluster, number: int | None = None, **status: Any) -> None:
    reserve(cluster, number, **status)
    found = workload(cluster, number)
    if found is not None and Workload(found).holds_quota and not Workload(found).is_evicted:
        _set(cluster, found, "Admitted", "True", "Admitted", "The workload is admitted")


def pend(cluster: ModelCluster, reason: str, message: str, number: int | None = None) -> None:
    found = workload(cluster, number)
    assert found is not None
    _set(cluster, found, "QuotaReserved", "False", reason, message)


def evict(cluster: ModelCluster, reason: str = "Preempted", number: int | None = None) -> None:
    """Kueue wants the quota back; it is the job's controller that gives it."""
    found = workload(cluster, number)
    if found is None or Workload(found).is_evicted or Workload(found).is_finished:
        return
    _set(cluster, found, "Evicted", "True", reason, "Preempted to accommodate a workload of higher priority")


def _set(cluster: ModelCluster, found: Object, kind: str, value: str, reason: str, message: str) -> None:
    status = found["status"]
    others = [condition for condition in status.get("conditions", ()) if condition["type"] != kind]
    now = format_time(cluster.now)
    condition = {"type": kind, "status": value, "reason": reason, "message": message, "lastTransitionTime": now}
    status["conditions"] = [*others, condition]
    cluster.touch(found)


def is_late(cluster: ModelCluster, limit: timedelta) -> bool:
    """Whether Kueue would evict the job for workers that are not ready for so long (waitForPodsReady)."""
    found = seen(cluster)
    ready = found.condition("PodsReady")
    if not found.is_admitted or ready.get("status") == "True":
        return False
    is_recovering = ready.get("reason") == "WaitForRecovery"
    since = ready["lastTransitionTime"] if is_recovering else found.condition("Admitted")["lastTransitionTime"]
    return cluster.now - parse_time(since) > limit
