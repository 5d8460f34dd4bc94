"""How a job moves to another of its slices.

A move is the next attempt on another slice. One status write raises the attempt and names the slice; later passes stop
the old workers, wait until they are gone and create the new ones, as after a restart. So two gangs never run at once,
and if the operator dies, the next one continues the move. No failure class is charged.
"""

from collections.abc import Sequence
from dataclasses import replace

from tpu_training_operator.api.conditions import ConditionType, EventReason, Reason
from tpu_training_operator.api.status import (
    LONGEST_TEXT,
    MOST_MOVES,
    Activity,
    Goodput,
    Move,
    PlacementReason,
    Progress,
    State,
    Status,
)
from tpu_training_operator.domain.cluster_state.observed import format_time
from tpu_training_operator.domain.job.options import Option
from tpu_training_operator.domain.objects.actions import AT_ONCE, Event, Plan
from tpu_training_operator.domain.plan.common.admission import is_queued, on_slice
from tpu_training_operator.domain.plan.common.conditions import Kind, ReadyState
from tpu_training_operator.domain.plan.common.context import Context
from tpu_training_operator.domain.plan.common.goodput import lost, saved
from tpu_training_operator.domain.plan.common.progress import new_attempt
from tpu_training_operator.domain.plan.common.rung_status import on_rung
from tpu_training_operator.domain.plan.common.slice_record import put_on
from tpu_training_operator.domain.plan.placement.search import FOR_CAPACITY, Due


def carry_out(ctx: Context, due: Due) -> Plan:
    return move(ctx, due.to, due.reason, due.why)


def move(ctx: Context, to: Option, reason: PlacementReason, why: str, status: Status | None = None) -> Plan:
    """The next attempt, on `to`. `why`: a clause for people. `status`: with anything else that has been decided."""
    status = on_rung(status or ctx.status, ctx.rung and replace(ctx.rung, option=to))
    moved = _recorded(ctx, to, reason, why)
    where = _where(moved)
    is_move = to.number != ctx.option.number
    begins = f"moves from {ctx.option} to {to}{where}" if is_move else f"starts on {to}"
    message = f"attempt {ctx.next_attempt} {begins}: {why}"
    placement = put_on(status.placement, to, reason, ctx.now)
    searches = placement.searches + (reason in FOR_CAPACITY)
    status = on_slice(ctx, status, to, message)
    waits = is_queued(status)
    activity = Activity.MOVING if ctx.has_trained and not waits else Activity.QUEUE
    status = replace(
        status,
        attempt=ctx.next_attempt,
        placement=replace(
            placement, searches=searches, moves=_fitting([*placement.moves, *([moved] if is_move else [])])
        ),
        resolved=to.resolution.resolved,
        progress=_translated(new_attempt(status.progress), ctx.option, to),
        restarts=replace(status.restarts, next_attempt_time=None),
        goodput=ctx.charge(_after_stop(ctx), ctx.now, activity),
    )
    ready = ReadyState(State.QUEUED if waits else State.STARTING, Kind.IN_PROGRESS, Reason.MOVING, message)
    status = ctx.with_condition(status, ConditionType.GANG_READY, False, ready.reason, message)
    return Plan(status=ctx.present(status, ready), events=(Event(EventReason.MOVING, message),), again=AT_ONCE)


def _after_stop(ctx: Context) -> Goodput:
    """A gang that trains saves before it stops. One that has failed is already accounted for."""
    if not ctx.is_running:
        return ctx.settled_goodput()
    goodput = ctx.goodput_at_end(ctx.now)
    return saved(goodput) if ctx.job.spec.checkpoint is not None else lost(goodput)


def _recorded(ctx: Context, to: Option, reason: PlacementReason, why: str) -> Move:
    step = ctx.status.progress.step if ctx.status.progress else None
    return Move(
        from_=ctx.option.number,
        to=to.number,
        from_slice=str(ctx.option),
        to_slice=str(to),
        step=step,
        examples=None if step is None else step * ctx.resolution.recipe.batch.total,
        at=format_time(ctx.now),
        reason=str(reason),
        why=why[:LONGEST_TEXT],
    )


def _where(moved: Move) -> str:
    return f" at step {moved.step} ({moved.examples} examples)" if moved.step else ""


def _fitting(moves: Sequence[Move]) -> list[Move]:
    """As many as the status has room for. Those for lack of capacity tell least, and are dropped first."""
    kept = list(moves)
    while len(kept) > MOST_MOVES:
        kept.pop(next((i for i, one in enumerate(kept[:-1]) if one.reason in FOR_CAPACITY), 0))
    return kept


def _translated(progress: Progress | None, before: Option, after: Option) -> Progress | None:
    """With another global batch, the same examples are another number of steps."""
    sizes = before.resolution.recipe.batch.total, after.resolution.recipe.batch.total
    if progress is None or sizes[0] == sizes[1]:
        return progress
    saved = progress.checkpoint_step
    return replace(
        progress,
        step=progress.step * sizes[0] // sizes[1],
        total_steps=after.resolution.recipe.train_steps,
        checkpoint_step=None if saved is None else saved * sizes[0] // sizes[1],
    )
