"""The one status write that begins an attempt, whatever the reason: a start, a resumption, a restart, a move, a rung.

The attempt, its slice, its rung and whether it may have workers are written together, in a pass that does nothing else
(ADR 2). The callers decide only what is meant to differ, and put it into `status` before:

- What the previous attempt has cost, and the activity from now on (`then`).
- A restart names the time of the next attempt, and a move clears it: the wait was for the slice that the job leaves. A
  resumption keeps it, so that suspending a job does not shorten its backoff.
- Only a passed rung gives all restarts back and forgets the progress: the next rung is another training.
- Only a start and a resumption end a suspension.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tpu_training_operator.api.conditions import ConditionType, EventReason, Reason, without_condition
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.status import Activity, Failure, Move, PlacementReason, State, Status
from tpu_training_operator.domain.cluster_state.observed import format_time
from tpu_training_operator.domain.cluster_state.workload import Queue
from tpu_training_operator.domain.job.options import SliceOption
from tpu_training_operator.domain.job.rungs import rung_of
from tpu_training_operator.domain.objects.actions import AT_ONCE, Event
from tpu_training_operator.domain.plan.common.conditions import ReadyState, is_held
from tpu_training_operator.domain.plan.common.context import Context
from tpu_training_operator.domain.plan.common.progress import carry_over
from tpu_training_operator.domain.plan.common.rung_status import record_rung
from tpu_training_operator.domain.plan.common.slice_record import reason_to_stay, record_start
from tpu_training_operator.domain.plan.common.starts import add_start
from tpu_training_operator.domain.plan.plan import Plan, Turn


@dataclass(frozen=True)
class Why:
    """Why an attempt begins: `reason` and `message` for the conditions, `event` with the same message, if it is worth
    one. `state`: what the job shows, unless the attempt waits in a queue."""

    reason: Reason
    event: EventReason | None
    message: str
    warning: bool = False
    state: State = State.STARTING


def begin_attempt(
    ctx: Context,
    option: SliceOption,
    why: Why,
    status: Status,
    *,
    then: Activity = Activity.QUEUE,
    placed: PlacementReason | None = None,
    move: Move | None = None,
    events: Sequence[Event] = (),
) -> Plan:
    """Plans the next attempt on `option`. `status`: has everything else that was decided. Its goodput is complete up to
    now, and continues with the activity `then`. `placed`: why the attempt is on that slice; None if it stays where the
    job is. `events`: those before the attempt's own."""
    if ctx.attempt == 0 or option.number != ctx.option.number or not ctx.may_have_workers:
        status = record_admission(ctx, status, option, why.message)
    waits = is_held(status)
    status = replace(
        status,
        attempt=ctx.next_attempt,
        start_time=status.start_time or (None if waits else format_time(ctx.now)),
        progress=carry_over(status.progress),
        goodput=status.goodput and ctx.charge(status.goodput, ctx.now, Activity.QUEUE if waits else then),
        starts=add_start(status.starts, ctx.next_attempt, _new_failure(ctx, status), str(why.reason), ctx.now),
    )
    why = replace(why, state=State.QUEUED) if waits else why
    return _write(ctx, option, why, status, placed or reason_to_stay(status.placement, option), move, events)


def _new_failure(ctx: Context, status: Status) -> Failure | None:
    """Returns the failure for which the attempt begins; None if it begins for another reason."""
    return None if status.last_failure == ctx.status.last_failure else status.last_failure


def adopt_attempt(ctx: Context, attempt: int, why: Why) -> Plan:
    """Plans to continue an attempt that the status has lost. Its workers exist, so it does not begin again: what they
    have reported and used counts, and its queue decides in the next pass whether they may stay."""
    status = replace(ctx.status, attempt=attempt, start_time=ctx.status.start_time or format_time(ctx.now))
    return _write(ctx, ctx.option, why, status, PlacementReason.STATUS_LOST)


def _write(
    ctx: Context,
    option: SliceOption,
    why: Why,
    status: Status,
    placed: PlacementReason,
    move: Move | None = None,
    events: Sequence[Event] = (),
) -> Plan:
    rung = rung_of(ctx.options, ctx.lower_rungs, status.rungs)
    status = replace(
        record_rung(status, rung and replace(rung, option=option)),
        placement=record_start(status.placement, option, placed, ctx.now, move),
        resolved=option.resolution.resolved,
    )
    status = ctx.with_condition(status, ConditionType.GANG_READY, False, why.reason, why.message)
    ready = ReadyState(why.state, why.reason, why.message)
    own = () if why.event is None else (Event(why.event, why.message, warning=why.warning),)
    status = ctx.present(status, ready)
    return Plan(status=status, events=(*events, *own), again=AT_ONCE, turn=Turn.ATTEMPT)


# The condition Admitted of a job in a queue: whether its attempt may have workers (see `queueing`).


def record_admission(ctx: Context, status: Status, option: SliceOption, message: str) -> Status:
    """Returns the status that begins an attempt on that slice. Until the Workload of the slice is admitted, the attempt
    waits without workers. `message`: why it waits."""
    queue = ctx.queue_on(option)
    if queue is None:
        return replace(status, conditions=without_condition(status.conditions, ConditionType.ADMITTED))
    if queue.workload is None or not queue.workload.is_admitted:
        return ctx.with_condition(status, ConditionType.ADMITTED, False, Reason.QUEUED, message)
    return ctx.with_condition(status, ConditionType.ADMITTED, True, Reason.ADMITTED, describe_admission(queue))


def describe_admission(queue: Queue) -> str:
    workload = queue.workload
    if workload is None:
        return ""
    flavors = f" with {', '.join(workload.flavors)}" if workload.flavors else ""
    return f"admitted by ClusterQueue {workload.cluster_queue}{flavors}"
