"""The planner: what to do next about one job.

The attempt protocol. An attempt exists once `status.attempt` says so. The number is raised in a pass that does nothing
else, with the job's resourceVersion as precondition. Later passes converge the pods to it: workers of other attempts
are deleted, and once they or their nodes are gone, the attempt's own workers are created. After a crash between any two
effects the next pass continues, and of two operators only one can raise the number.

So workers of an attempt later than the status knows have one of three causes:

- Another operator has moved on since the job was read. The next read shows it.
- An edit or a restored backup lost the whole status. Then the workers are the only record of the attempt.
- Somebody else created them: anybody who may create pods can copy labels and owner references.

Where the status knows of an attempt, it counts, and such pods are left alone: the job may have been read long ago, and
they may be workers of a running gang. The next attempt gets a number that none of them has (`Context.next_attempt`) and
deletes those it leaves behind.
"""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta

from tpu_training_operator.api.conditions import ConditionType, EventReason, Reason, is_true
from tpu_training_operator.api.constants import MAX_HOSTS
from tpu_training_operator.api.failures import FailureReason
from tpu_training_operator.api.status import Activity, Failure, State, Status
from tpu_training_operator.api.validation import InvalidJob
from tpu_training_operator.domain.actions import (
    AT_ONCE,
    Action,
    AskForStacks,
    Create,
    DeleteConfigMap,
    DeleteEndpointSlice,
    Event,
    Plan,
)
from tpu_training_operator.domain.failures.first import first_failure, hang, missing_worker, next_look
from tpu_training_operator.domain.failures.hang import STACKS_WAIT, stacks_due, standstill, straggler
from tpu_training_operator.domain.failures.pod_signs import has_succeeded
from tpu_training_operator.domain.lifecycle.blocked import Obstacle, blocked
from tpu_training_operator.domain.lifecycle.completion import active_time_left, after_the_end, exceed_deadline, succeed
from tpu_training_operator.domain.lifecycle.conditions import Kind, ReadyState, Snapshot
from tpu_training_operator.domain.lifecycle.context import Context
from tpu_training_operator.domain.lifecycle.goodput import charge
from tpu_training_operator.domain.lifecycle.invalid import invalid
from tpu_training_operator.domain.lifecycle.pod_cleanup import by_force, deletions, in_the_way, look_again, next_force
from tpu_training_operator.domain.lifecycle.progress import heard, new_attempt, write_due
from tpu_training_operator.domain.lifecycle.queueing import (
    admitted,
    check_queue,
    gate,
    look_at_queue,
    look_at_suspended,
    placement,
    suspended,
    while_suspended,
    with_end_told,
    with_pods_ready,
)
from tpu_training_operator.domain.lifecycle.readings import Readings
from tpu_training_operator.domain.lifecycle.restart import fail_or_restart, release
from tpu_training_operator.domain.lifecycle.restart_budget import longest_wait
from tpu_training_operator.domain.lifecycle.start_deadline import (
    is_partly_refused,
    not_started,
    partly_placed,
    starts_late,
)
from tpu_training_operator.domain.lifecycle.waiting import event_lines, tell_why
from tpu_training_operator.domain.naming import config_map_name
from tpu_training_operator.domain.objects.endpoints import endpoint_slice_names, publication
from tpu_training_operator.domain.objects.shared import check_config_map, config_map, service
from tpu_training_operator.domain.objects.worker_pod import WorkerCreations
from tpu_training_operator.domain.observed import Observed, format_time, parse_time
from tpu_training_operator.domain.recipe.resolve import check_hosts
from tpu_training_operator.domain.report import Reporting
from tpu_training_operator.domain.words import count, every

_SUSPEND_IS_ON = "spec.runPolicy.suspend is true"
_SUSPEND_IS_OFF = "spec.runPolicy.suspend is false"
_NO_READINGS = Readings(0)
_READ_AGAIN = timedelta(seconds=1)
# No read of a job is older than this.
_OLDEST_READ = timedelta(minutes=5)


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
    if "deletionTimestamp" in observed.job["metadata"]:
        # Kubernetes deletes everything the job owns, by owner references. But a dead node does not release its pods.
        return Plan(stages=by_force(observed.pods, now), again=next_force(observed.pods, now))
    if _has_finished(status):
        ended = with_end_told(after_the_end(observed, status, now), Snapshot(observed, status, now))
        return _with_generation(ended, status, observed)
    try:
        job, resolution = readings.job(observed.job)
        observed = observed.within(resolution.layout)
        if status.attempt == 0 and not observed.pods:
            check_hosts(resolution, max_hosts)
            check_config_map(job, resolution)
            check_queue(observed.job, job)
    except InvalidJob as error:
        return invalid(Snapshot(observed, status, now), error)
    told = heard(status, observed.report, resolution.recipe.train_steps, now)
    ctx = Context(observed, told, now, job, resolution, reporting)
    if status.attempt == 0 and observed.pods:
        return _take_up(ctx)
    decided = with_pods_ready(_next(ctx), ctx)
    decided = _with_progress(decided, ctx, stored=status)
    return _with_generation(decided, told, observed)


def _has_finished(status: Status) -> bool:
    """An edit of the status may leave only one of the signs, and a finished job must not train again."""
    ends = (ConditionType.SUCCEEDED, ConditionType.FAILED)
    return status.completion_time is not None or any(is_true(status.conditions, end) for end in ends)


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
        return succeed(ctx, ctx.pods, ctx.goodput_at_end(ctx.now), ctx.resolution.recipe.train_steps)
    if ctx.job.spec.run_policy.suspend:
        return _suspend(ctx).due_within(look_at_suspended(ctx))
    if (waits := gate(ctx)) is not None:
        return waits
    if ctx.attempt == 0 or ctx.is_suspended or ctx.is_held:
        return _begin(ctx)
    left = active_time_left(ctx)
    if left is not None and left <= AT_ONCE:
        return exceed_deadline(ctx)
    if any(pod.placed is None for pod in ctx.pods):
        # The job is not active now. A pod event will tell when its workers are placed.
        left = None
    return _keep_alive(ctx).due_within(look_again(ctx.leftovers, ctx.now), left, look_at_queue(ctx))


def _keep_alive(ctx: Context) -> Plan:
    """Creates the gang of the current attempt, watches it, and replaces it when it fails."""
    if ctx.missing and _is_stale(ctx):
        return Plan(again=_READ_AGAIN)
    unwanted = deletions(ctx.leftovers, ctx.now)
    if unwanted or in_the_way(ctx.leftovers):
        return Plan(stages=unwanted)
    if failure := _failure(ctx):
        return fail_or_restart(ctx, failure)
    if ctx.missing:
        return _create_missing(ctx)
    return _watch(ctx).due_within(next_look(ctx.pods, ctx.now))


def _is_stale(ctx: Context) -> bool:
    """Whether another operator may have raised the attempt since the job was read."""
    later = (pod for pod in ctx.observed.pods if pod.worker.attempt > ctx.attempt)
    return any(ctx.now < pod.created + _OLDEST_READ for pod in later)


def _take_up(ctx: Context) -> Plan:
    """There are workers, but the status knows of no attempt: it was lost, unless the read is old."""
    pods = ctx.observed.pods
    if ctx.now < min(pod.created for pod in pods) + _OLDEST_READ:
        return Plan(again=_READ_AGAIN)
    attempt = max(pod.worker.attempt for pod in pods)
    message = f"the status was lost; attempt {attempt} continues, and earlier restarts no longer count"
    ready = ReadyState(State.STARTING, Kind.IN_PROGRESS, Reason.WAITING_FOR_WORKERS, message)
    status = replace(
        ctx.status,
        attempt=attempt,
        resolved=ctx.resolution.resolved,
        start_time=ctx.status.start_time or format_time(ctx.now),
    )
    status = ctx.with_condition(status, ConditionType.GANG_READY, False, ready.reason, message)
    event = Event(EventReason.STATUS_LOST, message, warning=True)
    return Plan(status=ctx.present(status, ready), events=(event,), again=AT_ONCE)


def _begin(ctx: Context) -> Plan:
    """The first attempt, or the one after a suspension or an eviction. No failure class is charged."""
    goodput = ctx.goodput_of_stopped() if ctx.is_suspended or ctx.is_held else None
    status = replace(
        ctx.status,
        attempt=ctx.next_attempt,
        resolved=ctx.resolution.resolved,
        start_time=ctx.status.start_time or format_time(ctx.now),
        progress=new_attempt(ctx.status.progress),
        goodput=charge(goodput or ctx.settled_goodput(), ctx.now, Activity.QUEUE),
    )
    ready = _starting(ctx, ctx.next_attempt)
    events = [Event(EventReason.ATTEMPT_STARTED, ready.message)]
    if ctx.is_suspended:
        events.insert(0, Event(EventReason.RESUMED, _SUSPEND_IS_OFF))
        status = ctx.with_condition(status, ConditionType.SUSPENDED, False, Reason.RESUMED, _SUSPEND_IS_OFF)
    status = ctx.with_condition(admitted(ctx, status), ConditionType.GANG_READY, False, ready.reason, ready.message)
    return Plan(status=ctx.present(status, ready), events=tuple(events), again=AT_ONCE)


def _starting(ctx: Context, attempt: int) -> ReadyState:
    layout = ctx.resolution.layout
    message = f"attempt {attempt}: waiting for {count(layout.hosts, 'worker')} on {layout} to become ready"
    return ReadyState(State.STARTING, Kind.IN_PROGRESS, Reason.WAITING_FOR_WORKERS, message)


def _suspend(ctx: Context) -> Plan:
    """Stops every worker, which saves before it ends. No failure class is charged."""
    pods = ctx.all_workers
    message = "suspended by spec.runPolicy.suspend; no workers are running"
    ready = ReadyState(State.SUSPENDED, Kind.SETTLED, Reason.SUSPENDED, message)
    if pods:
        message = f"waiting for {count(len(pods), 'worker')} to stop"
        ready = ReadyState(State.SUSPENDED, Kind.IN_PROGRESS, Reason.SUSPENDED, message)
    if ctx.is_suspended:
        # Workers may report what they saved until they have stopped.
        status = replace(ctx.status, goodput=ctx.status.goodput if pods else ctx.goodput_of_stopped())
        stages = (*deletions(pods, ctx.now), *while_suspended(ctx, pods))
        return Plan(stages=stages, status=ctx.present(status, ready), again=look_again(pods, ctx.now))
    # The condition comes before any worker is stopped: without it, the next pass would take a stopped worker for a
    # failure.
    status = replace(ctx.status, goodput=charge(ctx.goodput_at_end(ctx.now), ctx.now, Activity.SUSPENDED))
    status = ctx.with_condition(status, ConditionType.SUSPENDED, True, Reason.SUSPENDED, _SUSPEND_IS_ON)
    if status.attempt:
        status = ctx.with_condition(status, ConditionType.GANG_READY, False, Reason.SUSPENDED, _SUSPEND_IS_ON)
    status = suspended(ctx, status, _SUSPEND_IS_ON)
    events = (Event(EventReason.SUSPENDED, message),)
    return Plan(status=ctx.present(status, ready), events=events, again=AT_ONCE)


def _failure(ctx: Context) -> Failure | None:
    # In the user's own loop, a lost peer may show as nothing but exit code 1.
    own_loop = ctx.job.spec.trainer.entrypoint is None
    if failure := first_failure(ctx.pods, ctx.attempt, ctx.now, settle_user_errors=own_loop):
        return failure
    if ctx.missing and ctx.is_running:
        # A new worker could not join the training: its peers have met without it.
        worker = ctx.missing[0]
        return missing_worker(worker.pod_name(ctx.job.name), worker.slice, worker.host, ctx.attempt, ctx.now)
    return None


def _create_missing(ctx: Context) -> Plan:
    wait = _wait_before_attempt(ctx)
    if wait > AT_ONCE:
        return Plan(again=wait)
    if ctx.is_refused and is_partly_refused(ctx.pods, ctx.job.spec.run_policy, ctx.now):
        return release(ctx, len(ctx.missing))
    where = placement(ctx)
    if isinstance(where, Obstacle):
        return blocked(ctx.observed, where, ctx.now)
    job, attempt = ctx.job, ctx.attempt
    shared = (
        Create(service(job), again=attempt > 1),
        Create(config_map(job, ctx.resolution, attempt, ctx.reporting)),
        *(_deletions_of_shared(ctx, attempt - 1) if attempt > 1 else ()),
    )
    avoid = tuple(ctx.status.avoided_nodes)
    workers = WorkerCreations(job, ctx.resolution, tuple(ctx.missing), ctx.reporting, avoid, where)
    return Plan(stages=(shared, workers))


def _deletions_of_shared(ctx: Context, attempt: int) -> Iterator[Action]:
    """What that attempt leaves behind. Its names must not lead to addresses that others may have now."""
    yield DeleteConfigMap(config_map_name(ctx.job.name, attempt))
    for name in endpoint_slice_names(ctx.job.name, ctx.resolution.layout):
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
    message = f"attempt {ctx.attempt}: {every(len(ctx.pods), 'worker')} ready"
    ready = ReadyState(State.RUNNING, Kind.SETTLED, Reason.ALL_WORKERS_READY, message)
    goodput = ctx.settled_goodput()
    if not ctx.reports:
        goodput = charge(goodput, ctx.now, Activity.TRAIN)
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
    again = None
    if part := partly_placed(ctx.pods, ctx.job.spec.run_policy, ctx.status.avoided_nodes):
        if ctx.now >= part.deadline:
            return release(ctx, part.waiting)
        again = part.deadline - ctx.now
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
