"""What follows a failure: the next attempt, or the end of the job. Called by `domain.plan`.

The attempt's number is raised, with all that was decided about it, in one status write that no effect precedes.
"""

from datetime import timedelta

from tpu_training_operator.api.conditions import ConditionType, Reason
from tpu_training_operator.api.status import MOST_NODES, Activity, DeviceFault, Failure, Goodput, State, Status
from tpu_training_operator.domain import goodput as accounts
from tpu_training_operator.domain.actions import Event, Plan
from tpu_training_operator.domain.failures import device_fault
from tpu_training_operator.domain.observed import format_time, parse_time
from tpu_training_operator.domain.picture import Kind, Picture
from tpu_training_operator.domain.progress import new_attempt
from tpu_training_operator.domain.restart_policy import backoff, charge, may_restart, pause_after_release
from tpu_training_operator.domain.situation import Situation, describe

_AT_ONCE = timedelta(0)
_PREEMPTED = 75
_FAULTS_TO_AVOID_A_NODE = 2


def fail_or_restart(here: Situation, failure: Failure) -> Plan:
    status = here.status.model_copy(
        update={
            "first_failure": here.status.first_failure or failure,
            "last_failure": failure,
            "goodput": _after_failure(here, failure),
        }
    )
    policy = here.job.spec.run_policy.restart
    if may_restart(policy, status.restarts, failure.failure_class, here.now):
        return _restart(here, status, failure)
    return _fail(here, status, failure)


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
    restarts = here.status.restarts.model_copy(update={"next_attempt_time": format_time(here.now + pause)})
    status = here.status.model_copy(
        update={
            "restarts": restarts,
            "avoided_nodes": [],
            "device_faults": [],
            "goodput": accounts.charge(here.goodput(), here.now, Activity.QUEUE),
        }
    )
    picture = Picture(State.RESTARTING, Kind.IN_PROGRESS, Reason.PARTLY_PLACED, message)
    return _next_attempt(here, status, picture, Event("Released", message, warning=True))


def _restart(here: Situation, status: Status, failure: Failure) -> Plan:
    policy = here.job.spec.run_policy.restart
    wait = backoff(policy, status.restarts, _seed(here), here.now)
    faults = _device_faults(status, failure)
    status = status.model_copy(
        update={
            "restarts": charge(policy, status.restarts, failure.failure_class, here.now, wait),
            "device_faults": faults,
            "avoided_nodes": _nodes_to_avoid(here, faults),
        }
    )
    message = f"attempt {here.attempt + 1} follows: {describe(failure)}"
    picture = Picture(State.RESTARTING, Kind.IN_PROGRESS, Reason.REPLACING_WORKERS, message)
    return _next_attempt(here, status, picture, Event("Restarting", message, warning=True))


def _next_attempt(here: Situation, status: Status, picture: Picture, event: Event) -> Plan:
    update = {"attempt": here.attempt + 1, "progress": new_attempt(status.progress)}
    status = here.mark(
        status.model_copy(update=update), ConditionType.GANG_READY, False, picture.reason, picture.message
    )
    return Plan(status=here.present(status, picture), events=(event,), again=_AT_ONCE)


def _fail(here: Situation, status: Status, failure: Failure) -> Plan:
    restart = here.job.spec.run_policy.restart
    limit = restart.limits.of(failure.failure_class)
    allowed = f"may restart the gang {limit} times in {restart.window}" if limit else "does not restart the gang"
    message = f"{describe(failure)}; {failure.failure_class} {allowed}"
    picture = Picture(State.FAILED, Kind.STUCK, Reason.RESTART_LIMIT_REACHED, message)
    status = here.mark(status, ConditionType.FAILED, True, picture.reason, message)
    return Plan(status=here.finish(status, picture), events=(Event("Failed", message, warning=True),), again=_AT_ONCE)


def _after_failure(here: Situation, failure: Failure) -> Goodput:
    """The attempt's account is closed at its failure; a preempted trainer has saved all that it did."""
    goodput = here.goodput_at_end(parse_time(failure.time))
    keeps = failure.exit_code == _PREEMPTED and here.job.spec.checkpoint is not None
    goodput = accounts.saved(goodput) if keeps else accounts.lost(goodput)
    return accounts.charge(goodput.model_copy(update={"activity": Activity.RECOVERY}), here.now, Activity.RECOVERY)


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
