"""How a job presents itself: the state word and the three conditions that kstatus reads.

picture       Ready    Reconciling   Stalled    kstatus, kubectl wait, Flux, Argo CD
in progress   False    True          -          InProgress
settled       True     -             -          Current  (running, suspended and succeeded are all as asked for)
stuck         False    -             True       Failed
"""

from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum

from tpu_training_operator.api.conditions import (
    LONGEST_MESSAGE,
    Condition,
    ConditionType,
    Reason,
    with_condition,
    without_condition,
)
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.domain.observed import format_time


class Kind(Enum):
    IN_PROGRESS = "in progress"
    SETTLED = "settled"
    STUCK = "stuck"


@dataclass(frozen=True)
class Picture:
    state: State
    kind: Kind
    reason: Reason
    message: str


def present(status: Status, picture: Picture, generation: int, now: datetime) -> Status:
    """The status showing `picture`, as observed at `generation`."""

    def write(conditions: list[Condition], kind: ConditionType, value: bool) -> list[Condition]:
        return with_condition(conditions, condition(kind, value, picture.reason, picture.message, generation, now))

    conditions = write(status.conditions, ConditionType.READY, picture.kind is Kind.SETTLED)
    for kind, present_while in (
        (ConditionType.RECONCILING, Kind.IN_PROGRESS),
        (ConditionType.STALLED, Kind.STUCK),
    ):
        if picture.kind is present_while:
            conditions = write(conditions, kind, True)
        else:
            conditions = without_condition(conditions, kind)
    return replace(status, observed_generation=generation, state=picture.state, conditions=conditions)


def condition(
    kind: ConditionType, value: bool, reason: Reason, message: str, generation: int, now: datetime
) -> Condition:
    return Condition(
        type=kind,
        status="True" if value else "False",
        observed_generation=generation,
        last_transition_time=format_time(now),
        reason=reason,
        # The API server's refusals can be as long as the object that it refuses.
        message=message[:LONGEST_MESSAGE],
    )


def mark(
    status: Status,
    kind: ConditionType,
    value: bool,
    reason: Reason,
    message: str,
    generation: int,
    now: datetime,
) -> Status:
    """The status with one more condition set."""
    new = condition(kind, value, reason, message, generation, now)
    return replace(status, conditions=with_condition(status.conditions, new))
