"""What tools that ask for a job's health see: kstatus, and through it kubectl, Flux and Argo CD."""

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from pydantic import ValidationError

from tests.unit.kstatus import kstatus
from tests.unit.pods import NOON, at, time_at
from tpu_training_operator.api.conditions import Condition, ConditionType, Reason, find
from tpu_training_operator.api.status import Restarts, State, Status
from tpu_training_operator.domain.cluster_state.observed import Observed
from tpu_training_operator.domain.plan.common.conditions import JobState, ReadyState


def ready_state(state: State = State.RUNNING, message: str = "why", *, is_stopping: bool = False) -> ReadyState:
    return ReadyState(state, Reason.ALL_WORKERS_READY, message, is_stopping)


IN_PROGRESS, CURRENT, FAILED = ready_state(State.STARTING), ready_state(), ready_state(State.BLOCKED)


def seen(generation: int, now: datetime) -> JobState:
    return JobState(Observed({"metadata": {"generation": generation}}, ()), Status(), now)


def job_of(status: Status, generation: int = 1) -> dict[str, Any]:
    return {
        "metadata": {"generation": generation},
        "status": status.as_json(),
    }


@pytest.mark.parametrize("before", [IN_PROGRESS, CURRENT, FAILED])
@pytest.mark.parametrize(
    ("kind", "conditions", "read_as"),
    [
        (IN_PROGRESS, {"Ready": "False", "Reconciling": "True"}, "InProgress"),
        (ready_state(State.SUSPENDED, is_stopping=True), {"Ready": "False", "Reconciling": "True"}, "InProgress"),
        (CURRENT, {"Ready": "True"}, "Current"),
        (ready_state(State.SUSPENDED), {"Ready": "True"}, "Current"),
        (FAILED, {"Ready": "False", "Stalled": "True"}, "Failed"),
    ],
)
def test_kstatus_reads_each_kind_whatever_the_job_showed_before(
    before: ReadyState, kind: ReadyState, conditions: dict[str, str], read_as: str
) -> None:
    status = seen(2, NOON).present(seen(1, NOON).present(Status(), before), kind)
    assert {condition.type: condition.status for condition in status.conditions} == conditions
    assert kstatus(job_of(status, generation=2)) == read_as


def test_a_job_is_in_progress_until_its_newest_generation_is_observed() -> None:
    status = seen(1, NOON).present(Status(), CURRENT)
    assert kstatus(job_of(status, generation=2)) == "InProgress"


def test_the_status_shows_state_reason_and_message() -> None:
    status = seen(3, NOON).present(Status(), ready_state(State.SUSPENDED, "asked for"))
    ready = find(status.conditions, ConditionType.READY)
    assert (status.state, status.observed_generation) == (State.SUSPENDED, 3)
    assert (ready.reason, ready.message, ready.observed_generation) == (Reason.ALL_WORKERS_READY, "asked for", 3)


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    status = seen(1, at(0)).present(Status(), CURRENT)
    status = seen(1, at(10)).present(status, ready_state(message="still"))
    assert [condition.last_transition_time for condition in status.conditions] == [time_at(0)]
    status = seen(1, at(20)).present(status, FAILED)
    assert [condition.last_transition_time for condition in status.conditions] == [time_at(20), time_at(20)]


def test_conditions_of_other_types_stay_as_they_are() -> None:
    marked = seen(1, NOON).with_condition(Status(), ConditionType.GANG_READY, True, Reason.ALL_WORKERS_READY, "all")
    shown = seen(2, at(10)).present(marked, CURRENT)
    assert find(shown.conditions, ConditionType.GANG_READY) == find(marked.conditions, ConditionType.GANG_READY)


def test_a_message_of_any_length_can_be_shown_and_read_back() -> None:
    """The API server may quote the whole pod that it refuses."""
    status = seen(1, NOON).present(Status(), ready_state(State.BLOCKED, message="x" * 100_000))
    assert Status.read(job_of(status)["status"]) == status


def test_fields_of_a_newer_operator_are_dropped() -> None:
    body = {
        "attempt": 2,
        "checkpoint": {"step": 3},
        "restarts": {"byClass": [{"class": "Unknown", "count": 1}], "wasted": 5},
    }
    status = Status.read(body)
    assert (status.attempt, status.restarts.total) == (2, 1)


def test_no_part_of_a_status_takes_a_value_of_the_wrong_type() -> None:
    with pytest.raises(ValidationError, match="valid integer"):
        replace(Status(), attempt="seven")


def test_a_status_is_written_without_what_is_empty() -> None:
    assert Status(attempt=1, restarts=Restarts(by_class={})).as_json() == {"attempt": 1}


def test_a_condition_knows_whether_it_is_true() -> None:
    condition = Condition(type="Ready", status="Unknown", last_transition_time=time_at(0), reason="x")
    assert not condition.is_true
