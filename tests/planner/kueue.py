"""What Kueue does to the Workload of a `ModelCluster`, condition by condition as its controllers write them."""

from datetime import timedelta
from typing import Any

from tests.planner.model_cluster import ModelCluster, copied
from tpu_training_operator.domain.observed import format_time, parse_time
from tpu_training_operator.domain.workload import Workload
from tpu_training_operator.kube.cluster import Object

QUEUE = {"kueue.x-k8s.io/queue-name": "research"}
FLAVOR: Object = {
    "metadata": {"name": "v5e-spot"},
    "spec": {
        "nodeLabels": {"cloud.google.com/gke-spot": "true"},
        "tolerations": [{"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true"}],
    },
}


def put_in_queue(cluster: ModelCluster) -> None:
    """The job's owner names a queue; the administrator has a flavor for it."""
    cluster.job["metadata"]["labels"] = cluster.job["metadata"].get("labels", {}) | QUEUE
    cluster.flavors["v5e-spot"] = copied(FLAVOR)


def workload(cluster: ModelCluster) -> Object | None:
    """The Workload of the present job."""
    found = [body for body in cluster.others.values() if body["kind"] == "Workload" and not cluster.is_orphan(body)]
    return found[0] if found else None


def seen(cluster: ModelCluster) -> Workload:
    found = workload(cluster)
    assert found is not None, "there is no Workload"
    return Workload(found)


def works(cluster: ModelCluster, *, has_room: bool = True) -> None:
    """What Kueue does by itself."""
    found = workload(cluster)
    if found is None or Workload(found).is_finished:
        return
    if not Workload(found).is_active:
        if not Workload(found).is_evicted:
            evict(cluster, "Deactivated")
        return
    if Workload(found).condition("Requeued").get("status") == "False":
        _set(cluster, found, "Requeued", "True", "Reactivated", "The workload was reactivated")
    if not Workload(found).holds_quota and has_room:
        admit(cluster)


def reserve(cluster: ModelCluster, **status: Any) -> None:
    """Quota is there, an admission check is not."""
    found = workload(cluster)
    if found is None or Workload(found).holds_quota or not Workload(found).is_active:
        return
    count = found["spec"]["podSets"][0]["count"]
    assignment = {"name": "main", "count": count, "flavors": {"google.com/tpu": "v5e-spot", "cpu": "v5e-spot"}}
    found["status"] |= {"admission": {"clusterQueue": "tpus", "podSetAssignments": [assignment]}, **status}
    _set(cluster, found, "QuotaReserved", "True", "QuotaReserved", "Quota reserved in ClusterQueue tpus")
    for kind in ("Evicted", "Preempted"):
        if Workload(found).is_true(kind):
            _set(cluster, found, kind, "False", "QuotaReserved", "Previously: evicted")


def admit(cluster: ModelCluster, **status: Any) -> None:
    reserve(cluster, **status)
    found = workload(cluster)
    if found is not None and Workload(found).holds_quota and not Workload(found).is_evicted:
        _set(cluster, found, "Admitted", "True", "Admitted", "The workload is admitted")


def pend(cluster: ModelCluster, reason: str, message: str) -> None:
    found = workload(cluster)
    assert found is not None
    _set(cluster, found, "QuotaReserved", "False", reason, message)


def evict(cluster: ModelCluster, reason: str = "Preempted") -> None:
    """Kueue wants the quota back; it is the job's controller that gives it."""
    found = workload(cluster)
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
