"""When a gang that has found nodes for only a part of its workers gives them back. Called by the planner.

Two gangs that each hold what the other still needs would wait for ever. A gang with no node at all is in nobody's
way and may wait as long as it likes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tpu_training_operator.api.run_policy import RunPolicy
from tpu_training_operator.domain.observed import WorkerPod


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
