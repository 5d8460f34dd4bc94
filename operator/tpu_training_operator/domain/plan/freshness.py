"""Which decisions are taken only on what the API server says now, and not on what a watch has told so far.

A watch may be late, and the watch of pods may be later than that of jobs. Most decisions do not mind: deletions name a
uid, and no status is written over one that was not read. But pods that are not known yet look like pods that are gone.
So whatever replaces, stops, creates or names workers needs the present state of the gang:

- Otherwise a gang that another operator process has just started would be taken for one that has lost its workers.
- Otherwise workers would be created beside those of an earlier attempt.
- Otherwise the workers' names would lead to addresses that others may have by now.
- Otherwise quota would be given back while workers that are not known yet still use the chips.
- Otherwise a worker that ends with its job would be deleted as one that still runs, and its log with it.

What is decided by nothing but a new status needs the present pods only: the status is not written unless the job is
still the one that was read.
"""

from collections.abc import Sequence
from enum import Enum, auto

from tpu_training_operator.api.conditions import ConditionType, is_true
from tpu_training_operator.api.status import Status
from tpu_training_operator.domain.objects.actions import (
    Action,
    Create,
    DeleteWorkload,
    Plan,
    Publish,
    UpdateWorkload,
    WriteWorkloadStatus,
)
from tpu_training_operator.domain.objects.worker_pod import WorkerCreations

_ENDS = (ConditionType.SUCCEEDED, ConditionType.FAILED)
_TURNS = (*_ENDS, ConditionType.SUSPENDED)


class Weight(Enum):
    """What a plan must rest on."""

    NONE = auto()
    """Whatever is known."""
    STATUS = auto()
    """The present pods. It begins an attempt, ends the job or suspends it."""
    EFFECTS = auto()
    """The present job, and the pods read after it. It creates pods or publishes their names, gives quota back, or
    cleans up after the job's end."""


def weight(before: Status, decided: Plan) -> Weight:
    has_ended = before.completion_time is not None or any(is_true(before.conditions, kind) for kind in _ENDS)
    if has_ended and decided.stages:
        return Weight.EFFECTS
    if any(map(_weighs, decided.stages)):
        return Weight.EFFECTS
    if decided.status is None or not _turns(before, decided.status):
        return Weight.NONE
    return Weight.EFFECTS if decided.stages else Weight.STATUS


def _weighs(stage: Sequence[Action]) -> bool:
    # Looking further into the stages would build thousands of pods.
    if isinstance(stage, WorkerCreations) or not stage:
        return bool(stage)
    match stage[0]:
        case Publish() | DeleteWorkload() | Create({"kind": "Pod"}):
            return True
        case UpdateWorkload(frees_quota=frees_quota) | WriteWorkloadStatus(frees_quota=frees_quota):
            return frees_quota
        case _:
            return False


def _turns(before: Status, after: Status) -> bool:
    if after.attempt != before.attempt or (after.completion_time is not None and before.completion_time is None):
        return True
    return any(is_true(after.conditions, kind) and not is_true(before.conditions, kind) for kind in _TURNS)
