"""What follows a failure: the next attempt, or the end of the job.

One status write raises the attempt and records everything decided about it, before anything is done.
"""

from tpu_contract.protocol import ExitCode
from tpu_training_operator.api.conditions import EventReason, Reason
from tpu_training_operator.api.failures import FailureReason
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.api.status import MOST_NODES, Activity, DeviceFault, Failure, Goodput, State, Status
from tpu_training_operator.api.words import count, span
from tpu_training_operator.domain.cluster_state.observed import format_time, parse_time
from tpu_training_operator.domain.failures.first import is_device_fault
from tpu_training_operator.domain.failures.messages import describe
from tpu_training_operator.domain.objects.actions import AT_ONCE
from tpu_training_operator.domain.plan.common.accounts import mark_lost, mark_saved
from tpu_training_operator.domain.plan.common.attempt import Why, begin_attempt
from tpu_training_operator.domain.plan.common.completion import fail
from tpu_training_operator.domain.plan.common.context import Context
from tpu_training_operator.domain.plan.common.restart_limits import (
    PAUSE_AFTER_PREEMPTION,
    backoff,
    count_restart,
    may_restart,
    pause_after_release,
)
from tpu_training_operator.domain.plan.plan import Plan

_FAULTS_TO_AVOID_A_NODE = 2


def fail_or_restart(ctx: Context, failure: Failure) -> Plan:
    policy = ctx.job.spec.run_policy.restart
    is_confirming = _is_confirming(ctx, failure)
    if is_confirming:
        failure = replace(failure, failure_class=FailureClass.INFRASTRUCTURE)
    status = replace(
        ctx.status,
        first_failure=ctx.status.first_failure or failure,
        last_failure=failure,
        goodput=_account_for_failure(ctx, failure),
    )
    if before := _find_same_divergence(ctx.status, failure):
        why = (
            f"the replicas also diverged at step {failure.step} in attempt {before.attempt}, so the program is at fault"
            " and not a chip, and another attempt would end the same way"
        )
        return fail(ctx, status, Reason.DIVERGED_TWICE, f"{describe(failure)}; {why}")
    if may_restart(policy, status.restarts, failure.failure_class, ctx.now):
        return _restart(ctx, status, failure, at_once=is_confirming)
    return _give_up(ctx, status, failure)


def release(ctx: Context, waiting: int) -> Plan:
    """Plans the next attempt, after a pause in which another gang may take the nodes. No failure class is charged.

    `waiting`: how many workers could not be placed.
    """
    policy = ctx.job.spec.run_policy
    pause = pause_after_release(policy, _seed(ctx))
    message = (
        f"{ctx.rung_prefix}attempt {ctx.next_attempt} starts in {pause.total_seconds():.0f} s: {waiting} of"
        f" {count(ctx.resolution.layout.hosts, 'worker')} could not be placed within {policy.start_deadline_seconds} s,"
        " so the others release their nodes"
    )
    if ctx.status.avoided_nodes:
        message += f"; the job may use {', '.join(ctx.status.avoided_nodes)} again"
    status = replace(
        ctx.status,
        restarts=replace(ctx.status.restarts, next_attempt_time=format_time(ctx.now + pause)),
        avoided_nodes=[],
        device_faults=[],
        goodput=ctx.settled_goodput(),
    )
    return _begin_again(
        ctx, status, Why(Reason.SOME_PODS_UNSCHEDULABLE, EventReason.NODES_RELEASED, message), Activity.QUEUE
    )


def _is_confirming(ctx: Context, failure: Failure) -> bool:
    """Returns whether this is the storage's first refusal of two. Rights granted a moment ago take a while to reach the
    storage, so one more attempt finds out whether they are really missing."""
    last = ctx.status.last_failure
    if failure.reason != FailureReason.STORAGE_DENIED:
        return False
    if last is not None and (last.reason, last.attempt) == (FailureReason.STORAGE_DENIED, ctx.attempt - 1):
        return False
    policy = ctx.job.spec.run_policy.restart
    return may_restart(policy, ctx.status.restarts, FailureClass.INFRASTRUCTURE, ctx.now)


def _find_same_divergence(status: Status, failure: Failure) -> Failure | None:
    """Returns an earlier divergence at the same step. The status remembers the first and the last failure."""
    if failure.reason != FailureReason.DIVERGED or failure.step is None:
        return None
    known = (status.last_failure, status.first_failure)
    return next((f for f in known if f and (f.reason, f.step) == (failure.reason, failure.step)), None)


def _restart(ctx: Context, status: Status, failure: Failure, *, at_once: bool) -> Plan:
    policy = ctx.job.spec.run_policy.restart
    wait = AT_ONCE if at_once else backoff(policy, status.restarts, _seed(ctx), ctx.now)
    if failure.reason == FailureReason.PREEMPTED_BY_SCHEDULER:
        wait = max(wait, PAUSE_AFTER_PREEMPTION)
    faults = _add_device_fault(status, failure)
    status = replace(
        status,
        restarts=count_restart(policy, status.restarts, failure.failure_class, ctx.now, wait),
        device_faults=faults,
        avoided_nodes=_find_nodes_to_avoid(ctx, faults),
    )
    when = f"at {format_time(ctx.now + wait)}" if wait > AT_ONCE else "now"
    message = f"{ctx.rung_prefix}attempt {ctx.next_attempt} starts {when}: {describe(failure)}"
    return _begin_again(ctx, status, Why(Reason.REPLACING_WORKERS, EventReason.RESTARTING, message), Activity.RECOVERY)


def _begin_again(ctx: Context, status: Status, why: Why, then: Activity) -> Plan:
    why = replace(why, warning=True, state=State.RESTARTING)
    return begin_attempt(ctx, ctx.option, why, status, then=then)


def _give_up(ctx: Context, status: Status, failure: Failure) -> Plan:
    restart, kind = ctx.job.spec.run_policy.restart, failure.failure_class
    limit = restart.limit_of(kind)
    if failure.reason == FailureReason.STORAGE_DENIED and failure.message.startswith("/"):
        # The trainer's message begins with the path of a directory.
        why = "give the worker's user the right to write there, then create the job again"
    elif failure.reason == FailureReason.STORAGE_DENIED:
        account = f"{ctx.job.namespace}/{ctx.job.spec.trainer.service_account_name or 'default'}"
        why = f"grant the service account {account} access to the bucket, then create the job again"
    elif not limit:
        why = f"the restart limit for {kind} is 0"
    else:
        why = f"the restart limit for {kind} is {limit} in {span(restart.window_seconds)}"
    reason = Reason.RESTART_LIMIT_REACHED if limit else Reason.NOT_RETRYABLE
    return fail(ctx, status, reason, f"{describe(failure)}; {why}")


def _account_for_failure(ctx: Context, failure: Failure) -> Goodput:
    """Returns the goodput with the attempt's training ended at its failure. A preempted trainer has saved all of it."""
    goodput = ctx.goodput_at_end(parse_time(failure.time))
    keeps = failure.exit_code == ExitCode.Preempted and ctx.job.spec.checkpoint is not None
    goodput = mark_saved(goodput) if keeps else mark_lost(goodput)
    return replace(goodput, activity=Activity.RECOVERY)


def _add_device_fault(status: Status, failure: Failure) -> list[DeviceFault]:
    if failure.node is None or not is_device_fault(failure):
        return status.device_faults
    fault = DeviceFault(node=failure.node, time=failure.time)
    # What the slice check has measured needs no second fault to be believed, unless the chips are only busy.
    is_measured = failure.exit_code == ExitCode.SliceUnfit and failure.reason != FailureReason.DEVICE_BUSY
    times = _FAULTS_TO_AVOID_A_NODE if is_measured else 1
    return [*status.device_faults, *[fault] * times][-MOST_NODES:]


def _find_nodes_to_avoid(ctx: Context, faults: list[DeviceFault]) -> list[str]:
    """Returns the nodes to avoid. One fault may come from a process that released the chips too late; two on one node
    come from the node."""
    oldest = ctx.now - ctx.job.spec.run_policy.restart.window
    recent = [fault.node for fault in faults if parse_time(fault.time) > oldest]
    return sorted({node for node in recent if recent.count(node) >= _FAULTS_TO_AVOID_A_NODE})


def _seed(ctx: Context) -> str:
    return f"{ctx.job.uid}/{ctx.attempt}"
