"""What a job shows while passes over it go on failing, and how that goes away again.

The state and Ready stay as they were decided last: nothing new is known. Only Reconciling says what is wrong, and for
kstatus the job is in progress. As Ready holds the last decision, the first pass that succeeds can restore Reconciling
from it, whichever operator makes that pass.
"""

from dataclasses import replace
from datetime import datetime

from tpu_training_operator.api.conditions import (
    ConditionType,
    Reason,
    find,
    is_true,
    with_condition,
    without_condition,
)
from tpu_training_operator.api.status import Status
from tpu_training_operator.domain.lifecycle.conditions import mark


def retrying(status: Status, message: str, generation: int, now: datetime) -> Status:
    return mark(status, ConditionType.RECONCILING, True, Reason.PROGRESSING_WITH_RETRY, message, generation, now)


def recovered(status: Status) -> Status:
    """The status as it was before the passes failed; the same where none did."""
    reconciling = find(status.conditions, ConditionType.RECONCILING)
    if reconciling is None or reconciling.reason != Reason.PROGRESSING_WITH_RETRY:
        return status
    ready = find(status.conditions, ConditionType.READY)
    if ready is None or ready.is_true or is_true(status.conditions, ConditionType.STALLED):
        conditions = without_condition(status.conditions, ConditionType.RECONCILING)
    else:
        conditions = with_condition(status.conditions, replace(ready, type=ConditionType.RECONCILING, status="True"))
    return replace(status, conditions=conditions)
