"""How a job moves to another of its slices, and when a gang that finds no nodes does.

Without alternatives, a gang waits as long as it takes. With alternatives, it waits for each slice in turn, and after
the last one starts over, because any of them may be free by now. Every round without success doubles the waits, up to
an hour, so that the same pods do not come and go in a full cluster all night.

A job that may run on fewer of its slices takes as many as have found their nodes. If those are too few, it first asks
for the fewest, which it may get where the provider grants all nodes or none.

In the first round, a gang does not wait for what the cluster will never grant: a quota too small for the gang, an
admission policy. What the cluster may grant later, such as a quota that others use up now, it waits for as it does for
nodes. In a queue, a gang waits for its admission in the same way.

A move is the next attempt on another slice. One status write raises the attempt and names the slice; later passes stop
the old workers, wait until they are gone and create the new ones, as after a restart. So two gangs never run at once,
and if the operator dies, the next one continues the move. No failure class is charged.
"""

import re
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from math import floor

from tpu_training_operator.api.conditions import Condition, ConditionType, EventReason, Reason, find
from tpu_training_operator.api.placement import OnLoss
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.status import LONGEST_TEXT, Activity, Goodput, Move, PlacementReason, Progress
from tpu_training_operator.api.words import count, span
from tpu_training_operator.domain.cluster_state.observed import format_time, parse_time
from tpu_training_operator.domain.cluster_state.workload import Queue
from tpu_training_operator.domain.job.options import SliceOption
from tpu_training_operator.domain.objects.actions import AT_ONCE
from tpu_training_operator.domain.plan.common.accounts import mark_lost, mark_saved
from tpu_training_operator.domain.plan.common.attempt import Why, begin_attempt
from tpu_training_operator.domain.plan.common.context import Context
from tpu_training_operator.domain.plan.common.slice_record import FOR_CAPACITY
from tpu_training_operator.domain.plan.plan import Plan

_LONGEST_WAIT = timedelta(hours=1)
# These turn a second into an hour. With more, the longest wait that a job may name would end beyond the last possible
# date.
_MOST_DOUBLINGS = 12
# A pod that fits on a node is placed well within this time.
_TO_SCHEDULE = timedelta(seconds=10)
_LONG_AGO = datetime.min.replace(tzinfo=UTC)
# How much of Kueue's message the job's message repeats.
_LONGEST_WORDS = 300
_AMOUNT = re.compile(r"([^\s,=]+)=(\d+)(?=,|$|\s)")
_QUOTA = re.compile(r"exceeded quota: .*requested: (?P<requested>.*), used: .*, limited: (?P<limited>.*)")


@dataclass(frozen=True)
class PendingMove:
    """A move that is due at a certain time, unless the gang finds its nodes first. `because`: what delays it, besides
    the wait for the slice."""

    to: SliceOption
    at: datetime
    reason: PlacementReason
    why: str
    unless: str = "it finds nodes"
    because: str = ""

    def words(self) -> str:
        return f"moves to {self.to} at {format_time(self.at)} unless {self.unless} first{self.because}"


def next_slice(ctx: Context) -> PendingMove | None:
    """Returns the move that comes next; None for a job that has nowhere to go, and for one that should stay because its
    gang runs or has all its nodes."""
    if len(ctx.options) == 1 or ctx.is_on_lower_rung or ctx.is_running:
        return None
    waits_since, was_here = _waiting_since(ctx)
    policy = ctx.job.spec.placement
    if was_here and (policy is None or policy.on_loss is not OnLoss.MOVE):
        return None
    due = _find_due(ctx, waits_since, was_here)
    # Moves in search of nodes, before the job has run, are not limited.
    next_allowed = find_next_allowed(ctx) if was_here else None
    if due is None or next_allowed is None or due.at >= next_allowed:
        return due
    return replace(due, at=next_allowed, because=f"; {describe_limit(ctx)}")


def _find_due(ctx: Context, waits_since: datetime, was_here: bool) -> PendingMove | None:
    """Returns the next move as the waits for the slices have it; None as `next_slice`."""
    to = _next_option(ctx)
    if ctx.queue is not None and (ctx.attempt == 0 or ctx.is_held):
        return _next_without_quota(ctx, ctx.queue, to)
    if _refusal(ctx) is None and all(pod.node is not None for pod in ctx.pods):
        return None
    certain = _certain_refusal(ctx)
    wait = _wait(ctx, to, certain=certain is not None)
    # The wait may be over before the attempt has a worker: the backoff and the end of the old workers count, and the
    # scheduler needs a moment to find free nodes.
    first_pod_time = min((pod.created for pod in ctx.pods), default=_LONG_AGO)
    at = max(waits_since + wait, first_pod_time + min(wait, _TO_SCHEDULE), _latest_node_deadline(ctx))
    if certain is not None:
        return PendingMove(to, at, PlacementReason.NOT_ADMITTED, certain)
    limit = f"{wait.total_seconds():.0f} s"
    placed = len(_placed_slices(ctx))
    so_far = f"; {placed} of {ctx.option.layout.slices} slices have theirs" if placed else ""
    if was_here:
        return PendingMove(to, at, PlacementReason.LOST, f"{ctx.option} did not come back within {limit}{so_far}")
    return PendingMove(to, at, PlacementReason.NO_CAPACITY, f"no nodes for {ctx.option} within {limit}{so_far}")


def _next_without_quota(ctx: Context, queue: Queue, to: SliceOption) -> PendingMove | None:
    """Returns the next move of a gang that Kueue does not admit; None if no other slice would help, because the queue
    itself does not work or the job was taken out of it."""
    workload = queue.workload
    if workload is None or queue.problem or not queue.name or not (workload.waits_in_line or workload.is_given_up):
        return None
    since, was_here = _waiting_since(ctx)
    wait = _wait(ctx, to, certain=workload.is_too_large or workload.is_given_up)
    at = since + wait
    if workload.reserved_since is not None:
        # The quota is reserved, and an admission check is bringing up the nodes.
        patience = timedelta(seconds=ctx.job.spec.run_policy.start_deadline_seconds)
        at = max(at, parse_time(workload.reserved_since) + patience)
    reason, why = PlacementReason.NO_CAPACITY, f"did not admit {ctx.option} within {wait.total_seconds():.0f} s"
    if workload.is_too_large:
        reason, why = PlacementReason.NOT_ADMITTED, f"never has the quota for {ctx.option}"
    elif workload.is_given_up:
        reason, why = PlacementReason.NOT_ADMITTED, f"has given up {ctx.option}"
    elif was_here:
        reason, why = PlacementReason.LOST, f"did not admit {ctx.option} again within {wait.total_seconds():.0f} s"
    explanation = workload.waits_for()[:_LONGEST_WORDS]
    return PendingMove(to, at, reason, f"queue {queue.name} {why}: {explanation}", "Kueue admits it")


def find_next_allowed(ctx: Context) -> datetime | None:
    """Returns when the job may leave a slice on which it has run, because the oldest move within the window of maxMoves
    no longer counts then; None if it may at once."""
    placement, policy = ctx.status.placement, ctx.job.spec.placement
    if placement is None or policy is None:
        return None
    most, window = policy.max_moves.count, policy.max_moves.window
    times = sorted(parse_time(move.at) for move in placement.moves if move.reason not in FOR_CAPACITY)
    left = times[-most] + window if len(times) >= most else _LONG_AGO
    return left if left > ctx.now else None


def describe_limit(ctx: Context) -> str:
    """Says that no move is left for now, for example "6 of 6 moves in 24 h are used"."""
    policy = ctx.job.spec.placement
    assert policy is not None
    most, window = policy.max_moves.count, span(policy.max_moves.window_seconds)
    return f"{most} of {count(most, 'move')} in {window} {'is' if most == 1 else 'are'} used"


def _next_option(ctx: Context) -> SliceOption:
    """Returns the option with as many slices as have found their nodes, if there is one; else the one with the fewest
    slices; for a job without such options, the next in order of preference."""
    fewer = _fewer_slices(ctx)
    if fewer:
        placed_count = len(_placed_slices(ctx))
        return next((option for option in fewer if option.layout.slices <= placed_count), fewer[-1])
    others = [option for option in ctx.options if not option.is_own or option.number == 0]
    place = others.index(ctx.option) if ctx.option in others else 0
    return others[(place + 1) % len(others)]


def _fewer_slices(ctx: Context) -> list[SliceOption]:
    """Returns the options with fewer of the present slices, the most first."""
    if not ctx.option.is_own:
        return []
    return [option for option in ctx.options if option.is_own and option.number > ctx.option.number]


def _placed_slices(ctx: Context) -> set[int]:
    placed = Counter(pod.worker.slice for pod in ctx.pods if pod.node is not None)
    return {slice_ for slice_, hosts in placed.items() if hosts == ctx.option.layout.hosts_per_slice}


def _waiting_since(ctx: Context) -> tuple[datetime, bool]:
    """Returns since when the gang waits, and whether it has run on this slice before."""
    changed = {condition.type: parse_time(condition.last_transition_time) for condition in ctx.status.conditions}
    # Before the first attempt, a job waits for nothing but its queue.
    queued = changed.get(ConditionType.ADMITTED)
    placed = parse_time(ctx.status.placement.since) if ctx.status.placement else queued or ctx.now
    stopped = changed.get(ConditionType.GANG_READY, placed)
    resumed = changed.get(ConditionType.SUSPENDED, placed)
    # A time in the future means that the clock was set back.
    was_here = ctx.status.placement is not None and ctx.status.placement.has_run
    return min(max(placed, stopped, resumed, queued or placed), ctx.now), was_here


def _wait(ctx: Context, to: SliceOption, *, certain: bool) -> timedelta:
    """Returns how long the job waits for its slice before it goes on to `to`. The first slice names no wait, so before
    the job returns there it waits for the longest of the others' waits."""
    searches = ctx.status.placement.moves_for_capacity if ctx.status.placement else 0
    # How many slices a round of moves tries.
    stops = 1 + sum(not option.is_own for option in ctx.options)
    stops += any(option.is_own and option.number for option in ctx.options)
    rounds = min(searches // stops, _MOST_DOUBLINGS)
    if certain and rounds == 0:
        return AT_ONCE
    first_wait = to.choice.wait if to.number else max(option.choice.wait for option in ctx.options)
    doubled: timedelta = first_wait * (1 << rounds)
    return min(doubled, max(first_wait, _LONGEST_WAIT))


def _latest_node_deadline(ctx: Context) -> datetime:
    """Returns until when the gang waits for further nodes, because those of a large slice come up one after the other.
    A node that was there before its pod, such as one that survived the loss of the slice, is no sign that others will
    come."""
    patience = timedelta(seconds=ctx.job.spec.run_policy.start_deadline_seconds)
    # Where fewer slices will do, a complete slice does not promise another one.
    complete = _placed_slices(ctx) if _fewer_slices(ctx) else set[int]()
    came_up = (
        pod.placed
        for pod in ctx.pods
        if pod.placed is not None and pod.placed > pod.created + _TO_SCHEDULE and pod.worker.slice not in complete
    )
    return max((placed + patience for placed in came_up), default=_LONG_AGO)


def _refusal(ctx: Context) -> Condition | None:
    stalled = find(ctx.status.conditions, ConditionType.STALLED)
    is_about_workers = stalled is not None and stalled.reason in (Reason.NOT_PERMITTED, Reason.INVALID_OBJECT)
    return stalled if is_about_workers and ctx.missing else None


def _certain_refusal(ctx: Context) -> str | None:
    """Says how the cluster refuses the workers, if waiting cannot help and another slice may. A right that the operator
    lacks is missing on every slice, so it does not count."""
    refusal = _refusal(ctx)
    if refusal is None:
        return None
    is_denied = refusal.reason == Reason.INVALID_OBJECT or "denied" in refusal.message
    if not is_denied and not _is_too_small(refusal.message, ctx.resolution.layout.hosts):
        return None
    return f"the cluster refuses the workers there: {refusal.message}"


def _is_too_small(message: str, hosts: int) -> bool:
    """Returns whether the quota could not hold the gang even if nothing else used it."""
    match = _QUOTA.search(message)
    if match is None:
        return False
    limited = {name: int(amount) for name, amount in _AMOUNT.findall(match["limited"])}
    requested = {name: int(amount) for name, amount in _AMOUNT.findall(match["requested"])}
    return any(name in limited and amount * hosts > limited[name] for name, amount in requested.items())


def carry_out(ctx: Context, due: PendingMove) -> Plan:
    return move(ctx, due.to, due.reason, due.why)


def move(ctx: Context, to: SliceOption, reason: PlacementReason, why: str) -> Plan:
    """Plans the next attempt on `to`. `why`: a clause for people."""
    record = _record(ctx, to, reason, why)
    is_move = to.number != ctx.option.number
    where = f", last reported step {record.step} ({record.examples} examples)" if record.step else ""
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
    old, new = before.resolution.recipe, after.resolution.recipe
    if progress is None or old.batch.total == new.batch.total:
        return progress
    saved, ratio = progress.checkpoint_step, Fraction(old.batch.total, new.batch.total)
    if old.fewest_steps < old.train_steps:
        # AdaScale needs more examples than the recipe; the same share of the training is what it goes on from.
        ratio = Fraction(old.train_steps * old.step_batch, max(progress.total_steps, 1) * new.batch.total)
    return replace(
        progress,
        step=floor(progress.step * ratio),
        total_steps=new.train_steps,
        checkpoint_step=None if saved is None else floor(saved * ratio),
    )
