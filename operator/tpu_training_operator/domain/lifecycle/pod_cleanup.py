"""Pods that a job no longer wants: which to delete, which by force, and which of them hold up the next attempt.

A pod that is being deleted keeps its chips until its node says that it has stopped, and a node that is dead says
nothing. Such a pod is deleted by force, which frees its name and nothing else: a worker that runs on behind a lost
network can meet no peer, and checkpoints of two attempts do not touch each other.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from tpu_training_operator.domain.actions import DeletePod
from tpu_training_operator.domain.failures.pod_signs import NODE_GONE, TAINTED
from tpu_training_operator.domain.observed import WorkerPod, parse_time

# A node that is under load takes its time to say that a container has stopped.
_SILENCE = timedelta(seconds=30)
# A watch that broke lists what is there when it comes back, and never tells what has gone meanwhile. Whoever waits for
# pods to go therefore looks, too; not more often than this, because many gangs can wait at once.
_UNHEARD = timedelta(seconds=15)

Stages = tuple[tuple[DeletePod, ...], ...]


def deletions(pods: Iterable[WorkerPod], now: datetime) -> Stages:
    """One stage: what is not being deleted yet, and by force what its node does not let go of."""
    unwanted = list(pods)
    asked = tuple(DeletePod(pod.name, pod.uid) for pod in unwanted if not pod.is_terminating)
    stage = (*asked, *(deletion for stage in by_force(unwanted, now) for deletion in stage))
    return (stage,) if stage else ()


def by_force(pods: Iterable[WorkerPod], now: datetime) -> Stages:
    """Of those that are being deleted already, the ones whose nodes do not let go of them."""
    stage = tuple(DeletePod(pod.name, pod.uid, force=True) for pod in pods if _given_up(pod) <= now)
    return (stage,) if stage else ()


def in_the_way(pods: Iterable[WorkerPod]) -> list[WorkerPod]:
    """Those that the next attempt must wait for. Not those of a lost node: no pod is placed there while it is lost,
    and when it comes back the pod's chips count as taken until it has stopped."""
    return [pod for pod in pods if not (pod.is_terminating and (is_on_lost_node(pod) or _is_forced(pod)))]


def next_force(pods: Sequence[WorkerPod], now: datetime) -> timedelta | None:
    """When the next of them has to be deleted by force, if nothing is heard of it until then."""
    waits = [_given_up(pod) - now for pod in pods if pod.is_terminating and not _is_forced(pod)]
    return max(min(waits), timedelta(0)) if waits else None


def look_again(pods: Sequence[WorkerPod], now: datetime) -> timedelta | None:
    """When to look at pods whose going is waited for, if nothing is heard until then."""
    force = next_force(pods, now)
    if not in_the_way(pods):
        return force
    return _UNHEARD if force is None else min(force, _UNHEARD)


def is_on_lost_node(pod: WorkerPod) -> bool:
    """The control plane has given up the node, or the node is gone. A NoExecute taint alone does not say so: a live
    node may have one, too, and its workers save before they stop. The control plane marks all pods of a silent node as
    not ready before it evicts them."""
    disruption = pod.condition("DisruptionTarget")
    if disruption.get("status") != "True":
        return False
    is_silent = pod.condition("Ready").get("status") != "True"
    return disruption.get("reason") == NODE_GONE or (disruption.get("reason") == TAINTED and is_silent)


def _is_forced(pod: WorkerPod) -> bool:
    """Its node is not asked any more; only a finalizer keeps the object, and a further deletion changes nothing."""
    return pod.is_terminating and pod.raw["metadata"].get("deletionGracePeriodSeconds") == 0


def _given_up(pod: WorkerPod) -> datetime:
    """When nothing more is to be expected of its node. A pod's deletionTimestamp is the end of its grace period."""
    if not pod.is_terminating or _is_forced(pod):
        return datetime.max.replace(tzinfo=pod.created.tzinfo)
    end = parse_time(pod.raw["metadata"]["deletionTimestamp"])
    return end if is_on_lost_node(pod) else end + _SILENCE
