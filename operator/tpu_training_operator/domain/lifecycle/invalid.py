"""What to do about a job whose spec this operator cannot use.

Such a job is not begun. One that has begun became invalid under another version of the operator, and its gang trains
on: what can be said without the spec is whether all workers have succeeded, and whether they are to be suspended.
"""

from dataclasses import replace
from datetime import datetime, timedelta

from tpu_training_operator.api.conditions import ConditionType, Reason, is_true
from tpu_training_operator.api.status import Activity, State, Status
from tpu_training_operator.api.validation import InvalidJob
from tpu_training_operator.domain.actions import Event, Plan
from tpu_training_operator.domain.failures.pod_signs import has_succeeded
from tpu_training_operator.domain.lifecycle import goodput as accounts
from tpu_training_operator.domain.lifecycle.completion import words_of_success
from tpu_training_operator.domain.lifecycle.conditions import Kind, Picture, mark, present
from tpu_training_operator.domain.lifecycle.outcome import final_progress
from tpu_training_operator.domain.lifecycle.pod_cleanup import deletions, look_again
from tpu_training_operator.domain.observed import Observed, WorkerPod, format_time

_AT_ONCE = timedelta(0)


def invalid(observed: Observed, status: Status, error: InvalidJob, now: datetime) -> Plan:
    generation = observed.job["metadata"].get("generation", 1)
    shown = present(status, Picture(State.INVALID, Kind.STUCK, Reason.INVALID_SPEC, str(error)), generation, now)
    if status.attempt == 0:
        return Plan(status=shown)
    gang = _gang(observed, status)
    if gang and all(map(has_succeeded, gang)):
        return _succeed(gang, status, generation, now)
    message = f"the spec is not valid for this operator, which only watches attempt {status.attempt}: {error}"
    is_news = status.state is not State.INVALID
    events = (Event("InvalidSpec", message, warning=True),) if is_news else ()
    if not _is_to_be_suspended(observed):
        return Plan(status=shown, events=events)
    if not is_true(status.conditions, ConditionType.SUSPENDED):
        # Before any worker is stopped, as with a valid spec.
        for kind, value in ((ConditionType.SUSPENDED, True), (ConditionType.GANG_READY, False)):
            shown = mark(shown, kind, value, Reason.SUSPENDED, "suspend is on", generation, now)
        if status.goodput:
            charged = accounts.charge(status.goodput, now, Activity.SUSPENDED)
            shown = replace(shown, goodput=charged)
        suspended = Event("Suspended", "the workers are told to stop")
        return Plan(status=shown, events=(*events, suspended), again=_AT_ONCE)
    pods = [*observed.before_attempt(status.attempt), *observed.of_attempt(status.attempt)]
    return Plan(stages=deletions(pods, now), status=shown, events=events, again=look_again(pods, now))


def _gang(observed: Observed, status: Status) -> list[WorkerPod]:
    """All workers of the attempt; none where not all of them are there. The numbers are those it began with."""
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


def _succeed(gang: list[WorkerPod], status: Status, generation: int, now: datetime) -> Plan:
    message = words_of_success(gang)
    picture = Picture(State.SUCCEEDED, Kind.SETTLED, Reason.ALL_WORKERS_SUCCEEDED, message)
    total = status.resolved.train_steps if status.resolved else 0
    goodput = accounts.charge(status.goodput, now, Activity.FINISHED) if status.goodput else None
    status = replace(
        status,
        progress=final_progress(gang[0], total, status.progress) or status.progress,
        goodput=goodput,
        completion_time=goodput.since if goodput else format_time(now),
        avoided_nodes=[],
    )
    if is_true(status.conditions, ConditionType.SUSPENDED):
        status = mark(status, ConditionType.SUSPENDED, False, picture.reason, message, generation, now)
    for kind, value in ((ConditionType.GANG_READY, False), (ConditionType.SUCCEEDED, True)):
        status = mark(status, kind, value, picture.reason, message, generation, now)
    status = present(status, picture, generation, now)
    return Plan(status=status, events=(Event("Succeeded", message),), again=_AT_ONCE)
