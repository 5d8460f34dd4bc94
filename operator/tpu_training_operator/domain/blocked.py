"""What a job shows when the cluster refuses what the plan needs. Called by `runtime.reconciler`."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from tpu_training_operator.api.conditions import Reason
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.domain.actions import Event, Plan
from tpu_training_operator.domain.observed import Observed
from tpu_training_operator.domain.picture import Kind, Picture, present

# A quota may be raised and a name freed at any time, and nothing tells us.
_LOOK_AGAIN = timedelta(seconds=30)


@dataclass(frozen=True)
class Obstacle:
    """A refusal that stays until somebody changes something."""

    reason: Reason
    message: str


def blocked(observed: Observed, obstacle: Obstacle, now: datetime) -> Plan:
    """Stalled with the cluster's own words, instead of trying for ever in silence."""
    status = Status.model_validate(observed.job.get("status") or {})
    picture = Picture(State.BLOCKED, Kind.STUCK, obstacle.reason, obstacle.message)
    generation = observed.job["metadata"].get("generation", 1)
    return Plan(
        status=present(status, picture, generation, now),
        events=(Event("Blocked", obstacle.message, warning=True),),
        again=_LOOK_AGAIN,
    )
