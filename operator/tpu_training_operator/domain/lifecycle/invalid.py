"""What to do about a job whose spec this operator cannot use.

Such a job is not started. If it has started, it became invalid under another version of the operator, and its gang
keeps training. Two decisions are possible without the spec: whether all workers have succeeded, and whether the user
wants the job suspended.
"""

from dataclasses import replace

from tpu_training_operator.api.conditions import ConditionType, EventReason, Reason
from tpu_training_operator.api.status import Activity, State, Status
from tpu_training_operator.api.validation import InvalidJob
from tpu_training_operator.domain.actions import AT_ONCE, Event, Plan
from tpu_training_operator.domain.failures.pod_signs import has_succeeded
from tpu_training_operator.domain.lifecycle.completion import succeed
from tpu_training_operator.domain.lifecycle.conditions import Kind, ReadyState, Snapshot
from tpu_training_operator.domain.lifecycle.pod_cleanup import deletions, look_again
from tpu_training_operator.domain.lifecycle.stages import is_trial
from tpu_training_operator.domain.observed import Observed, WorkerPod


def invalid(look: Snapshot, error: InvalidJob) -> Plan:
    """The gang trains on, but asks for no better slice: nobody knows any more what it would get."""
    decided, held = _decided(look, error), deletions(look.observed.placeholders, look.now)
    return replace(decided, stages=(*decided.stages, *held)) if held else decided


def _decided(look: Snapshot, error: InvalidJob) -> Plan:
    observed, status = look.observed, look.status
    shown = look.present(status, ReadyState(State.INVALID, Kind.STUCK, Reason.INVALID_SPEC, str(error)))
    if status.attempt == 0:
        return Plan(status=shown)
    gang = _gang(observed, status)
    if status.resolved and gang and not is_trial(status) and all(map(has_succeeded, gang)):
        return succeed(look, gang, status.goodput, status.resolved.train_steps)
    message = f"this operator cannot use the spec and only watches attempt {status.attempt}: {error}"
    is_news = status.state is not State.INVALID
    events = (Event(EventReason.INVALID_SPEC, message, warning=True),) if is_news else ()
    if not _is_to_be_suspended(observed):
        return Plan(status=shown, events=events)
    if not look.is_suspended:
        # Before any worker is stopped, as with a valid spec.
        for kind, value in ((ConditionType.SUSPENDED, True), (ConditionType.GANG_READY, False)):
            shown = look.with_condition(shown, kind, value, Reason.SUSPENDED, "spec.runPolicy.suspend is true")
        goodput = status.goodput and look.charge(status.goodput, look.now, Activity.SUSPENDED)
        suspended = Event(EventReason.SUSPENDED, "stopping the workers: spec.runPolicy.suspend is true")
        return Plan(status=replace(shown, goodput=goodput), events=(*events, suspended), again=AT_ONCE)
    pods = [*observed.before_attempt(status.attempt), *observed.of_attempt(status.attempt)]
    return Plan(stages=deletions(pods, look.now), status=shown, events=events, again=look_again(pods, look.now))


def _gang(observed: Observed, status: Status) -> list[WorkerPod]:
    """All workers of the attempt, or none if any is missing. The attempt began with the numbers in the status."""
    if (layout := status.resolved) is None:
        return []
    found = [
        pod
        for pod in observed.of_attempt(status.attempt)
        if pod.worker.slice < layout.slices and pod.worker.host < layout.hosts_per_slice
    ]
    return found if len({pod.worker for pod in found}) == layout.hosts else []


def _is_to_be_suspended(observed: Observed) -> bool:
    spec = observed.job.get("spec")
    policy = spec.get("runPolicy") if isinstance(spec, dict) else None
    return isinstance(policy, dict) and policy.get("suspend") is True
