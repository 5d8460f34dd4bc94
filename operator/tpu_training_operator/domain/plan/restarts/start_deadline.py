"""How long a gang may hold nodes without running on them.

Two gangs that each hold nodes which the other needs would wait forever. A gang without any node blocks no other and may
wait as long as it takes. A gang that has all its nodes and does not start on them, because a volume cannot be mounted
or a runtime hangs, would hold its chips forever, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tpu_training_operator.api.failures import FailureReason
from tpu_training_operator.api.run_policy import FailureClass, RunPolicy
from tpu_training_operator.api.status import Failure
from tpu_training_operator.domain.cluster_state.hosts import why_not_ready
from tpu_training_operator.domain.cluster_state.observed import WorkerPod
from tpu_training_operator.domain.failures.first import failure_of
from tpu_training_operator.domain.failures.messages import with_ending
from tpu_training_operator.domain.failures.pod_signs import has_started

# Pulling a large image on a new node takes a while.
_LONGEST_START = timedelta(minutes=30)


@dataclass(frozen=True)
class Late:
    """A worker that has its node and has not started. It counts as failed at `deadline`, `limit` after it got there."""

    pod: WorkerPod
    limit: timedelta
    deadline: datetime


def find_late(pods: Sequence[WorkerPod], policy: RunPolicy) -> Late | None:
    """Returns the worker that is late; None for a gang that lacks nodes, or whose containers have all started."""
    placed = [pod.placed for pod in pods if pod.placed is not None]
    waiting = [pod for pod in pods if not has_started(pod) and not pod.has_ended]
    if len(placed) < len(pods) or not waiting:
        return None
    limit = max(_LONGEST_START, timedelta(seconds=policy.start_deadline_seconds))
    return Late(waiting[0], limit, max(placed) + limit)


def start_failure(late: Late, event: str, attempt: int, now: datetime) -> Failure:
    """Returns the failure of a late worker. `event`: the newest event that explains why the pod waits; empty if none is
    known."""
    pod = late.pod
    waits = f"{why_not_ready(pod)} ({event})" if event else why_not_ready(pod)
    what = f"the container has not started within {late.limit.total_seconds():.0f} s on its node"
    message = with_ending(what, waits)
    return failure_of(pod, attempt, FailureClass.INFRASTRUCTURE, FailureReason.NOT_STARTED, message, now)


@dataclass(frozen=True)
class PartlyPlaced:
    """`waiting` workers have no node. At `deadline` the others release theirs."""

    waiting: int
    deadline: datetime


def find_partly_placed(pods: Sequence[WorkerPod], policy: RunPolicy, avoided: Sequence[str]) -> PartlyPlaced | None:
    """Returns what a partly placed gang lacks; None if all workers have nodes, or if none has one and the job avoids no
    node (`avoided`).

    The time runs from the latest progress, the youngest pod or the latest placement: the nodes of a large slice come up
    one after the other, and a gang may have queued for hours before.
    """
    waiting = sum(pod.node is None for pod in pods)
    if waiting == 0 or (waiting == len(pods) and not avoided):
        return None
    last = max(max(pod.created, pod.placed or pod.created) for pod in pods)
    return PartlyPlaced(waiting, last + timedelta(seconds=policy.start_deadline_seconds))


def is_partly_refused(pods: Sequence[WorkerPod], policy: RunPolicy, now: datetime) -> bool:
    """Whether the cluster has refused the missing workers for so long that the others hold their nodes for nothing."""
    return bool(pods) and now >= max(pod.created for pod in pods) + timedelta(seconds=policy.start_deadline_seconds)
