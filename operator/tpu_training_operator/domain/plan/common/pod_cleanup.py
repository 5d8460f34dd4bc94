"""Which unwanted pods to delete, which to delete by force, and which the next attempt must wait for.

A pod that is being deleted keeps its chips until its node reports that it has stopped, and a dead node reports nothing.
Such a pod is deleted by force. That frees its name and nothing else: a worker that keeps running behind a broken
network cannot meet a peer, and checkpoints of two attempts do not touch each other.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta

from tpu_training_operator.domain.cluster_state.observed import WorkerPod, parse_time
from tpu_training_operator.domain.failures.pod_signs import NODE_GONE, TAINT_EVICTION
from tpu_training_operator.domain.objects.actions import AT_ONCE, Delete
from tpu_training_operator.domain.plan.plan import LOOK_AGAIN, Batch, Batches, Freshness

# A node under load takes a while to report that a container has stopped.
_SILENCE = timedelta(seconds=30)


def delete_pods(pods: Iterable[WorkerPod], now: datetime, needs: Freshness = Freshness.CACHED) -> Batches:
    """Returns one batch that deletes these pods, by force where their nodes do not release them; no batch without
    pods."""
    unwanted = list(pods)
    asked = [Delete("Pod", pod.name, pod.uid) for pod in unwanted if not pod.is_terminating]
    actions = (*asked, *_force_deletions(unwanted, now))
    return (Batch(actions, needs),) if actions else ()


def delete_by_force(pods: Iterable[WorkerPod], now: datetime, needs: Freshness = Freshness.CACHED) -> Batches:
    """Returns one batch that deletes by force those pods that are being deleted and that their nodes do not release; no
    batch without such pods."""
    actions = tuple(_force_deletions(pods, now))
    return (Batch(actions, needs),) if actions else ()


def _force_deletions(pods: Iterable[WorkerPod], now: datetime) -> Iterator[Delete]:
    return (Delete("Pod", pod.name, pod.uid, force=True) for pod in pods if _force_time(pod) <= now)


def find_blockers(pods: Iterable[WorkerPod]) -> list[WorkerPod]:
    """Returns the pods that the next attempt must wait for. It does not wait for those on a lost node: no pod is placed
    there while the node is lost, and when it comes back, the pod's chips count as taken until the pod has stopped."""
    return [pod for pod in pods if not (pod.is_terminating and (is_on_lost_node(pod) or pod.is_released))]


def next_force(pods: Sequence[WorkerPod], now: datetime) -> timedelta | None:
    """Returns the time until the next of these pods must be deleted by force; None if none is being deleted."""
    waits = [_force_time(pod) - now for pod in pods if pod.is_terminating and not pod.is_released]
    return max(min(waits), AT_ONCE) if waits else None


def look_again(pods: Sequence[WorkerPod], now: datetime) -> timedelta | None:
    """Returns the time until the next look at pods that should go, if the cluster reports nothing before."""
    force = next_force(pods, now)
    if not find_blockers(pods):
        return force
    return LOOK_AGAIN if force is None else min(force, LOOK_AGAIN)


def is_on_lost_node(pod: WorkerPod) -> bool:
    """Returns whether the control plane has given up on the node, or the node is gone. An eviction by a NoExecute taint
    alone does not prove it: a live node may have such a taint, and its workers save before they stop. But the control
    plane marks the pods of a silent node as not ready before it evicts them."""
    disruption = pod.condition("DisruptionTarget")
    if disruption.get("status") != "True":
        return False
    is_silent = pod.condition("Ready").get("status") != "True"
    return disruption.get("reason") == NODE_GONE or (disruption.get("reason") == TAINT_EVICTION and is_silent)


def is_stuck(pod: WorkerPod, now: datetime) -> bool:
    """Returns whether only a finalizer keeps the pod, and for longer than a deletion normally takes."""
    return pod.is_released and now >= parse_time(pod.raw["metadata"]["deletionTimestamp"]) + _SILENCE


def describe_stuck(pod: WorkerPod) -> str:
    return (
        f"Pod {pod.name} is deleted, but a finalizer keeps the object and its name: remove it from metadata.finalizers"
    )


def _force_time(pod: WorkerPod) -> datetime:
    """Returns when to stop waiting for the pod's node. A pod's deletionTimestamp is the end of its grace period."""
    if not pod.is_terminating or pod.is_released:
        return datetime.max.replace(tzinfo=pod.created.tzinfo)
    end = parse_time(pod.raw["metadata"]["deletionTimestamp"])
    return end if is_on_lost_node(pod) else end + _SILENCE
