"""Creates the gang of an attempt, watches it, and replaces it when it fails."""

from collections.abc import Iterator, Sequence
from datetime import timedelta

from tpu_training_operator.api.conditions import ConditionType, EventReason, Reason
from tpu_training_operator.api.failures import FailureReason
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.status import Activity, Failure, PlacementReason, State
from tpu_training_operator.api.words import every
from tpu_training_operator.domain.cluster_state.observed import parse_time
from tpu_training_operator.domain.cluster_state.obstacles import Obstacle
from tpu_training_operator.domain.cluster_state.worker_reports import Reporting
from tpu_training_operator.domain.cluster_state.workload import PodSettings
from tpu_training_operator.domain.failures.first import first_failure, hang_failure, missing_worker, next_look
from tpu_training_operator.domain.failures.hang import STACKS_WAIT, stacks_due, standstill, straggler
from tpu_training_operator.domain.job.naming import WorkerId, config_map_names
from tpu_training_operator.domain.job.recipe.resolve import Resolution
from tpu_training_operator.domain.objects.actions import AT_ONCE, Action, AskForStacks, Create, Creations, Delete, Event
from tpu_training_operator.domain.objects.endpoints import endpoint_slice_names, publication
from tpu_training_operator.domain.objects.shared import config_map, env_config_map, service
from tpu_training_operator.domain.objects.worker_pod import without_package_index, worker_pod
from tpu_training_operator.domain.objects.workload import with_pod_settings
from tpu_training_operator.domain.plan.blocked import show_obstacle
from tpu_training_operator.domain.plan.checks.entry_check import delete_check_config_map
from tpu_training_operator.domain.plan.checks.step_fits import program_to_expect
from tpu_training_operator.domain.plan.common.conditions import ReadyState
from tpu_training_operator.domain.plan.common.context import Context, isolate
from tpu_training_operator.domain.plan.common.pod_cleanup import delete_pods, find_blockers
from tpu_training_operator.domain.plan.common.restart_limits import longest_wait
from tpu_training_operator.domain.plan.placement.return_to_preferred import describe_stay
from tpu_training_operator.domain.plan.placement.search import carry_out, move, next_slice
from tpu_training_operator.domain.plan.plan import Batch, Batches, Freshness, Plan
from tpu_training_operator.domain.plan.queue.queueing import read_placement
from tpu_training_operator.domain.plan.restarts.restart import fail_or_restart, release
from tpu_training_operator.domain.plan.restarts.waiting import (
    find_late,
    find_partly_placed,
    is_partly_refused,
    read_event_lines,
    show_wait,
    start_failure,
)
from tpu_training_operator.domain.plan.start import describe_start, later_workers, may_be_newer_than_read

_READ_AGAIN = timedelta(seconds=1)


def keep_alive(ctx: Context) -> Plan:
    """Creates the gang of the current attempt, watches it, and replaces it when it fails."""
    unknown = later_workers(ctx.observed, ctx.attempt)
    if ctx.missing and unknown and may_be_newer_than_read(unknown, ctx.now):
        return Plan(again=_READ_AGAIN)
    unwanted = delete_pods(ctx.leftovers, ctx.now, ctx.reads_to_delete(ctx.leftovers))
    if unwanted or find_blockers(ctx.leftovers) or ctx.awaits_last_failure:
        return Plan(unwanted, again=_READ_AGAIN if ctx.awaits_last_failure else None)
    if any(pod.option_number != ctx.option.number for pod in ctx.observed.of_attempt(ctx.attempt)):
        # The status was edited.
        why = "its workers are not on the slice that its status names"
        return move(ctx, ctx.option, PlacementReason.STATUS_LOST, why)
    if failure := _find_failure(ctx):
        return fail_or_restart(ctx, failure)
    if ctx.missing:
        return _create_missing(ctx)
    return _watch(ctx).due_within(next_look(ctx.pods, ctx.now))


def _find_failure(ctx: Context) -> Failure | None:
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
    if ctx.has_alternatives and (due := next_slice(ctx)) is not None and ctx.now >= due.at:
        return carry_out(ctx, due)
    if ctx.is_refused and is_partly_refused(ctx.pods, ctx.job.spec.run_policy, ctx.now):
        return release(ctx, len(ctx.missing))
    where = None if ctx.queue is None else read_placement(ctx)
    if isinstance(where, Obstacle):
        return show_obstacle(ctx.observed, where, ctx.now)
    job, attempt = ctx.job, ctx.attempt
    shared = [
        Create(service(job), again=attempt > 1),
        Create(config_map(job, ctx.resolution, attempt, ctx.reporting, program_to_expect(ctx))),
        Create(env_config_map(job, ctx.resolution, attempt)),
        *(_delete_shared(ctx, attempt - 1) if attempt > 1 else delete_check_config_map(ctx)),
        *isolate(ctx, again=attempt > 1),
    ]
    arguments = (job, ctx.resolution, ctx.reporting, ctx.status.avoided_nodes, where, ctx.package_index)
    workers = Creations(tuple(ctx.missing), _create_worker, arguments)
    return Plan((Batch(shared), Batch(workers, Freshness.FRESH_ALL)))


def _create_worker(
    worker: WorkerId,
    job: TPUTrainingJob,
    resolution: Resolution,
    reporting: Reporting | None,
    avoid: Sequence[str],
    settings: PodSettings | None,
    package_index: bool,
) -> Create:
    pod = worker_pod(job, resolution, worker, reporting, avoid)
    pod = pod if package_index else without_package_index(pod)
    return Create(pod if settings is None else with_pod_settings(pod, settings))


def _delete_shared(ctx: Context, attempt: int) -> Iterator[Action]:
    """Yields the deletions of the attempt's ConfigMaps and EndpointSlices: its workers' names must not resolve to
    addresses that other pods may have by now."""
    for name in config_map_names(ctx.job.name, attempt):
        yield Delete("ConfigMap", name)
    of_each = (endpoint_slice_names(ctx.job.name, option.layout) for option in (*ctx.options, *ctx.lower_rungs))
    for name in max(of_each, key=len):
        yield Delete("EndpointSlice", name, api_version="discovery.k8s.io/v1")


def _wait_before_attempt(ctx: Context) -> timedelta:
    """Returns the rest of the wait before this attempt. A wait longer than any backoff means that the clock was set
    back."""
    earliest = ctx.status.restarts.next_attempt_time
    left = parse_time(earliest) - ctx.now if earliest else AT_ONCE
    return left if left <= longest_wait(ctx.job.spec.run_policy) else AT_ONCE


def _watch(ctx: Context) -> Plan:
    if ctx.is_running and not ctx.is_refused:
        return _watch_peers(ctx)
    if not all(pod.is_ready or pod.phase == "Succeeded" for pod in ctx.pods):
        return _watch_start(ctx)
    where = f" on {ctx.option}{describe_stay(ctx)}" if len(ctx.options) > 1 else ""
    message = f"{ctx.rung_prefix}attempt {ctx.attempt}: {every(len(ctx.pods), 'worker')} ready{where}"
    ready = ReadyState(State.RUNNING, Reason.ALL_WORKERS_READY, message)
    goodput = ctx.settled_goodput()
    if not ctx.reports:
        goodput = ctx.charge(goodput, ctx.now, Activity.TRAIN)
    status = replace(ctx.status, goodput=goodput)
    status = ctx.with_condition(status, ConditionType.GANG_READY, True, ready.reason, ready.message)
    status = ctx.present(status, ready)
    events = (Event(EventReason.RUNNING, message),)
    return Plan(_publish(ctx), status=status, events=events, again=_next_of_running(replace(ctx, status=status)))


def _next_of_running(ctx: Context) -> timedelta | None:
    """Returns when the gang that has just become ready needs its next pass: at once if anything but its own end can
    follow from that."""
    may_follow = ctx.queue or ctx.rung or ctx.has_alternatives or ctx.observed.report
    then = Plan(again=AT_ONCE) if may_follow else _watch_peers(ctx)
    return then.again if then == Plan(again=then.again) else AT_ONCE


def _publish(ctx: Context) -> Batches:
    """Returns one batch that makes the workers' names resolve, once all have an address. An address may change until
    then: a kubelet may create a pod's sandbox again before its containers run. The pods show that the attempt is still
    the present one, and the names contain it."""
    published = ctx.observed.notes.published if ctx.observed.notes else None
    names = publication(ctx.job, ctx.resolution.layout, ctx.pods, published)
    return () if names is None else (Batch((names,), Freshness.FRESH_PODS),)


def _watch_start(ctx: Context) -> Plan:
    due = next_slice(ctx)
    if due is not None and ctx.now >= due.at:
        return carry_out(ctx, due)
    again = due.at - ctx.now if due is not None else None
    if part := find_partly_placed(ctx.pods, ctx.job.spec.run_policy, ctx.status.avoided_nodes):
        if ctx.now >= part.deadline:
            return release(ctx, part.waiting)
        again = min(part.deadline - ctx.now, again or part.deadline - ctx.now)
    elif late := find_late(ctx.pods, ctx.job.spec.run_policy):
        if ctx.now >= late.deadline:
            event = read_event_lines(ctx).get(late.pod.name, "")
            return fail_or_restart(ctx, start_failure(late, event, ctx.attempt, ctx.now))
        again = late.deadline - ctx.now
    # The status shows a starting gang already, unless a refusal has replaced it.
    unblocked = ctx.present(ctx.status, describe_start(ctx, ctx.attempt)) if ctx.is_refused else None
    return show_wait(ctx, Plan(_publish(ctx), status=unblocked, again=again))


def _watch_peers(ctx: Context) -> Plan:
    """Checks that all workers of a running gang end when the first one does, and make progress until then."""
    late = straggler(ctx.pods, ctx.status, ctx.job.spec.run_policy)
    if late is None:
        return _watch_progress(ctx)
    if ctx.now >= late.deadline:
        failure = hang_failure(late.pod, late.message, ctx.attempt, ctx.now, reason=FailureReason.STRAGGLER)
        return fail_or_restart(ctx, failure)
    # Worker 0, which reports for the gang, has no more steps to report once it has succeeded.
    others = Plan() if ctx.pods[0].phase == "Succeeded" else _watch_progress(ctx)
    return others.due_within(late.deadline - ctx.now)


def _watch_progress(ctx: Context) -> Plan:
    """Restarts a hung gang, after asking for its stacks."""
    inbox = ctx.observed.inbox
    stall = standstill(ctx.status, inbox, ctx.job.spec.run_policy, ctx.now, reports=ctx.reports)
    if stall is None:
        return Plan()
    if ctx.now < stall.deadline:
        return Plan(again=stall.deadline - ctx.now)
    latest = ctx.observed.report
    report = latest if latest and latest.attempt == ctx.attempt else None
    wait = stacks_due(inbox, ctx.now)
    if report is not None and wait is None:
        return Plan((Batch((AskForStacks(),)),), again=STACKS_WAIT)
    if wait is not None and wait > AT_ONCE:
        return Plan(again=wait)
    stacks = f"; the worker's stacks:\n{report.stacks}" if report is not None and report.stacks else ""
    return fail_or_restart(ctx, hang_failure(ctx.pods[0], stall.message + stacks, ctx.attempt, ctx.now))
