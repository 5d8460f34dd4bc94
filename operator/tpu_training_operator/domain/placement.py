"""When a gang that has found nodes for only a part of its workers gives them back. Called by the planner.

Two gangs that each hold what the other still needs would wait for ever. A gang with no node at all is in nobody's
way and may wait as long as it likes.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tpu_training_operator.api.run_policy import RunPolicy
from tpu_training_operator.domain.observed import WorkerPod, parse_time


@dataclass(frozen=True)
class PartlyPlaced:
    """`waiting` of `workers` workers have no node; at `deadline` the others give theirs back."""

    waiting: int
    workers: int
    deadline: datetime


def partly_placed(pods: Sequence[WorkerPod], policy: RunPolicy) -> PartlyPlaced | None:
    """None while all of the gang has nodes, or none of it.

    The time runs from the last progress, the youngest pod or the latest placement: the nodes of a large slice come up
    one after the other, and a gang may have queued for them for hours.
    """
    waiting = sum(pod.node is None for pod in pods)
    if waiting in (0, len(pods)):
        return None
    times = [pod.raw["metadata"]["creationTimestamp"] for pod in pods]
    times += [
        placed for pod in pods if pod.node and (placed := pod.condition("PodScheduled").get("lastTransitionTime"))
    ]
    deadline = max(map(parse_time, times)) + timedelta(seconds=policy.start_deadline_seconds)
    return PartlyPlaced(waiting, len(pods), deadline)


def pause_after_release(policy: RunPolicy, uid: str, attempt: int) -> timedelta:
    """The wait before the attempt after `attempt`: 0.5 to 1.5 times `backoff.maxSeconds`.

    Another one for every job and attempt, so that gangs which were in each other's way do not meet again; computed
    and not drawn, so that every operator that decides this decides the same.
    """
    digest = hashlib.sha256(f"{uid}/{attempt}".encode()).digest()
    share = int.from_bytes(digest[:8]) / 2**64
    return timedelta(seconds=policy.restart.backoff.max_seconds * (0.5 + share))
