"""What a job looks like to the tools that ask whether it is well: kstatus, and through it kubectl, Flux and Argo CD."""

from typing import Any

import pytest

from tests.unit.kstatus import kstatus
from tests.unit.pods import NOON, at, time_at
from tpu_training_operator.api.conditions import Condition, ConditionType, Reason, find
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.domain.lifecycle.conditions import Kind, Picture, mark, present


def picture(kind: Kind, state: State = State.RUNNING, message: str = "why") -> Picture:
    return Picture(state, kind, Reason.ALL_WORKERS_READY, message)


def job_of(status: Status, generation: int = 1) -> dict[str, Any]:
    return {
        "metadata": {"generation": generation},
        "status": status.as_json(),
    }


@pytest.mark.parametrize("before", list(Kind))
@pytest.mark.parametrize(
    ("kind", "conditions", "read_as"),
    [
        (Kind.IN_PROGRESS, {"Ready": "False", "Reconciling": "True"}, "InProgress"),
        (Kind.SETTLED, {"Ready": "True"}, "Current"),
        (Kind.STUCK, {"Ready": "False", "Stalled": "True"}, "Failed"),
    ],
)
def test_three_pictures_whatever_was_shown_before(
    before: Kind, kind: Kind, conditions: dict[str, str], read_as: str
) -> None:
    status = present(present(Status(), picture(before), 1, NOON), picture(kind), 2, NOON)
    assert {condition.type: condition.status for condition in status.conditions} == conditions
    assert kstatus(job_of(status, generation=2)) == read_as


def test_a_picture_of_an_older_generation_is_still_in_progress() -> None:
    status = present(Status(), picture(Kind.SETTLED), 1, NOON)
    assert kstatus(job_of(status, generation=2)) == "InProgress"


def test_state_reason_and_message_are_those_of_the_picture() -> None:
    status = present(Status(), picture(Kind.SETTLED, State.SUSPENDED, "asked for"), 3, NOON)
    ready = find(status.conditions, ConditionType.READY)
    assert ready is not None
    assert (status.state, status.observed_generation) == (State.SUSPENDED, 3)
    assert (ready.reason, ready.message, ready.observed_generation) == (Reason.ALL_WORKERS_READY, "asked for", 3)


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    status = present(Status(), picture(Kind.SETTLED), 1, at(0))
    status = present(status, picture(Kind.SETTLED, message="still"), 1, at(10))
    assert [condition.last_transition_time for condition in status.conditions] == [time_at(0)]
    status = present(status, picture(Kind.STUCK), 1, at(20))
    assert [condition.last_transition_time for condition in status.conditions] == [time_at(20), time_at(20)]


def test_conditions_of_other_types_stay_as_they_are() -> None:
    marked = mark(Status(), ConditionType.GANG_READY, True, Reason.ALL_WORKERS_READY, "all", 1, NOON)
    shown = present(marked, picture(Kind.SETTLED), 2, at(10))
    assert find(shown.conditions, ConditionType.GANG_READY) == find(marked.conditions, ConditionType.GANG_READY)


def test_a_message_of_any_length_can_be_shown_and_read_back() -> None:
    """An API server that refuses a pod may quote all of it."""
    status = present(Status(), picture(Kind.STUCK, message="x" * 100_000), 1, NOON)
    assert Status.read(job_of(status)["status"]) == status


def test_fields_of_a_newer_operator_are_dropped() -> None:
    body = {"attempt": 2, "checkpoint": {"step": 3}, "restarts": {"byClass": {"Unknown": 1}, "wasted": 5}}
    status = Status.read(body)
    assert (status.attempt, status.restarts.total) == (2, 1)


def test_a_condition_knows_whether_it_is_true() -> None:
    condition = Condition(type="Ready", status="Unknown", last_transition_time=time_at(0), reason="x")
    assert not condition.is_true
