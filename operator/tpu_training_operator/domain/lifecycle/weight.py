"""Which decisions are taken only on what the API server says now, and not on what a watch has told so far.

A watch may be late, and the watch of pods may be later than that of jobs. Most decisions do not mind: deletions name a
uid, and no status is written over one that was not read. But pods that are not known yet look like pods that are gone.
So whatever replaces, stops, creates or names workers needs the present state of the gang:

- Otherwise a gang that another operator process has just started would be taken for one that has lost its workers.
- Otherwise workers would be created beside those of an earlier attempt.
- Otherwise the workers' names would lead to addresses that others may have by now.
- Otherwise a worker that ends with its job would be deleted as one that still runs, and its log with it.
"""

from tpu_training_operator.api.conditions import ConditionType, is_true
from tpu_training_operator.api.status import Status
from tpu_training_operator.domain.actions import Plan, Publish
from tpu_training_operator.domain.objects.worker_pod import WorkerCreations

_ENDS = (ConditionType.SUCCEEDED, ConditionType.FAILED)
_TURNS = (*_ENDS, ConditionType.SUSPENDED)


def weighs(before: Status, decided: Plan) -> bool:
    """Whether the plan begins an attempt, creates its workers or publishes their names, ends the job or suspends it, or
    cleans up after its end."""
    has_ended = before.completion_time is not None or any(is_true(before.conditions, kind) for kind in _ENDS)
    if has_ended and decided.stages:
        return True
    # Looking into the other stages would build thousands of pods.
    if any(isinstance(stage, WorkerCreations) or isinstance(stage[0], Publish) for stage in decided.stages if stage):
        return True
    return decided.status is not None and _turns(before, decided.status)


def _turns(before: Status, after: Status) -> bool:
    if after.attempt != before.attempt or (after.completion_time is not None and before.completion_time is None):
        return True
    return any(is_true(after.conditions, kind) and not is_true(before.conditions, kind) for kind in _TURNS)
