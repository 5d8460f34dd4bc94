"""What follows a failure: the next attempt, or the end of the job.

The attempt's number is raised, with all that was decided about it, in one status write that no effect precedes.
"""

from dataclasses import replace
from datetime import timedelta

from tpu_training_operator.api.conditions import ConditionType, Reason
from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.api.status import MOST_NODES, Activity, DeviceFault, Failure, Goodput, State, Status
from tpu_training_operator.domain.actions import Event, Plan
from tpu_training_operator.domain.failures.failure_words import describe
from tpu_training_operator.domain.failures.first import device_fault
from tpu_training_operator.domain.lifecycle import goodput as accounts
from tpu_training_operator.domain.lifecycle.conditions import Kind, Picture
from tpu_training_operator.domain.lifecycle.context import Situation
from tpu_training_operator.domain.lifecycle.progress import new_attempt
from tpu_training_operator.domain.lifecycle.restart_budget import backoff, charge, may_restart, pause_after_release
from tpu_training_operator.domain.observed import format_time, parse_time
from tpu_training_operator.domain.words import count

_AT_ONCE = timedelta(0)
_PREEMPTED = 75
_DIVERGED = "Diverged"
_STORAGE_DENIED = "StorageDenied"
_FAULTS_TO_AVOID_A_NODE = 2


def fail_or_restart(here: Situation, failure: Failure) -> Plan:
    policy = here.job.spec.run_policy.restart
    is_confirming = _is_confirming(here, failure)
    if is_confirming:
        failure = replace(failure, failure_class=FailureClass.INFRASTRUCTURE)
    status = replace(
        here.status,
        first_failure=here.status.first_failure or failure,
        last_failure=failure,
        goodput=_after_failure(here, failure),
    )
    if before := _same_divergence(here.status, failure):
        return _fail(
            here,
            status,
            Reason.FAILED_AGAIN,
            f"{describe(failure)}; the replicas came apart at step {failure.step} in attempt {before.attempt}, too, so"
            " it is the program and not a chip, and another attempt would end there as well",
        )
    if may_restart(policy, status.restarts, failure.failure_class, here.now):
        return _restart(here, status, failure, at_once=is_confirming)
    return _give_up(here, status, failure)


def is_half_made(here: Situation) -> bool:
    """Whether the cluster has refused some of the workers for so long that the others hold their nodes for nothing."""
    deadline = timedelta(seconds=here.job.spec.run_policy.start_deadline_seconds)
    return bool(here.pods) and here.now >= max(pod.created for pod in here.pods) + deadline


def release(here: Situation, waiting: int) -> Plan:
    """The next attempt, after a pause in which another gang may take the nodes: charged to no failure class.

    `waiting`: how many workers have no place.
    """
    policy, attempt = here.job.spec.run_policy, here.attempt
    pause = pause_after_release(policy, _seed(here))
    message = (
        f"attempt {attempt + 1} follows in {pause.total_seconds():.0f} s: {waiting} of {here.resolution.layout.hosts}"
        f" workers found no place within {policy.start_deadline_seconds} s, and the others give theirs back"
    )
    if here.status.avoided_nodes:
        message += f"; it may use {', '.join(here.status.avoided_nodes)} again"
    restarts = replace(here.status.restarts, next_attempt_time=format_time(here.now + pause))
    status = replace(
        here.status,
        restarts=restarts,
        avoided_nodes=[],
        device_faults=[],
        goodput=accounts.charge(here.goodput(), here.now, Activity.QUEUE),
    )
    picture = Picture(State.RESTARTING, Kind.IN_PROGRESS, Reason.PARTLY_PLACED, message)
    return _next_attempt(here, status, picture, Event("Released", message, warning=True))


def _is_confirming(here: Situation, failure: Failure) -> bool:
    """Whether a refusal by the storage is the first of two. Rights that were granted a moment ago take a while to
    reach the storage, so one more attempt finds out whether they are missing."""
    last = here.status.last_failure
    if failure.reason != _STORAGE_DENIED:
        return False
    if last is not None and (last.reason, last.attempt) == (_STORAGE_DENIED, here.attempt - 1):
        return False
    policy = here.job.spec.run_policy.restart
    return may_restart(policy, here.status.restarts, FailureClass.INFRASTRUCTURE, here.now)


def _same_divergence(status: Status, failure: Failure) -> Failure | None:
    """The earlier divergence at the same step: the status keeps the first failure and the last."""
    if failure.reason != _DIVERGED or failure.step is None:
        return None
    known = (status.last_failure, status.first_failure)
    return next((f for f in known if f and (f.reason, f.step) == (failure.reason, failure.step)), None)


def _restart(here: Situation, status: Status, failure: Failure, *, at_once: bool) -> Plan:
    policy = here.job.spec.run_policy.restart
    wait = _AT_ONCE if at_once else backoff(policy, status.restarts, _seed(here), here.now)
    faults = _device_faults(status, failure)
    status = replace(
        status,
        restarts=charge(policy, status.restarts, failure.failure_class, here.now, wait),
        device_faults=faults,
        avoided_nodes=_nodes_to_avoid(here, faults),
    )
    when = f"begins at {format_time(here.now + wait)}" if wait > _AT_ONCE else "follows"
    message = f"attempt {here.next_attempt} {when}: {describe(failure)}"
    picture = Picture(State.RESTARTING, Kind.IN_PROGRESS, Reason.REPLACING_WORKERS, message)
    return _next_attempt(here, status, picture, Event("Restarting", message, warning=True))


def _next_attempt(here: Situation, status: Status, picture: Picture, event: Event) -> Plan:
    status = here.mark(
        replace(status, attempt=here.next_attempt, progress=new_attempt(status.progress)),
        ConditionType.GANG_READY,
        False,
        picture.reason,
        picture.message,
    )
    return Plan(status=here.present(status, picture), events=(event,), again=_AT_ONCE)


def _give_up(here: Situation, status: Status, failure: Failure) -> Plan:
    restart, kind = here.job.spec.run_policy.restart, failure.failure_class
    limit = restart.limits.of(kind)
    if failure.reason == _STORAGE_DENIED:
        account = f"{here.job.namespace}/{here.job.spec.trainer.service_account_name or 'default'}"
        why = f"grant the service account {account} access to the bucket, then create the job again"
    elif limit == 0:
        why = f"{kind} does not restart the gang"
    else:
        why = f"{kind} may restart the gang {count(limit, 'time')} in {restart.window}"
    reason = Reason.RESTART_LIMIT_REACHED if limit else Reason.NOT_RETRYABLE
    return _fail(here, status, reason, f"{describe(failure)}; {why}")


def _fail(here: Situation, status: Status, reason: Reason, message: str) -> Plan:
    picture = Picture(State.FAILED, Kind.STUCK, reason, message)
    status = here.mark(status, ConditionType.FAILED, True, picture.reason, message)
    return Plan(status=here.finish(status, picture), events=(Event("Failed", message, warning=True),), again=_AT_ONCE)


def _after_failure(here: Situation, failure: Failure) -> Goodput:
    """The attempt's account is closed at its failure; a preempted trainer has saved all that it did."""
    goodput = here.goodput_at_end(parse_time(failure.time))
    keeps = failure.exit_code == _PREEMPTED and here.job.spec.checkpoint is not None
    goodput = accounts.saved(goodput) if keeps else accounts.lost(goodput)
    return accounts.charge(replace(goodput, activity=Activity.RECOVERY), here.now, Activity.RECOVERY)


def _device_faults(status: Status, failure: Failure) -> list[DeviceFault]:
    if failure.node is None or not device_fault(failure):
        return status.device_faults
    return [*status.device_faults, DeviceFault(node=failure.node, time=failure.time)][-MOST_NODES:]


def _nodes_to_avoid(here: Situation, faults: list[DeviceFault]) -> list[str]:
    """One fault may be the last process's, which let go of the chips too late; two on one node are the node's."""
    oldest = here.now - here.job.spec.run_policy.restart.window_length
    recent = [fault.node for fault in faults if parse_time(fault.time) > oldest]
    return sorted({node for node in recent if recent.count(node) >= _FAULTS_TO_AVOID_A_NODE})


def _seed(here: Situation) -> str:
    return f"{here.job.uid}/{here.attempt}"
