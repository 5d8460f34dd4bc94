"""The entry check: before a job asks for its slice, one pod without TPUs tries its code.

The condition EntryCheckPassed decides, as the attempt does for workers (ADR 2). One pass makes it Unknown, and does
nothing else; later passes create the pod, and create it again if it is gone. One pass makes it True or False, and does
nothing else. The result is final: no restart, resumption or new operator repeats the check. Then the first attempt
begins. So a job that began under an operator without the check is never checked, nor is a job that already has a
Workload.

The check comes before the queue: its pod needs no chips, and a job with a typo would hold its place for nothing.
"""

from collections.abc import Sequence
from datetime import timedelta

from tpu_training_operator.api.conditions import ConditionType, EventReason, Reason, find, without_condition
from tpu_training_operator.api.entry_check import EntryCheckMode
from tpu_training_operator.api.job import Spec
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.slice import Hardware
from tpu_training_operator.api.status import Activity, State, Status
from tpu_training_operator.domain.cluster_state.hosts import why_not_ready
from tpu_training_operator.domain.cluster_state.observed import EntryCheckPod
from tpu_training_operator.domain.cluster_state.obstacles import Obstacle
from tpu_training_operator.domain.failures.entry_check import CheckOutcome, CheckVerdict, next_verdict, verdict
from tpu_training_operator.domain.job.naming import config_map_name
from tpu_training_operator.domain.objects.actions import AT_ONCE, Action, Create, Delete, Event
from tpu_training_operator.domain.objects.entry_check_pod import REPLICA_ZERO, entry_check_config_map, entry_check_pod
from tpu_training_operator.domain.objects.worker_pod import without_package_index
from tpu_training_operator.domain.plan.blocked import show_obstacle
from tpu_training_operator.domain.plan.checks.data_in_region import explain_distance, record_distance
from tpu_training_operator.domain.plan.checks.step_fits import find_refusal, record_fit
from tpu_training_operator.domain.plan.common.completion import fail
from tpu_training_operator.domain.plan.common.conditions import ReadyState
from tpu_training_operator.domain.plan.common.context import Context, isolate
from tpu_training_operator.domain.plan.common.pod_cleanup import delete_by_force, describe_stuck, is_stuck, look_again
from tpu_training_operator.domain.plan.plan import LOOK_AGAIN, Batch, Freshness, Plan

_CHECKED = ConditionType.ENTRY_CHECK_PASSED
# Reasons for which a cluster refuses the pod for good.
_REFUSALS = (Reason.NOT_PERMITTED, Reason.INVALID_OBJECT, Reason.NAME_CONFLICT)
_NEW_WORDS = timedelta(minutes=1)
_RESUMED = "spec.runPolicy.suspend is false"


def check_entry(ctx: Context) -> Plan | None:
    """Plans for a job whose code is still to be checked; None for any other."""
    if ctx.attempt or not (ctx.is_checking or find(ctx.status.conditions, _CHECKED) is None):
        return None
    if not is_wanted(ctx.job.spec):
        changed = CheckVerdict(CheckOutcome.NOTHING, "spec.entryCheck.mode was changed before the check ended")
        return _decide(ctx, changed) if ctx.is_checking else None
    if not ctx.is_checking:
        # The Workload is older than the check, so the job may be admitted at any moment.
        has_workload = ctx.queue is not None and ctx.queue.workload is not None
        return None if has_workload else _begin(ctx)
    pod = ctx.observed.entry_check_pod
    if pod is None:
        return _create(ctx)
    if pod.is_terminating:
        return _wait_until_gone(ctx, pod)
    result = verdict(pod, ctx.job.spec.entry_check, ctx.now)
    return _wait(ctx, pod) if result is None else _decide(ctx, result)


def note_unchecked(ctx: Context, status: Status) -> Status:
    """Returns the status that begins the first attempt. It says why the code of a job on TPUs was not checked, unless
    the user has chosen that."""
    spec = ctx.job.spec
    chosen = spec.entry_check.mode is not EntryCheckMode.AUTO or spec.slice.hardware is not Hardware.TPU
    if ctx.attempt or chosen or spec.trainer.entrypoint is not None:
        return status
    message = "a job with trainer.command has no entrypoint that could be tried"
    return ctx.with_condition(status, _CHECKED, False, Reason.ENTRY_NOT_CHECKED, message)


def reset_check(ctx: Context, status: Status) -> Status:
    """Returns the status that begins a suspension, after which an unfinished check starts again."""
    if not ctx.is_checking:
        return status
    return replace(status, conditions=without_condition(status.conditions, _CHECKED))


def delete_check_config_map(ctx: Context) -> Sequence[Action]:
    """Returns the deletion of the check's ConfigMap. The pod stays for its log."""
    if find(ctx.status.conditions, _CHECKED) is None:
        return ()
    return (Delete("ConfigMap", config_map_name(ctx.job.name, REPLICA_ZERO.attempt)),)


def is_wanted(spec: Spec) -> bool:
    if spec.entry_check.mode is EntryCheckMode.SKIP:
        return False
    return spec.entry_check.is_required or (spec.slice.hardware is Hardware.TPU and spec.trainer.entrypoint is not None)


def _begin(ctx: Context) -> Plan:
    message = f"entry check: {ctx.job.spec.trainer.entrypoint} is tried on a CPU before the job asks for its slice"
    ready = ReadyState(State.STARTING, Reason.CHECKING_ENTRY, message)
    status = replace(ctx.status, resolved=ctx.resolution.resolved)
    status = ctx.with_condition(status, _CHECKED, None, ready.reason, message)
    events = [Event(EventReason.CHECKING_ENTRY, message)]
    if ctx.is_suspended:
        goodput = ctx.goodput_of_stopped() or ctx.settled_goodput()
        status = replace(status, goodput=ctx.charge(goodput, ctx.now, Activity.QUEUE))
        status = ctx.with_condition(status, ConditionType.SUSPENDED, False, Reason.RESUMED, _RESUMED)
        events.insert(0, Event(EventReason.RESUMED, _RESUMED))
    return Plan(status=ctx.present(status, ready), events=tuple(events), again=AT_ONCE)


def _create(ctx: Context) -> Plan:
    ready = find(ctx.status.conditions, ConditionType.READY)
    if not ctx.job.spec.entry_check.is_required and ctx.is_refused and ready is not None and ready.reason in _REFUSALS:
        return _decide(ctx, CheckVerdict(CheckOutcome.NOTHING, ready.message))
    config_map = Create(entry_check_config_map(ctx.option))
    body = entry_check_pod(ctx.job, ctx.resolution)
    pod = Create(body if ctx.package_index else without_package_index(body))
    shared = (config_map, *isolate(ctx))
    return Plan(batches=(Batch(shared), Batch((pod,), Freshness.FRESH_ALL)))


def _wait_until_gone(ctx: Context, pod: EntryCheckPod) -> Plan:
    """Waits for the deletion of the check's pod, after which it is created again."""
    if not is_stuck(pod, ctx.now):
        return Plan(delete_by_force([pod], ctx.now), again=look_again([pod], ctx.now) or LOOK_AGAIN)
    why = describe_stuck(pod)
    if not ctx.job.spec.entry_check.is_required:
        return _decide(ctx, CheckVerdict(CheckOutcome.NOTHING, why))
    return show_obstacle(ctx.observed, Obstacle(Reason.NAME_CONFLICT, why), ctx.now)


def _wait(ctx: Context, pod: EntryCheckPod) -> Plan:
    again = next_verdict(pod, ctx.job.spec.entry_check, ctx.now)
    if pod.placed is None:
        words, why = "waits for a node without TPUs", why_not_ready(pod)
    elif pod.phase == "Running":
        words, why = "runs", ""
    else:
        words, why = "starts on its node", why_not_ready(pod)
    begins = f"entry check: {pod.name} {words}"
    message = f"{begins}: {why}" if why else begins
    ready, notes = find(ctx.status.conditions, ConditionType.READY), ctx.observed.notes
    shown = ready.message if ready is not None else ""
    is_old = notes is not None and (notes.written is None or ctx.now >= notes.written + _NEW_WORDS)
    if message == shown or (shown.startswith(begins) and not is_old):
        return Plan(again=again)
    ready_state = ReadyState(State.STARTING, Reason.CHECKING_ENTRY, message)
    return Plan(status=ctx.present(ctx.status, ready_state), again=again)


def _decide(ctx: Context, result: CheckVerdict) -> Plan:
    is_required = ctx.job.spec.entry_check.mode is EntryCheckMode.REQUIRE
    if result.finding is CheckOutcome.FAILED or (result.finding is CheckOutcome.NOTHING and is_required):
        why = "no worker was created" if result.finding is CheckOutcome.FAILED else "spec.entryCheck.mode is Require"
        return _fail(ctx, result, Reason.ENTRY_FAILED, why)
    if far := explain_distance(ctx):
        why, far_away = "spec.entryCheck.dataInRegion is Require", CheckVerdict(CheckOutcome.NOTHING, far)
        return _fail(ctx, far_away, Reason.BUCKET_OUTSIDE_REGION, why)
    if refused := find_refusal(ctx):
        reason, what, why = refused
        return _fail(ctx, CheckVerdict(CheckOutcome.NOTHING, what), reason, why)
    has_passed = result.finding is CheckOutcome.PASSED
    reason = Reason.ENTRY_PASSED if has_passed else Reason.ENTRY_NOT_CHECKED
    words = result.message if has_passed else f"the job starts anyway: {result.message}"
    message = f"entry check: {words}"
    status = ctx.with_condition(record_distance(ctx, ctx.status), _CHECKED, has_passed, reason, message)
    status, compiled = record_fit(ctx, status)
    ready = ReadyState(State.STARTING, reason, message)
    events = [Event(EventReason(reason), message, warning=not has_passed), *compiled]
    data = find(status.conditions, ConditionType.DATA_IN_REGION)
    if data is not None and data.reason == Reason.BUCKET_OUTSIDE_REGION:
        events.append(Event(EventReason.BUCKET_OUTSIDE_REGION, data.message, warning=True))
    return Plan(status=ctx.present(status, ready), events=tuple(events), again=AT_ONCE)


def _fail(ctx: Context, result: CheckVerdict, reason: Reason, why: str) -> Plan:
    """Fails the job. No worker was created, and no failure class is charged."""
    message = f"{result.message}; {why}"
    status = replace(
        ctx.status, first_failure=result.failure, last_failure=result.failure, goodput=ctx.settled_goodput()
    )
    status = ctx.with_condition(record_distance(ctx, status), _CHECKED, False, reason, message)
    status, _ = record_fit(ctx, status)
    return fail(ctx, status, reason, message)
