"""How a job moves to another of its slices.

A move is the next attempt on another slice. One status write raises the attempt and names the slice; later passes stop
the old workers, wait until they are gone and create the new ones, as after a restart. So two gangs never run at once,
and if the operator dies, the next one continues the move. No failure class is charged.
"""

from dataclasses import replace

from tpu_training_operator.api.conditions import EventReason, Reason
from tpu_training_operator.api.status import (
    LONGEST_TEXT,
    Activity,
    Goodput,
    Move,
    PlacementReason,
    Progress,
)
from tpu_training_operator.domain.cluster_state.observed import format_time
from tpu_training_operator.domain.job.options import SliceOption
from tpu_training_operator.domain.plan.common.attempt import Why, begin_attempt
from tpu_training_operator.domain.plan.common.context import Context
from tpu_training_operator.domain.plan.common.ledger import mark_lost, mark_saved
from tpu_training_operator.domain.plan.placement.search import PendingMove
from tpu_training_operator.domain.plan.plan import Plan


def carry_out(ctx: Context, due: PendingMove) -> Plan:
    return move(ctx, due.to, due.reason, due.why)


def move(ctx: Context, to: SliceOption, reason: PlacementReason, why: str) -> Plan:
    """Plans the next attempt on `to`. `why`: a clause for people."""
    record = _record(ctx, to, reason, why)
    is_move = to.number != ctx.option.number
    where = f" at step {record.step} ({record.examples} examples)" if record.step else ""
    begins = f"moves from {ctx.option} to {to}{where}" if is_move else f"starts on {to}"
    status = replace(
        ctx.status,
        progress=_translate(ctx.status.progress, ctx.option, to),
        restarts=replace(ctx.status.restarts, next_attempt_time=None),
        goodput=_settle_stopped(ctx),
    )
    return begin_attempt(
        ctx,
        to,
        Why(Reason.MOVING, EventReason.MOVING, f"attempt {ctx.next_attempt} {begins}: {why}"),
        status,
        then=Activity.MOVING if ctx.has_trained else Activity.QUEUE,
        placed=reason,
        move=record if is_move else None,
    )


def _settle_stopped(ctx: Context) -> Goodput:
    """Returns the goodput of a gang that stops, after it has saved. The time of one that has failed is already
    accounted for."""
    if not ctx.is_running:
        return ctx.settled_goodput()
    goodput = ctx.goodput_at_end(ctx.now)
    return mark_saved(goodput) if ctx.job.spec.checkpoint is not None else mark_lost(goodput)


def _record(ctx: Context, to: SliceOption, reason: PlacementReason, why: str) -> Move:
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


def _translate(progress: Progress | None, before: SliceOption, after: SliceOption) -> Progress | None:
    """Translates the steps to another global batch: the same examples are another number of steps."""
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
