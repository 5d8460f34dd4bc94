"""How a gang is stopped without a failure: by the user, or because its budget is used up."""

from collections.abc import Sequence
from dataclasses import dataclass

from tpu_training_operator.api.conditions import ConditionType, EventReason, Reason, find
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.status import Activity, State
from tpu_training_operator.api.words import count
from tpu_training_operator.domain.cluster_state.observed import WorkerPod
from tpu_training_operator.domain.objects.actions import AT_ONCE, Event
from tpu_training_operator.domain.plan.checks.entry_check import reset_check
from tpu_training_operator.domain.plan.common.conditions import ReadyState
from tpu_training_operator.domain.plan.common.context import Context
from tpu_training_operator.domain.plan.common.pod_cleanup import delete_pods, look_again
from tpu_training_operator.domain.plan.plan import Plan, Turn
from tpu_training_operator.domain.plan.queue.queueing import leave_queue


@dataclass(frozen=True)
class Cause:
    """Why the gang stops. `message`: for the conditions. `suspended_message`: for the job once no worker runs;
    `stopping_message`: for the job until then, with {} in place of the workers."""

    reason: Reason
    event: EventReason
    message: str
    suspended_message: str = ""
    stopping_message: str = "waiting for {} to stop"
    warning: bool = False


BY_USER = Cause(
    Reason.SUSPENDED,
    EventReason.SUSPENDED,
    "spec.runPolicy.suspend is true",
    "suspended by spec.runPolicy.suspend; no workers are running",
)


def suspend(ctx: Context, why: Cause, pods: Sequence[WorkerPod]) -> Plan:
    """Stops these workers, each of which saves before it ends. No failure class is charged."""
    ready = ReadyState(State.SUSPENDED, why.reason, why.suspended_message)
    if running := sum(pod.may_use_chips for pod in pods):
        message = why.stopping_message.format(count(running, "worker"))
        ready = ReadyState(State.SUSPENDED, why.reason, message, is_stopping=True)
    before = find(ctx.status.conditions, ConditionType.SUSPENDED)
    status = ctx.status
    if before is None or before.reason != why.reason or not before.is_true:
        status = ctx.with_condition(status, ConditionType.SUSPENDED, True, why.reason, why.message)
    events = () if status is ctx.status else (Event(why.event, ready.message, warning=why.warning),)
    if ctx.is_suspended:
        # Workers may report what they saved until they have stopped.
        status = replace(status, goodput=ctx.status.goodput if running else ctx.goodput_of_stopped())
        batches = (*delete_pods(pods, ctx.now, ctx.reads_to_delete(pods)), *leave_queue(ctx, pods))
        return Plan(batches, ctx.present(status, ready), events, look_again(pods, ctx.now))
    # The condition comes before any worker is stopped: without it, the next pass would take a stopped worker for a
    # failed one.
    status = replace(status, goodput=ctx.charge(ctx.goodput_at_end(ctx.now), ctx.now, Activity.SUSPENDED))
    if status.attempt:
        status = ctx.with_condition(status, ConditionType.GANG_READY, False, why.reason, why.message)
    status = reset_check(ctx, status)
    if find(status.conditions, ConditionType.ADMITTED) is not None:
        # A job without workers is not admitted.
        status = ctx.with_condition(status, ConditionType.ADMITTED, False, Reason.SUSPENDED, why.message)
    return Plan(status=ctx.present(status, ready), events=events, again=AT_ONCE, turn=Turn.SUSPEND)
