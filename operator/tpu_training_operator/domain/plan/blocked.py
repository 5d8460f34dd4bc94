"""What a job shows when its plan cannot be carried out: the cluster refuses something, or passes keep failing."""

from datetime import datetime, timedelta

from tpu_training_operator.api.conditions import (
    ConditionType,
    EventReason,
    Reason,
    find,
    is_true,
    with_condition,
    without_condition,
)
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.domain.cluster_state.multikueue import manager_of
from tpu_training_operator.domain.cluster_state.observed import Object, Observed
from tpu_training_operator.domain.cluster_state.obstacles import Obstacle
from tpu_training_operator.domain.objects.actions import Event
from tpu_training_operator.domain.plan.common.conditions import JobState, ReadyState
from tpu_training_operator.domain.plan.plan import Plan

# A quota may be raised or a name freed at any time, and no event reports it.
_TRY_AGAIN = timedelta(seconds=30)
# Old workers are gone within their grace period. No watch reports when their Service and ConfigMap are.
_SOON = timedelta(seconds=5)


def show_obstacle(observed: Observed, obstacle: Obstacle, now: datetime) -> Plan:
    """Shows the job as in progress if the obstacle passes by itself; else as Stalled, with the cluster's own
    message."""
    look = JobState(observed, Status.read(observed.job.get("status")), now)
    if obstacle.passes:
        state = State.RESTARTING if look.status.state is State.RESTARTING else State.STARTING
        waits = ReadyState(state, obstacle.reason, obstacle.message)
        return Plan(status=look.present(look.status, waits), again=_SOON)
    stalled = ReadyState(State.BLOCKED, obstacle.reason, obstacle.message)
    return Plan(
        status=look.present(look.status, stalled),
        events=(Event(EventReason.BLOCKED, obstacle.message, warning=True),),
        again=_TRY_AGAIN,
    )


def show_retry(observed: Observed, message: str, now: datetime) -> Status:
    """Returns the status while passes keep failing: Reconciling says why, and for kstatus the job is in progress.

    Nothing else changes. As Ready holds the last decision, any operator whose pass succeeds can restore Reconciling
    from it (`undo_retry`). The status of a job that another controller runs stays as it is.
    """
    look = JobState(observed, Status.read(observed.job.get("status")), now)
    if manager_of(observed.job):
        return look.status
    return look.with_condition(look.status, ConditionType.RECONCILING, True, Reason.PROGRESSING_WITH_RETRY, message)


def undo_retry(status: Status, job: Object) -> Status:
    """Returns the status as it was before passes failed; the same object if none did."""
    reconciling = find(status.conditions, ConditionType.RECONCILING)
    if reconciling is None or reconciling.reason != Reason.PROGRESSING_WITH_RETRY or manager_of(job):
        return status
    ready = find(status.conditions, ConditionType.READY)
    if ready is None or ready.is_true or is_true(status.conditions, ConditionType.STALLED):
        return replace(status, conditions=without_condition(status.conditions, ConditionType.RECONCILING))
    restored = replace(ready, type=ConditionType.RECONCILING, status="True")
    return replace(status, conditions=with_condition(status.conditions, restored))
