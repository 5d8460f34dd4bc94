"""Which decisions are taken only on what the API server says now, and not on what a watch has told so far.

A watch may be late. Most decisions do not mind: the API server refuses to create what exists, deletions name a uid, and
no status is written over one that was not read. But pods that are not known yet look like pods that are gone. A
decision that replaces or stops a gang because of its pods cannot be taken back, so it needs their present state.
"""

from tpu_training_operator.api.conditions import ConditionType, is_true
from tpu_training_operator.api.status import Status

_FOR_GOOD = (ConditionType.SUCCEEDED, ConditionType.FAILED, ConditionType.SUSPENDED)


def weighs(before: Status, after: Status | None) -> bool:
    """Whether the step from one status to the next (None: the same) begins an attempt, ends the job or suspends it."""
    if after is None:
        return False
    if after.attempt != before.attempt or (after.completion_time is not None and before.completion_time is None):
        return True
    return any(is_true(after.conditions, kind) and not is_true(before.conditions, kind) for kind in _FOR_GOOD)
