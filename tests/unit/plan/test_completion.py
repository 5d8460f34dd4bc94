"""What a finished job shows about its training, whatever the last words of worker 0 are."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.pods import ended, pod, seen
from tpu_training_operator.api.status import Progress
from tpu_training_operator.domain.plan.common.completion import read_final_progress


def progress(message: Any) -> Progress | None:
    text = message if isinstance(message, str) else json.dumps(message)
    return read_final_progress(seen(ended(pod(), message=text))[0], 300, None)


@pytest.mark.parametrize(("step", "loss"), [(300, "0.5"), (299, None)])
def test_the_last_loss_stays_if_no_further_step_was_made(step: int, loss: str | None) -> None:
    leader = seen(ended(pod(), message=json.dumps({"step": 300, "metrics": {"accuracy": 0.98}})))[0]
    found = read_final_progress(leader, 300, Progress(step=step, total_steps=300, loss="0.5"))
    assert found.loss == loss


@pytest.mark.parametrize(
    "message", ["", "done", "[]", "{}", {"step": None}, {"step": "3"}, {"step": True}, {"step": -1}]
)
def test_a_loop_that_reports_no_step_has_no_progress(message: Any) -> None:
    assert progress(message) is None


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        ({"loss": float("nan")}, {"loss": "nan"}),
        ({"loss": float("inf")}, {"loss": "inf"}),
        ({"count": 3}, {"count": "3"}),
        ({"loss": None, "note": "x", "flag": True, "list": [1]}, {}),
        ({"huge": 10**400}, {}),
        ([1, 2], {}),
        ("good", {}),
        (None, {}),
    ],
)
def test_metrics_are_numbers_and_the_rest_is_left_out(metrics: Any, shown: dict[str, str]) -> None:
    found = progress({"step": 1, "metrics": metrics})
    assert found.metrics == shown


def test_as_many_metrics_are_kept_as_a_status_can_hold() -> None:
    found = progress({"step": 1, "metrics": {f"class-{number}": number for number in range(100)}})
    assert list(found.metrics) == [f"class-{number}" for number in range(64)]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(message=st.fixed_dictionaries({}, optional={"step": _JSON, "metrics": _JSON, "examplesPerSecond": _JSON}))
def test_no_message_keeps_a_job_from_being_finished(message: dict[str, Any]) -> None:
    found = progress(message)
    assert found is None or found.step >= 0


def test_a_deeply_nested_message_does_not_keep_a_job_from_being_finished() -> None:
    for depth in (100, 300, 500, 700, 900, 4000):
        assert progress('{"step": 3, "deep": ' + "[" * depth + "]" * depth + "}") in (
            None,
            Progress(step=3, total_steps=300),
        )
