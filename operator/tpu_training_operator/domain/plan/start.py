"""How an attempt begins on the job's present slice: the first one, one after a suspension or an eviction, and one that
replaces an attempt which the status has lost.

Workers of an attempt later than the status knows have one of three causes:

- Another operator has moved on since the job was read. The next read shows it.
- An edit or a restored backup lost the status, or took it back. Then the workers are the only record of the attempt.
- A stranger created them: whoever may create pods can copy labels and owner references.

While the status's own attempt has workers, it counts, and such pods are left alone. If it has none, nothing is decided
until those pods are older than any read. Then they prove that the status is wrong. If it knows of no attempt, theirs
continues. Otherwise the next attempt gets a number above theirs and deletes them, because two gangs cannot be
distinguished from a gang and a forgery.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from tpu_training_operator.api.conditions import ConditionType, EventReason, Reason
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.status import State
from tpu_training_operator.api.words import count
from tpu_training_operator.domain.cluster_state.observed import Observed, WorkerPod
from tpu_training_operator.domain.objects.actions import AT_ONCE, Event
from tpu_training_operator.domain.plan.checks.entry_check import note_unchecked
from tpu_training_operator.domain.plan.common.attempt import Why, adopt_attempt, begin_attempt
from tpu_training_operator.domain.plan.common.conditions import ReadyState
from tpu_training_operator.domain.plan.common.context import Context
from tpu_training_operator.domain.plan.plan import Plan, Turn
from tpu_training_operator.domain.plan.stopping import budget

_READ_AGAIN = timedelta(seconds=1)

# No read of a job is older than this.
_OLDEST_READ = timedelta(minutes=5)
# Names have room for numbers below this one. A pod with a larger one is forged.
_MOST_ATTEMPTS = 99_999


def later_workers(observed: Observed, attempt: int) -> list[WorkerPod]:
    return [pod for pod in observed.pods if attempt < pod.worker.attempt < _MOST_ATTEMPTS]


def may_be_newer_than_read(unknown: Sequence[WorkerPod], now: datetime) -> bool:
    """Returns whether the attempts of these workers may have begun since the job was read. If not, its status is
    wrong."""
    return now < min(pod.created for pod in unknown) + _OLDEST_READ


def find_unknown_workers(ctx: Context) -> list[WorkerPod]:
    """Returns workers of later attempts than the status knows; none while its own attempt has workers."""
    if ctx.attempt and (not ctx.missing or any(not pod.has_ended and not pod.is_terminating for pod in ctx.pods)):
        return []
    return later_workers(ctx.observed, ctx.attempt)


def recover_status(ctx: Context, pods: Sequence[WorkerPod]) -> Plan:
    """Plans for a job with workers of attempts that the status does not know: it was lost, unless the job was read
    before they began."""
    if may_be_newer_than_read(pods, ctx.now):
        return Plan(again=_READ_AGAIN)
    attempt = max(pod.worker.attempt for pod in pods)
    if ctx.attempt:
        message = (
            f"the status shows attempt {ctx.attempt}, but there are workers of attempt {attempt}: it was edited or"
            f" restored from a backup; attempt {attempt + 1} replaces them"
        )
    elif ctx.rung is not None:
        # Nothing shows which rung the workers are on.
        message = "the status was lost; the ladder begins again"
    else:
        message = f"the status was lost; attempt {attempt} continues, and earlier restarts no longer count"
        why = Why(Reason.WAITING_FOR_WORKERS, EventReason.STATUS_LOST, message, warning=True)
        return adopt_attempt(ctx, attempt, why)
    lost = Event(EventReason.STATUS_LOST, message, warning=True)
    if ctx.attempt and (ctx.is_suspended or ctx.is_held):
        # The job stays so, and the workers are stopped.
        status = replace(ctx.status, attempt=attempt + 1)
        return Plan(status=status, events=(lost,), again=AT_ONCE, turn=Turn.ATTEMPT)
    begun = start(replace(ctx, status=replace(ctx.status, attempt=attempt)))
    return replace(begun, events=(lost, *begun.events))


def start(ctx: Context) -> Plan:
    """Plans the first attempt, or the one after a suspension or an eviction. No failure class is charged."""
    goodput = ctx.goodput_of_stopped() if ctx.is_suspended or ctx.is_held else None
    status = note_unchecked(ctx, replace(ctx.status, goodput=goodput or ctx.settled_goodput()))
    events = []
    if ctx.is_suspended:
        why = budget.explain_resumption(ctx) or "spec.runPolicy.suspend is false"
        events = [Event(EventReason.RESUMED, why)]
        status = ctx.with_condition(status, ConditionType.SUSPENDED, False, Reason.RESUMED, why)
    # The event comes when the gang runs.
    starting = Why(Reason.WAITING_FOR_WORKERS, None, describe_start(ctx, ctx.next_attempt).message)
    return begin_attempt(ctx, ctx.option, starting, status, events=events)


def describe_start(ctx: Context, attempt: int) -> ReadyState:
    layout = ctx.resolution.layout
    message = (
        f"{ctx.rung_prefix}attempt {attempt}: waiting for {count(layout.hosts, 'worker')} on {layout} to become ready"
    )
    return ReadyState(State.STARTING, Reason.WAITING_FOR_WORKERS, message)
