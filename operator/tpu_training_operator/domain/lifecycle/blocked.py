"""What a job shows when the cluster refuses what the plan needs."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from tpu_training_operator.api.conditions import Reason
from tpu_training_operator.api.constants import LABEL_JOB_NAME
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.domain.actions import Event, Plan
from tpu_training_operator.domain.lifecycle.conditions import Kind, Picture, present
from tpu_training_operator.domain.observed import Observed
from tpu_training_operator.domain.ownership import Claim, Object, claim

# A quota may be raised and a name freed at any time, and nothing tells us.
_LOOK_AGAIN = timedelta(seconds=30)
# Old workers go within their grace period. Their Service and ConfigMap go without a word.
_SOON = timedelta(seconds=5)


@dataclass(frozen=True)
class Obstacle:
    """A refusal. It stays until somebody changes something, unless it `passes` by itself."""

    reason: Reason
    message: str
    passes: bool = False


def name_taken(kind: str, existing: Object, job: Object) -> Obstacle | None:
    """Why the job cannot have the name of an object that exists; None where the object is the job's own."""
    name = existing["metadata"]["name"]
    match claim(existing, job):
        case Claim.OURS:
            labels = existing["metadata"].get("labels") or {}
            if kind == "Pod" and labels.get(LABEL_JOB_NAME) != job["metadata"]["name"]:
                message = f"Pod {name} is this job's worker and has lost its label {LABEL_JOB_NAME}; delete the pod"
                return Obstacle(Reason.NAME_CONFLICT, message)
            return None
        case Claim.GOING:
            what = "the workers" if kind == "Pod" else f"the {kind}"
            end = "stop" if kind == "Pod" else "go"
            message = f"waiting for {what} of the deleted job {job['metadata']['name']} to {end}"
            return Obstacle(Reason.WAITING_FOR_DELETED_JOB, message, passes=True)
        case Claim.FOREIGN:
            message = f"{kind} {name} exists and belongs to somebody else; delete it or rename the job"
            return Obstacle(Reason.NAME_CONFLICT, message)


def blocked(observed: Observed, obstacle: Obstacle, now: datetime) -> Plan:
    """Stalled with the cluster's own words, instead of trying for ever in silence; in progress while it passes."""
    status = Status.read(observed.job.get("status"))
    generation = observed.job["metadata"].get("generation", 1)
    if obstacle.passes:
        state = State.RESTARTING if status.state is State.RESTARTING else State.STARTING
        waits = Picture(state, Kind.IN_PROGRESS, obstacle.reason, obstacle.message)
        return Plan(status=present(status, waits, generation, now), again=_SOON)
    picture = Picture(State.BLOCKED, Kind.STUCK, obstacle.reason, obstacle.message)
    return Plan(
        status=present(status, picture, generation, now),
        events=(Event("Blocked", obstacle.message, warning=True),),
        again=_LOOK_AGAIN,
    )
