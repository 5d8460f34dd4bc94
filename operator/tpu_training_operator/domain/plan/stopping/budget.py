"""How many chip-hours a job may use over all its attempts, and what happens when they are used up.

The gang stops as in a suspension: its workers save, and no failure is charged. If the job is to fail, it fails only
then, so that its last status says what was saved and used. A suspended job resumes by itself as soon as the budget
exceeds what was used.
"""

import math
from dataclasses import dataclass
from datetime import datetime, timedelta

from tpu_training_operator.api.conditions import ConditionType, EventReason, Reason, find, without_condition
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.run_policy import ChipBudget, OnExceeded
from tpu_training_operator.api.status import ChipSeconds, Status, Usage
from tpu_training_operator.api.words import count
from tpu_training_operator.domain.cluster_state.observed import parse_time
from tpu_training_operator.domain.failures.pod_signs import ended_by, has_succeeded
from tpu_training_operator.domain.objects.actions import Event
from tpu_training_operator.domain.plan.common.accounts import Holding, charge_chips, count_vanished
from tpu_training_operator.domain.plan.common.completion import fail
from tpu_training_operator.domain.plan.common.conditions import JobState
from tpu_training_operator.domain.plan.common.context import Context
from tpu_training_operator.domain.plan.plan import Plan
from tpu_training_operator.domain.plan.stopping.suspension import Cause, suspend

_HOUR = 3600
_LOW_PERCENT = 80
# Other looks come sooner than this anyway.
_LONGEST_WAIT = timedelta(days=1)
_LONGEST_LEAVE = timedelta(seconds=10)
_NOW = timedelta(0)


@dataclass(frozen=True)
class Spent:
    """The chip-seconds `used` by all attempts, and their `limit`."""

    used: int
    limit: int

    @property
    def is_all(self) -> bool:
        return self.used >= self.limit

    @property
    def is_most(self) -> bool:
        return 100 * self.used >= _LOW_PERCENT * self.limit

    def words(self) -> str:
        """Says, for example, "10.35 of 10 chip-hours (spec.runPolicy.budget) are used"."""
        return (
            f"{format_hours(self.used)} of {count(self.limit // _HOUR, 'chip-hour')} (spec.runPolicy.budget) are used"
        )


def format_hours(chip_seconds: int) -> str:
    """Returns chip-hours as text, rounded down: the budget must not seem to be used up when it is not."""
    return f"{chip_seconds // 36 / 100:.2f}"


def count_used(look: JobState, status: Status) -> int:
    if status.goodput is None:
        return 0
    spent = charge_chips(status.goodput, look.holding.now, look.holding)
    return spent.total if spent else 0


def read_spent(ctx: Context) -> Spent | None:
    """Returns what the job has used of its budget; None without a budget."""
    budget = ctx.job.spec.run_policy.budget
    return None if budget is None else Spent(count_used(ctx, ctx.status), budget.chip_hours * _HOUR)


def stop_over_budget(ctx: Context) -> Plan | None:
    """Plans for a job that has used up its budget; None for any other job, and for one that is about to succeed."""
    budget, spent = ctx.job.spec.run_policy.budget, read_spent(ctx)
    if budget is None or spent is None or not spent.is_all:
        return None
    if (until := _succeeds_by(ctx)) and ctx.now < until:
        return None
    running = [pod for pod in ctx.all_workers if pod.may_use_chips]
    if budget.on_exceeded is OnExceeded.FAIL and not running:
        return _fail(ctx, spent)
    then = "the job fails" if budget.on_exceeded is OnExceeded.FAIL else "the job stays suspended"
    cause = Cause(
        Reason.BUDGET_EXCEEDED,
        EventReason.BUDGET_EXCEEDED,
        message=spent.words(),
        suspended_message=f"{spent.words()}; raise chipHours, and the job continues"
        + _name_checkpoint(ctx, " after step {}"),
        stopping_message=f"{spent.words()}; waiting for {{}} to save and stop, then {then}",
        warning=True,
    )
    # A failed worker is deleted only if another attempt may follow: its log says why it failed.
    return suspend(ctx, cause, running if budget.on_exceeded is OnExceeded.FAIL else ctx.all_workers)


def _succeeds_by(ctx: Context) -> datetime | None:
    """Returns by when a gang must end once one of its workers has succeeded: the training is over, so stopping it would
    save little. None if no worker has succeeded."""
    if ctx.is_suspended:
        return None
    ends = [end for pod in ctx.pods if has_succeeded(pod) and (end := ended_by(pod))]
    grace = timedelta(seconds=ctx.job.spec.trainer.termination_grace_period_seconds)
    return min(ends) + grace if ends else None


def _fail(ctx: Context, spent: Spent) -> Plan:
    goodput = ctx.goodput_of_stopped() if ctx.is_suspended else ctx.goodput_at_end(ctx.now)
    status = replace(ctx.status, goodput=goodput)
    message = f"{spent.words()}{_name_checkpoint(ctx, '; the newest checkpoint holds step {}')}"
    if ctx.is_suspended:
        status = ctx.with_condition(status, ConditionType.SUSPENDED, False, Reason.BUDGET_EXCEEDED, message)
    return fail(ctx, status, Reason.BUDGET_EXCEEDED, message)


def _name_checkpoint(ctx: Context, words: str) -> str:
    """Returns the words, with {} as the step of the newest checkpoint; empty without one."""
    step = ctx.status.progress.checkpoint_step if ctx.status.progress else None
    return "" if step is None else words.format(step)


def next_look(ctx: Context) -> timedelta | None:
    spent = read_spent(ctx)
    if spent is not None and spent.is_all and (until := _succeeds_by(ctx)):
        return max(timedelta(seconds=1), until - ctx.now)
    return None if spent is None else until_spent(spent, ctx.holding)


def until_spent(spent: Spent, holding: Holding) -> timedelta | None:
    """Returns how long until the budget is low or used up, if the gang holds all its chips from now on."""
    rate = max(holding.gang, holding.held)
    if not rate:
        return None
    marks = [spent.limit] if spent.is_most else [spent.limit * _LOW_PERCENT // 100, spent.limit]
    seconds = min(math.ceil((mark - spent.used) / rate) for mark in marks)
    return min(timedelta(seconds=max(1, seconds)), _LONGEST_WAIT)


def explain_resumption(ctx: Context) -> str:
    """Says why a job that its budget had stopped continues; empty if something else had stopped it."""
    suspended = find(ctx.status.conditions, ConditionType.SUSPENDED)
    if suspended is None or not suspended.is_true or suspended.reason != Reason.BUDGET_EXCEEDED:
        return ""
    spent = read_spent(ctx)
    return spent.words() if spent else "spec.runPolicy.budget was removed"


def record_usage(decision: Plan, look: JobState, stored: Status, budget: ChipBudget | None = None) -> Plan:
    """Returns the plan with a status that says what the job has used. It gets a status if chips were given back since
    the last one, and once when most of the budget is used. `look`: with what the workers have reported; `stored`:
    without."""
    writes = decision.status is not None and decision.status != stored
    status = decision.status or look.status
    if status.goodput is None:
        return decision
    before = stored.goodput.chip_seconds if stored.goodput else None
    given_back = _time_to_write(before, look) if before else None
    known = charge_chips(status.goodput, look.holding.now, look.holding)
    if known is None:
        return decision
    warned = _warn_if_low(look, status, known, budget)
    if not (writes or warned is not None or given_back == _NOW):
        return decision.due_within(given_back)
    if warned is not None:
        status, event = warned
        decision = replace(decision, events=(*decision.events, *event))
    goodput = status.goodput and replace(status.goodput, chip_seconds=known)
    usage = _compute_usage(status, known, look.holding.gang, budget)
    return replace(decision, status=replace(status, goodput=goodput, usage=usage))


def _time_to_write(before: ChipSeconds, look: JobState) -> timedelta | None:
    """Returns the time until a write records the chips that were given back; None if none were. The write waits for
    other workers that are leaving, so that the end of a gang costs one write whatever its size; but not for long,
    because chips that are gone count until the write."""
    is_stale = any(pod.worker.attempt > look.attempt for pod in look.observed.pods)
    if is_stale or not count_vanished(before, look.holding):
        return None
    age = look.holding.now - parse_time(before.since)
    if age < _NOW:
        # The clock was set back: nothing counts until it has caught up.
        return min(-age, _LONGEST_WAIT)
    are_leaving = any(pod.is_terminating for pod in look.observed.pods)
    return max(_NOW, _LONGEST_LEAVE - age) if are_leaving else _NOW


def _warn_if_low(
    look: JobState, status: Status, known: ChipSeconds, budget: ChipBudget | None
) -> tuple[Status, tuple[Event, ...]] | None:
    """Returns the status with or without the warning, and the event that reports it; None if nothing is new. A job that
    has ended needs no warning, and a job over its budget has another event."""
    spent = Spent(known.total, budget.chip_hours * _HOUR) if budget else None
    is_there = find(status.conditions, ConditionType.BUDGET_LOW) is not None
    if budget is None or spent is None or not spent.is_most or status.completion_time is not None:
        left = replace(status, conditions=without_condition(status.conditions, ConditionType.BUDGET_LOW))
        return (left, ()) if is_there else None
    if is_there and status.usage is not None and status.usage.budget_chip_hours == budget.chip_hours:
        return None
    rest = max(0, spent.limit - spent.used) // max(1, look.holding.gang)
    forecast = _forecast(status, known, look.holding.gang)
    message = f"{spent.words()}; the rest lasts {rest} s"
    message += f", and the job will have used about {forecast} when it ends" if forecast else ""
    status = look.with_condition(status, ConditionType.BUDGET_LOW, True, Reason.BUDGET_LOW, message)
    return status, () if spent.is_all else (Event(EventReason.BUDGET_LOW, message, warning=True),)


def _compute_usage(status: Status, known: ChipSeconds, gang: int, budget: ChipBudget | None) -> Usage:
    left = max(0, budget.chip_hours * _HOUR - known.total) // gang if budget and gang else None
    # The spec of a finished job is not read again.
    had = status.usage.budget_chip_hours if status.completion_time is not None and status.usage else None
    return Usage(
        chip_hours=format_hours(known.total),
        forecast_chip_hours=_forecast(status, known, gang),
        budget_chip_hours=budget.chip_hours if budget else had,
        budget_left_seconds=left,
    )


def _forecast(status: Status, known: ChipSeconds, gang: int) -> str | None:
    progress = status.progress
    if status.completion_time is not None or progress is None or progress.estimated_remaining_seconds is None:
        return None
    return format_hours(known.total + progress.estimated_remaining_seconds * gang)
