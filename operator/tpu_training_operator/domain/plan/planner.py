"""The planner: what to do next about one job.

The attempt protocol. An attempt exists once `status.attempt` says so. The number is raised in a pass that does nothing
else, with the job's resourceVersion as precondition. Later passes converge the pods to it: workers of other attempts
are deleted, and once they or their nodes are gone, the attempt's own workers are created. After a crash between any two
effects the next pass continues, and of two operators only one can raise the number.

So workers of an attempt later than the status knows have one of three causes:

- Another operator has moved on since the job was read. The next read shows it.
- An edit or a restored backup lost the status, or took it back. Then the workers are the only record of the attempt.
- Somebody else created them: anybody who may create pods can copy labels and owner references.

While the attempt of the status has workers of its own, it counts, and such pods are left alone. Without any, nothing is
decided until the read cannot be old. Then the pods prove that the status is wrong. If it knows of no attempt, theirs
continues. Otherwise the next attempt gets a number above theirs and deletes them, because two gangs cannot be told
apart from one and a forgery.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from tpu_training_operator.api.conditions import ConditionType, EventReason, Reason, is_true
from tpu_training_operator.api.constants import MAX_HOSTS
from tpu_training_operator.api.failures import FailureReason
from tpu_training_operator.api.run_policy import ChipBudget
from tpu_training_operator.api.status import Activity, Failure, PlacementReason, State, Status
from tpu_training_operator.api.validation import InvalidJob
from tpu_training_operator.api.words import count, every
from tpu_training_operator.domain.cluster_state.observed import Object, Observed, WorkerPod, parse_time
from tpu_training_operator.domain.cluster_state.worker_reports import Reporting
from tpu_training_operator.domain.cluster_state.workload import manager_of
from tpu_training_operator.domain.failures.first import first_failure, hang, missing_worker, next_look
from tpu_training_operator.domain.failures.hang import STACKS_WAIT, stacks_due, standstill, straggler
from tpu_training_operator.domain.failures.pod_signs import has_succeeded
from tpu_training_operator.domain.job.naming import config_map_name
from tpu_training_operator.domain.job.rungs import rung_of
from tpu_training_operator.domain.objects.actions import (
    AT_ONCE,
    Action,
    AskForStacks,
    Create,
    DeleteConfigMap,
    DeleteEndpointSlice,
    Event,
    Plan,
)
from tpu_training_operator.domain.objects.endpoints import endpoint_slice_names, publication
from tpu_training_operator.domain.objects.shared import config_map, service
from tpu_training_operator.domain.objects.worker_pod import WorkerCreations
from tpu_training_operator.domain.plan.checks.entry_check import entry_check, left_by_check, not_checked
from tpu_training_operator.domain.plan.common.attempt import Why, adopt_attempt, begin_attempt
from tpu_training_operator.domain.plan.common.blocked import Obstacle, blocked
from tpu_training_operator.domain.plan.common.completion import (
    active_time_left,
    after_the_end,
    exceed_deadline,
    succeed,
)
from tpu_training_operator.domain.plan.common.conditions import Kind, ReadyState, Snapshot
from tpu_training_operator.domain.plan.common.context import Context
from tpu_training_operator.domain.plan.common.pod_cleanup import deletions, in_the_way, look_again
from tpu_training_operator.domain.plan.common.progress import heard, write_due
from tpu_training_operator.domain.plan.common.restart_budget import longest_wait
from tpu_training_operator.domain.plan.common.slice_record import accounted, charged, chosen, is_mistaken, strays
from tpu_training_operator.domain.plan.delegation import delegated
from tpu_training_operator.domain.plan.invalid import budget_of, invalid
from tpu_training_operator.domain.plan.ladder import finish_rung
from tpu_training_operator.domain.plan.leaving import is_leaving, leave
from tpu_training_operator.domain.plan.lost_status import may_be_news, unknown_workers
from tpu_training_operator.domain.plan.parse_cache import Readings
from tpu_training_operator.domain.plan.placement.moving import carry_out, move
from tpu_training_operator.domain.plan.placement.return_to_preferred import with_growth
from tpu_training_operator.domain.plan.placement.search import next_move
from tpu_training_operator.domain.plan.queue.better_slice import with_proof
from tpu_training_operator.domain.plan.queue.queueing import (
    gate,
    look_at_queue,
    look_at_suspended,
    placement,
    with_end_told,
    with_pods_ready,
)
from tpu_training_operator.domain.plan.restarts.restart import fail_or_restart, release
from tpu_training_operator.domain.plan.restarts.start_deadline import (
    is_partly_refused,
    not_started,
    partly_placed,
    starts_late,
)
from tpu_training_operator.domain.plan.restarts.waiting import event_lines, tell_why
from tpu_training_operator.domain.plan.startable import check_options
from tpu_training_operator.domain.plan.stopping import budget
from tpu_training_operator.domain.plan.stopping.suspension import BY_USER, suspend

_SUSPEND_IS_OFF = "spec.runPolicy.suspend is false"
_NO_READINGS = Readings(0)
_READ_AGAIN = timedelta(seconds=1)


def plan(
    observed: Observed,
    now: datetime,
    reporting: Reporting | None = None,
    *,
    max_hosts: int = MAX_HOSTS,
    readings: Readings = _NO_READINGS,
) -> Plan:
    """The next actions and the status to write. The same arguments give the same plan.

    `reporting`: where the workers report to; None if nobody listens. `max_hosts`: a larger job is not started; one that
    has started under another bound continues. `readings`: of earlier looks.
    """
    status = readings.status(observed.job.get("status"))
    if manager_of(observed.job):
        return delegated(Snapshot(observed, status, now), readings, max_hosts)
    if is_leaving(observed):
        leaver = Snapshot(observed, status, now)
        return _with_usage(leave(leaver), leaver)
    if _has_finished(status):
        look = Snapshot(observed, status, now)
        ended = _with_generation(with_end_told(after_the_end(observed, status, now), look), status, observed)
        return ended if ended.deletes_job else _with_usage(ended, look)
    job = _without_entry_check(observed.job) if status.attempt or observed.pods else observed.job
    try:
        options, lower = readings.job(job), readings.lower_rungs(job)
        observed = observed.within([option.layout for option in (*options, *lower)])
        if status.attempt == 0 and not observed.pods:
            check_options((*options, *lower), observed.job, max_hosts)
    except InvalidJob as error:
        return _unusable(Snapshot(observed, status, now), error)
    rung = rung_of(options, lower, status.rungs)
    option = chosen(rung.options if rung else options, status, observed.pods)
    if rung is not None:
        rung = replace(rung, option=option)
        options = options if rung.lower_rung else rung.options
    ctx = Context(observed, status, now, options, option, reporting, lower, rung)
    told = heard(status, observed.report, option.resolution.steps, now, ctx.holding)
    ctx = replace(ctx, status=told)
    if lost := _signs_of_lost_status(ctx):
        return _take_up(ctx, lost)
    decided = with_proof(with_growth(with_pods_ready(_next(ctx), ctx), ctx), ctx)
    decided = _with_progress(decided, ctx, stored=status)
    decided = _with_generation(decided, told, observed)
    decided = budget.with_usage(decided, ctx, status, ctx.job.spec.run_policy.budget)
    if decided.status is None and not is_mistaken(status, option):
        return decided
    return replace(decided, status=accounted(decided.status or told, status, option, now))


def _without_entry_check(job: Object) -> Object:
    """The job as it concerns an attempt that has begun: a later change of the entry check must not stop it."""
    spec = job.get("spec")
    if not isinstance(spec, Mapping) or "entryCheck" not in spec:
        return job
    return {**job, "spec": {name: value for name, value in spec.items() if name != "entryCheck"}}


def _unusable(stored: Snapshot, error: InvalidJob) -> Plan:
    """The plan for a job whose spec cannot be used. What its workers report counts."""
    status, resolved = stored.status, stored.status.resolved
    steps, inbox = resolved.train_steps if resolved else 0, stored.observed.inbox
    look = replace(stored, status=heard(status, stored.observed.report, steps, stored.now, stored.holding))
    decided = invalid(look, error)
    if decided.status is not None and look.status != status:
        wait = write_due(status, inbox, stored.now)
        is_news = replace(decided.status, progress=status.progress, goodput=status.goodput) != status
        if not is_news and wait > AT_ONCE:
            decided = replace(decided, status=None).due_within(wait)
    return _with_usage(decided, stored, budget_of(stored))


def _has_finished(status: Status) -> bool:
    """An edit of the status may leave only one of the signs, and a finished job must not train again."""
    ends = (ConditionType.SUCCEEDED, ConditionType.FAILED)
    return status.completion_time is not None or any(is_true(status.conditions, end) for end in ends)


def _with_usage(decided: Plan, look: Snapshot, limit: ChipBudget | None = None) -> Plan:
    """The plan for a job whose spec is not read. Its status says what the job has used, and on which slice."""
    before = look.status
    decided = budget.with_usage(decided, look, before, limit)
    if decided.status is None or before.placement is None:
        return decided
    return replace(decided, status=charged(decided.status, before, before.placement.slice))


def _with_generation(decided: Plan, status: Status, observed: Observed) -> Plan:
    """The plan, with a status if only the generation is new. A change of a restart limit needs no other action, but
    until it is observed, kstatus takes the job for one in progress."""
    if decided.status is not None or status.observed_generation == observed.generation:
        return decided
    return replace(decided, status=replace(status, observed_generation=observed.generation))


def _with_progress(decided: Plan, ctx: Context, *, stored: Status) -> Plan:
    """The plan, with a status if only what the workers report is new, as often as that is worth a write."""
    if decided.status is not None or ctx.status == stored:
        return decided
    wait = write_due(stored, ctx.observed.inbox, ctx.now)
    return replace(decided, status=ctx.status) if wait <= AT_ONCE else decided.due_within(wait)


def _next(ctx: Context) -> Plan:
    """The cases, in the order in which they are decided."""
    if ctx.attempt > 0 and not ctx.missing and all(map(has_succeeded, ctx.pods)):
        # Even if the job is to be suspended, or is being suspended: nothing is left to suspend.
        if ctx.resolution.lower_rung is not None:
            return finish_rung(ctx)
        return succeed(ctx, ctx.pods, ctx.goodput_at_end(ctx.now), ctx.resolution.steps)
    if ctx.job.spec.run_policy.suspend:
        checking = (
            [ctx.observed.entry_check_pod] if ctx.is_checking and ctx.observed.entry_check_pod else ctx.idle_entry_check
        )
        return suspend(ctx, BY_USER, [*checking, *ctx.all_workers]).due_within(look_at_suspended(ctx))
    if (checks := entry_check(ctx)) is not None:
        return checks
    if (stops := budget.over_budget(ctx)) is not None:
        return stops.due_within(look_at_suspended(ctx))
    if (waits := gate(ctx)) is not None:
        return waits
    if not ctx.may_have_workers:
        return _begin(ctx)
    left = active_time_left(ctx)
    if left is not None and left <= AT_ONCE:
        return exceed_deadline(ctx)
    if any(pod.placed is None for pod in ctx.pods):
        # The job is not active now. A pod event will tell when its workers are placed.
        left = None
    return _keep_alive(ctx).due_within(
        look_again(ctx.leftovers, ctx.now), left, look_at_queue(ctx), budget.next_look(ctx)
    )


def _keep_alive(ctx: Context) -> Plan:
    """Creates the gang of the current attempt, watches it, and replaces it when it fails."""
    unknown = unknown_workers(ctx.observed, ctx.attempt)
    if ctx.missing and unknown and may_be_news(unknown, ctx.now):
        return Plan(again=_READ_AGAIN)
    unwanted = deletions(ctx.leftovers, ctx.now)
    if unwanted or in_the_way(ctx.leftovers) or ctx.awaits_last_failure:
        return Plan(stages=unwanted, again=_READ_AGAIN if ctx.awaits_last_failure else None)
    if strays(ctx.option, ctx.observed.of_attempt(ctx.attempt)):
        why = "its workers are on another slice than its status says"
        return move(ctx, ctx.option, PlacementReason.STATUS_LOST, why)
    if failure := _failure(ctx):
        return fail_or_restart(ctx, failure)
    if ctx.missing:
        return _create_missing(ctx)
    return _watch(ctx).due_within(next_look(ctx.pods, ctx.now))


def _signs_of_lost_status(ctx: Context) -> list[WorkerPod]:
    """Workers of later attempts than the status knows, unless its own attempt has workers."""
    if ctx.attempt and (not ctx.missing or any(not pod.has_ended and not pod.is_terminating for pod in ctx.pods)):
        return []
    return unknown_workers(ctx.observed, ctx.attempt)


def _take_up(ctx: Context, pods: Sequence[WorkerPod]) -> Plan:
    """There are workers of attempts that the status does not know: it was lost, unless the read is old."""
    if may_be_news(pods, ctx.now):
        return Plan(again=_READ_AGAIN)
    attempt = max(pod.worker.attempt for pod in pods)
    if ctx.attempt:
        return _outgrow(ctx, attempt)
    if ctx.rung is not None:
        # Nobody knows which rung they are on, so the ladder starts again.
        begun = _begin(replace(ctx, status=replace(ctx.status, attempt=attempt)))
        lost = Event(EventReason.STATUS_LOST, "the status was lost; the ladder begins again", warning=True)
        return replace(begun, events=(lost, *begun.events))
    message = f"the status was lost; attempt {attempt} continues, and earlier restarts no longer count"
    return adopt_attempt(ctx, attempt, Why(Reason.WAITING_FOR_WORKERS, EventReason.STATUS_LOST, message, warning=True))


def _outgrow(ctx: Context, attempt: int) -> Plan:
    """The next attempt after this one, of which there are workers; the status shows an earlier one. A job that rests
    stays at rest, and its workers are stopped."""
    number = attempt + 1
    message = (
        f"the status shows attempt {ctx.attempt}, but there are workers of attempt {attempt}: it was edited or restored"
        f" from a backup; attempt {number} replaces them"
    )
    lost = Event(EventReason.STATUS_LOST, message, warning=True)
    if ctx.is_suspended or ctx.is_held:
        return Plan(status=replace(ctx.status, attempt=number), events=(lost,), again=AT_ONCE)
    begun = _begin(replace(ctx, status=replace(ctx.status, attempt=attempt)))
    return replace(begun, events=(lost, *begun.events))


def _begin(ctx: Context) -> Plan:
    """The first attempt, or the one after a suspension or an eviction. No failure class is charged."""
    goodput = ctx.goodput_of_stopped() if ctx.is_suspended or ctx.is_held else None
    status = not_checked(ctx, replace(ctx.status, goodput=goodput or ctx.settled_goodput()))
    events = []
    if ctx.is_suspended:
        why = budget.resumed(ctx) or _SUSPEND_IS_OFF
        events = [Event(EventReason.RESUMED, why)]
        status = ctx.with_condition(status, ConditionType.SUSPENDED, False, Reason.RESUMED, why)
    starting = Why(Reason.WAITING_FOR_WORKERS, EventReason.ATTEMPT_STARTED, _starting(ctx, ctx.next_attempt).message)
    return begin_attempt(ctx, ctx.option, starting, status, events=events)


def _starting(ctx: Context, attempt: int) -> ReadyState:
    layout = ctx.resolution.layout
    message = f"{ctx.of_rung}attempt {attempt}: waiting for {count(layout.hosts, 'worker')} on {layout} to become ready"
    return ReadyState(State.STARTING, Kind.IN_PROGRESS, Reason.WAITING_FOR_WORKERS, message)


def _failure(ctx: Context) -> Failure | None:
    # In the user's own loop, a lost peer may show as nothing but exit code 1.
    own_loop = ctx.job.spec.trainer.entrypoint is None
    if failure := first_failure(ctx.pods, ctx.attempt, ctx.now, settle_user_errors=own_loop):
        return failure
    if ctx.missing and ctx.is_running:
        # A new worker could not join the training: its peers have met without it.
        return missing_worker(ctx.missing[0], ctx.job.name, ctx.observed.trace, ctx.now)
    return None


def _create_missing(ctx: Context) -> Plan:
    wait = _wait_before_attempt(ctx)
    if wait > AT_ONCE:
        return Plan(again=wait)
    if (due := next_move(ctx)) is not None and ctx.now >= due.at:
        return carry_out(ctx, due)
    if ctx.is_refused and is_partly_refused(ctx.pods, ctx.job.spec.run_policy, ctx.now):
        return release(ctx, len(ctx.missing))
    where = placement(ctx)
    if isinstance(where, Obstacle):
        return blocked(ctx.observed, where, ctx.now)
    job, attempt = ctx.job, ctx.attempt
    shared = (
        Create(service(job), again=attempt > 1),
        Create(config_map(job, ctx.resolution, attempt, ctx.reporting)),
        *(_deletions_of_shared(ctx, attempt - 1) if attempt > 1 else left_by_check(ctx)),
    )
    avoid = tuple(ctx.status.avoided_nodes)
    workers = WorkerCreations(job, ctx.resolution, tuple(ctx.missing), ctx.reporting, avoid, where)
    return Plan(stages=(shared, workers))


def _deletions_of_shared(ctx: Context, attempt: int) -> Iterator[Action]:
    """What that attempt leaves behind. Its names must not lead to addresses that others may have now."""
    yield DeleteConfigMap(config_map_name(ctx.job.name, attempt))
    of_each = (endpoint_slice_names(ctx.job.name, option.layout) for option in (*ctx.options, *ctx.lower_rungs))
    for name in max(of_each, key=len):
        yield DeleteEndpointSlice(name)


def _wait_before_attempt(ctx: Context) -> timedelta:
    """The rest of the wait before this attempt. A wait longer than any backoff means that the clock was set back."""
    earliest = ctx.status.restarts.next_attempt_time
    left = parse_time(earliest) - ctx.now if earliest else AT_ONCE
    return left if left <= longest_wait(ctx.job.spec.run_policy) else AT_ONCE


def _watch(ctx: Context) -> Plan:
    if ctx.is_running and not ctx.is_refused:
        return _watch_peers(ctx)
    if not all(pod.is_ready or pod.phase == "Succeeded" for pod in ctx.pods):
        return _watch_start(ctx)
    where = f" on {ctx.option}" if len(ctx.options) > 1 else ""
    message = f"{ctx.of_rung}attempt {ctx.attempt}: {every(len(ctx.pods), 'worker')} ready{where}"
    ready = ReadyState(State.RUNNING, Kind.SETTLED, Reason.ALL_WORKERS_READY, message)
    goodput = ctx.settled_goodput()
    if not ctx.reports:
        goodput = ctx.charge(goodput, ctx.now, Activity.TRAIN)
    status = replace(ctx.status, goodput=goodput)
    status = ctx.with_condition(status, ConditionType.GANG_READY, True, ready.reason, ready.message)
    events = (Event(EventReason.RUNNING, message),)
    return Plan(stages=_publishing(ctx), status=ctx.present(status, ready), events=events, again=AT_ONCE)


def _publishing(ctx: Context) -> tuple[tuple[Action, ...], ...]:
    """One stage that makes the workers' names resolve, once all have an address. An address may change until then: a
    kubelet may create a pod's sandbox again before its containers run."""
    published = ctx.observed.notes.published if ctx.observed.notes else None
    names = publication(ctx.job, ctx.resolution.layout, ctx.pods, published)
    return () if names is None else ((names,),)


def _watch_start(ctx: Context) -> Plan:
    due = next_move(ctx)
    if due is not None and ctx.now >= due.at:
        return carry_out(ctx, due)
    again = due.at - ctx.now if due is not None else None
    if part := partly_placed(ctx.pods, ctx.job.spec.run_policy, ctx.status.avoided_nodes):
        if ctx.now >= part.deadline:
            return release(ctx, part.waiting)
        again = min(part.deadline - ctx.now, again or part.deadline - ctx.now)
    elif late := starts_late(ctx.pods, ctx.job.spec.run_policy):
        if ctx.now >= late.deadline:
            event = event_lines(ctx).get(late.pod.name, "")
            return fail_or_restart(ctx, not_started(late, event, ctx.attempt, ctx.now))
        again = late.deadline - ctx.now
    # The status shows a starting gang already, unless a refusal has replaced it.
    unblocked = ctx.present(ctx.status, _starting(ctx, ctx.attempt)) if ctx.is_refused else None
    return tell_why(ctx, Plan(stages=_publishing(ctx), status=unblocked, again=again))


def _watch_peers(ctx: Context) -> Plan:
    """Whether all workers of a running gang end when the first one does, and make progress until then."""
    late = straggler(ctx.pods, ctx.status, ctx.job.spec.run_policy)
    if late is None:
        return _watch_progress(ctx)
    if ctx.now >= late.deadline:
        failure = hang(late.pod, late.message, ctx.attempt, ctx.now, reason=FailureReason.STRAGGLER)
        return fail_or_restart(ctx, failure)
    # A reporter that has succeeded has no more steps to report.
    others = Plan() if ctx.pods[0].phase == "Succeeded" else _watch_progress(ctx)
    return others.due_within(late.deadline - ctx.now)


def _watch_progress(ctx: Context) -> Plan:
    """Restarts a hung gang, after asking for its stacks."""
    inbox = ctx.observed.inbox
    still = standstill(ctx.status, inbox, ctx.job.spec.run_policy, ctx.now, reports=ctx.reports)
    if still is None:
        return Plan()
    if ctx.now < still.deadline:
        return Plan(again=still.deadline - ctx.now)
    said = ctx.observed.report
    report = said if said and said.attempt == ctx.attempt else None
    wait = stacks_due(inbox, ctx.now)
    if report is not None and wait is None:
        return Plan(stages=((AskForStacks(),),), again=STACKS_WAIT)
    if wait is not None and wait > AT_ONCE:
        return Plan(again=wait)
    stacks = f"; the worker's stacks:\n{report.stacks}" if report is not None and report.stacks else ""
    return fail_or_restart(ctx, hang(ctx.pods[0], still.message + stacks, ctx.attempt, ctx.now))
