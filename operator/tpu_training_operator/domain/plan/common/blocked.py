"""What a job shows when its plan cannot be carried out: the cluster refuses something, or passes keep failing."""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from tpu_training_operator.api.conditions import (
    ConditionType,
    EventReason,
    Reason,
    find,
    is_true,
    with_condition,
    without_condition,
)
from tpu_training_operator.api.constants import LABEL_JOB_NAME
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.domain.cluster_state.observed import Observed
from tpu_training_operator.domain.cluster_state.ownership import Claim, Object, claim, controller, is_ours
from tpu_training_operator.domain.objects.actions import Event
from tpu_training_operator.domain.plan.common.conditions import Kind, ReadyState, Snapshot
from tpu_training_operator.domain.plan.plan import Plan

# A quota may be raised or a name freed at any time, and nothing tells the operator.
_LOOK_AGAIN = timedelta(seconds=30)
# Old workers go within their grace period. Nothing tells when their Service and ConfigMap are gone.
_SOON = timedelta(seconds=5)


@dataclass(frozen=True)
class Obstacle:
    """A refusal. It lasts until somebody changes something, unless it `passes` by itself."""

    reason: Reason
    message: str
    passes: bool = False


def name_taken(kind: str, existing: Object, job: Object) -> Obstacle | None:
    """Why the job cannot use the name of an existing object; None if the object is the job's own."""
    name = existing["metadata"]["name"]
    match claim(existing, job):
        case Claim.OURS:
            labels = existing["metadata"].get("labels") or {}
            if kind == "Pod" and labels.get(LABEL_JOB_NAME) != job["metadata"]["name"]:
                message = f"Pod {name} is a worker of this job but has lost its label {LABEL_JOB_NAME}; delete the pod"
                return Obstacle(Reason.NAME_CONFLICT, message)
            return None
        case Claim.GOING:
            what = "workers" if kind == "Pod" else kind
            message = f"waiting for the deleted job {job['metadata']['name']} to release its {what}"
            if is_ours(existing, job):
                message = f"{kind} {name} is being deleted; once it is gone, it is created again"
            return Obstacle(Reason.WAITING_FOR_DELETED_JOB, message, passes=True)
        case Claim.FOREIGN:
            message = f"{kind} {name} exists and belongs to somebody else; delete it or rename the job"
            return Obstacle(Reason.NAME_CONFLICT, message)


def changed_at_creation(asked: Object, created: Object) -> Obstacle | None:
    """Names what the cluster has changed in a pod, if the job cannot use it: unseen or unowned it would run beside its
    gang, and a worker that starts again in place cannot join its peers."""
    label, owner, policy = ([read(pod) for pod in (asked, created)] for read in (_job_label, _owner, _restart_policy))
    lost = [
        (owner, "without its owner reference"),
        (label, f"without its label {LABEL_JOB_NAME}"),
        (policy, f"with restartPolicy {policy[1]}"),
    ]
    how = " and ".join(words for (wanted, got), words in lost if wanted != got)
    if not how:
        return None
    message = (
        f"Pod {asked['metadata']['name']} came into being {how}, and was deleted again: a mutating admission webhook"
        " or policy of the cluster has changed it; exempt the pods of TPUTrainingJobs from it"
    )
    return Obstacle(Reason.INVALID_OBJECT, message)


def _job_label(pod: Object) -> Any:
    return (pod["metadata"].get("labels") or {}).get(LABEL_JOB_NAME)


def _owner(pod: Object) -> Any:
    return controller(pod).get("uid")


def _restart_policy(pod: Object) -> Any:
    return (pod.get("spec") or {}).get("restartPolicy")


def blocked(observed: Observed, obstacle: Obstacle, now: datetime) -> Plan:
    """In progress while the obstacle passes by itself; else Stalled, with the cluster's own words."""
    look = Snapshot(observed, Status.read(observed.job.get("status")), now)
    if obstacle.passes:
        state = State.RESTARTING if look.status.state is State.RESTARTING else State.STARTING
        waits = ReadyState(state, Kind.IN_PROGRESS, obstacle.reason, obstacle.message)
        return Plan(status=look.present(look.status, waits), again=_SOON)
    stalled = ReadyState(State.BLOCKED, Kind.STUCK, obstacle.reason, obstacle.message)
    return Plan(
        status=look.present(look.status, stalled),
        events=(Event(EventReason.BLOCKED, obstacle.message, warning=True),),
        again=_LOOK_AGAIN,
    )


def retrying(observed: Observed, message: str, now: datetime) -> Status:
    """The status while passes keep failing: Reconciling says why, and for kstatus the job is in progress.

    Nothing else changes. As Ready holds the last decision, any operator whose pass succeeds can restore Reconciling
    from it (`recovered`).
    """
    look = Snapshot(observed, Status.read(observed.job.get("status")), now)
    return look.with_condition(look.status, ConditionType.RECONCILING, True, Reason.PROGRESSING_WITH_RETRY, message)


def recovered(status: Status) -> Status:
    """The status as it was before passes failed; the same object if none did."""
    reconciling = find(status.conditions, ConditionType.RECONCILING)
    if reconciling is None or reconciling.reason != Reason.PROGRESSING_WITH_RETRY:
        return status
    ready = find(status.conditions, ConditionType.READY)
    if ready is None or ready.is_true or is_true(status.conditions, ConditionType.STALLED):
        return replace(status, conditions=without_condition(status.conditions, ConditionType.RECONCILING))
    restored = replace(ready, type=ConditionType.RECONCILING, status="True")
    return replace(status, conditions=with_condition(status.conditions, restored))
