import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
from pydantic import ValidationError

from tpu_training_operator.api.conditions import Condition
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.status import Activity, ChipSeconds, Goodput, Progress, State, Status

BEFORE = Status(attempt=1, goodput=Goodput(since="2026-01-01T00:00:00Z"), avoided_nodes=["node-1"])
READY = Condition(type="Ready", status="True", last_transition_time="2026-01-01T00:00:00Z", reason="Ready")


@dataclass(frozen=True)
class Circle:
    radius: int

    @cached_property
    def width(self) -> int:
        return 2 * self.radius


@pytest.mark.parametrize(
    "changes",
    [
        {"attempt": 2, "state": State.RUNNING, "start_time": "2026-01-01T00:00:00Z"},
        {"conditions": [READY], "goodput": None, "progress": Progress(step=3, total_steps=4, updated="now")},
        {"goodput": Goodput(since="later", activity=Activity.TRAIN, chip_seconds=ChipSeconds(since="later"))},
        {"start_time": "\x1b[31mnow\x1b[0m"},
        {"avoided_nodes": ["node\r\n-2"]},
    ],
    ids=lambda changes: "+".join(changes),
)
def test_it_changes_a_status_as_the_constructor_would(changes: dict[str, Any]) -> None:
    after = replace(BEFORE, **changes)
    assert after == dataclasses.replace(BEFORE, **changes)
    assert after.as_json() == dataclasses.replace(BEFORE, **changes).as_json()


@pytest.mark.parametrize("changes", [{"conditions": [READY] * 17}, {"avoided_nodes": ["n" * 1025]}], ids=str)
def test_what_its_type_does_not_make_valid_is_validated(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        replace(BEFORE, **changes)


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="diameter"):
        replace(Circle(1), diameter=2)


def test_what_was_computed_from_the_old_fields_is_computed_again() -> None:
    circle = Circle(1)
    assert (circle.width, replace(circle, radius=2).width) == (2, 4)
