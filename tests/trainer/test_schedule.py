"""The learning rate of every step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.gang import run_spec
from tpu_trainer.schedule import LearningRate, rate_factor
from tpu_trainer.spec import SCHEDULES, ScheduleSpec, parse_run_spec
from tpu_trainer.task import Hyperparameters

CONSTANT = ScheduleSpec("Constant", (), None)

CASES = [
    ("no warm-up", 0, CONSTANT, [1.0, 1.0, 1.0, 1.0]),
    ("warm-up rises linearly and does not begin at 0", 4, CONSTANT, [0.25, 0.5, 0.75, 1.0]),
    ("linear falls towards 0", 0, ScheduleSpec("Linear", (), None), [1.0, 0.75, 0.5, 0.25]),
    ("linear falls towards its factor", 0, ScheduleSpec("Linear", (), 0.2), [1.0, 0.8, 0.6, 0.4]),
    ("linear begins where warm-up ends", 2, ScheduleSpec("Linear", (), None), [0.5, 1.0, 1.0, 0.5]),
    ("cosine falls towards 0", 0, ScheduleSpec("Cosine", (), None), [1.0, 0.853553, 0.5, 0.146447]),
    ("cosine falls towards its factor", 0, ScheduleSpec("Cosine", (), 0.5), [1.0, 0.926777, 0.75, 0.573223]),
    ("step divides by ten at every milestone", 0, ScheduleSpec("Step", (1, 3), None), [1.0, 0.1, 0.1, 0.01]),
    ("step multiplies by its factor", 0, ScheduleSpec("Step", (2,), 0.5), [1.0, 1.0, 0.5, 0.5]),
]


@pytest.mark.parametrize(("warmup", "schedule", "expected"), [pytest.param(*case[1:], id=case[0]) for case in CASES])
def test_four_steps(warmup: int, schedule: ScheduleSpec, expected: list[float]) -> None:
    assert [rate_factor(step, 4, warmup, schedule) for step in range(4)] == pytest.approx(expected, abs=1e-6)


@given(data=st.data(), steps=st.integers(1, 500), name=st.sampled_from(SCHEDULES))
def test_the_rate_is_never_0_and_never_above_the_recipes(data: st.DataObject, steps: int, name: str) -> None:
    warmup, step = data.draw(st.integers(0, steps)), data.draw(st.integers(0, steps - 1))
    factor = rate_factor(step, steps, warmup, ScheduleSpec(name, (3,), None))
    assert 0 < factor <= 1


def test_every_parameter_group_keeps_its_own_rate() -> None:
    fast, slow = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [fast], "lr": 0.4}, {"params": [slow], "lr": 0.04}])
    hp = Hyperparameters.of(parse_run_spec(run_spec(warmupSteps=4)))

    LearningRate(optimizer, hp).set(1)

    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.02])
