"""How long a gang may hold nodes without running on them.

Two gangs that each hold what the other still needs would wait for ever. A gang with no node at all is in nobody's way
and may wait as long as it likes. One that has all its nodes and does not start on them (a volume that cannot be
mounted, a runtime that hangs) would hold its chips for ever, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tpu_training_operator.api.run_policy import FailureClass, RunPolicy
from tpu_training_operator.api.status import Failure
from tpu_training_operator.domain.failures.messages import with_ending
from tpu_training_operator.domain.failures.pod_signs import has_started
from tpu_training_operator.domain.hosts import waits_for
from tpu_training_operator.domain.observed import WorkerPod, format_time

# A large image takes its time on a fresh node.
_LONGEST_START = timedelta(minutes=30)


@dataclass(frozen=True)
class Late:
    """A worker that has its node and has not started; at `deadline` it counts as failed, `limit` after it got there."""

    pod: WorkerPod
    limit: timedelta
    deadline: datetime


def starts_late(pods: Sequence[WorkerPod], policy: RunPolicy) -> Late | None:
    """None for a gang that lacks nodes, and for one in which every container has started."""
    placed = [pod.placed for pod in pods if pod.placed is not None]
    waiting = [pod for pod in pods if not has_started(pod) and not pod.has_ended]
    if len(placed) < len(pods) or not waiting:
        return None
    limit = max(_LONGEST_START, timedelta(seconds=policy.start_deadline_seconds))
    return Late(waiting[0], limit, max(placed) + limit)


def not_started(late: Late, attempt: int, now: datetime) -> Failure:
    """A worker that has had its node for long, and whose container has not started."""
    pod = late.pod
    what = f"the worker has had its node for {late.limit.total_seconds():.0f} s, and its container has not started"
    return Failure(
        attempt=attempt,
        pod=pod.name,
        node=pod.node,
        slice=pod.worker.slice,
        host=pod.worker.host,
        failure_class=FailureClass.INFRASTRUCTURE,
        reason="NotStarted",
        message=with_ending(what, waits_for(pod)),
        time=format_time(now),
    )


@dataclass(frozen=True)
class HeldUp:
    """`waiting` of `workers` workers have no node; at `deadline` the others give theirs back."""

    waiting: int
    workers: int
    deadline: datetime


def held_up(pods: Sequence[WorkerPod], policy: RunPolicy, avoided: Sequence[str]) -> HeldUp | None:
    """None while all of the gang has nodes; or none of it, unless it is kept from some nodes.

    The time runs from the last progress, the youngest pod or the latest placement: the nodes of a large slice come up
    one after the other, and a gang may have queued for them for hours.
    """
    waiting = sum(pod.node is None for pod in pods)
    if waiting == 0 or (waiting == len(pods) and not avoided):
        return None
    last = max(max(pod.created, pod.placed or pod.created) for pod in pods)
    return HeldUp(waiting, len(pods), last + timedelta(seconds=policy.start_deadline_seconds))
