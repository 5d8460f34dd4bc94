"""Where a run begins that continues from a checkpoint, on the same slice or on another one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.gang_processes import run_spec
from tpu_contract.run_spec import parse_run_spec
from tpu_trainer.checkpoint.resume import Leg, Start, continued_start, document, fresh_start
from tpu_trainer.contract.findings import NumericalHealth
from tpu_trainer.data.order import Position
from tpu_trainer.optim.schedule import Ramp
from tpu_trainer.task.task import Hyperparameters

BASE = Hyperparameters.of(parse_run_spec(run_spec(trainSteps=1000, warmupSteps=0)))


def recipe(batch: int, steps: int, rate: float = 0.1, warmup: int = 0) -> Hyperparameters:
    return replace(BASE, global_batch_size=batch, train_steps=steps, learning_rate=rate, warmup_steps=warmup)


def through_a_checkpoint(start: Start, step: int, rate: float, hp: Hyperparameters) -> dict[str, object]:
    """As JSON gives it back."""
    kept: dict[str, object] = json.loads(
        json.dumps(document(start, step, Position(3, 64), rate, hp, NumericalHealth()))
    )
    return kept


@given(step=st.integers(0, 1000))
def test_with_the_same_global_batch_a_run_continues_with_the_next_step(step: int) -> None:
    hp = recipe(16, 1000)
    start = continued_start(through_a_checkpoint(fresh_start(hp, 8, 1), step, 0.1, hp), hp, 8, attempt=2)
    assert (start.step, start.examples, start.position, start.ramp) == (step, step * 16, Position(3, 64), None)
    assert start.legs == (Leg(0, 16, 8, 1), Leg(step, 16, 8, 2))


@given(step=st.integers(0, 1000), factor=st.integers(1, 64))
def test_on_another_slice_the_rest_of_the_example_budget_is_trained_and_never_less(step: int, factor: int) -> None:
    old, budget = recipe(16, 1000), 16 * 1000
    steps = -(-budget // (16 * factor))
    new = recipe(16 * factor, steps)
    start = continued_start(through_a_checkpoint(fresh_start(old, 8, 1), step, 0.1, old), new, 8 * factor, attempt=2)
    trained = step * 16 + (new.train_steps - start.step) * new.global_batch_size
    assert budget <= trained < budget + 2 * new.global_batch_size


@given(first=st.integers(0, 1000), second=st.integers(0, 60))
def test_a_second_checkpoint_on_the_other_slice_continues_with_its_next_step(first: int, second: int) -> None:
    old, new = recipe(16, 1000), recipe(48, 334)
    start = continued_start(through_a_checkpoint(fresh_start(old, 8, 1), first, 0.1, old), new, 24, attempt=2)
    step = min(start.step + second, new.train_steps)
    again = continued_start(through_a_checkpoint(start, step, 0.1, new), new, 24, attempt=3)
    assert again.step == step
    assert again.ramp == start.ramp


def test_a_ramp_leads_to_the_rate_that_a_plateau_has_left() -> None:
    old, new = recipe(16, 1000, rate=0.1), recipe(64, 250, rate=0.4, warmup=20)
    start = continued_start(
        through_a_checkpoint(fresh_start(old, 8, 1), 200, 0.05, old), new, 32, attempt=2, reduction=0.5
    )
    assert start.ramp.begin == 0.25


def test_a_higher_rate_is_reached_by_a_short_ramp() -> None:
    old, new = recipe(16, 1000, rate=0.1), recipe(64, 250, rate=0.4, warmup=20)
    start = continued_start(through_a_checkpoint(fresh_start(old, 8, 1), 200, 0.1, old), new, 32, attempt=2)
    assert (start.step, start.ramp) == (50, Ramp(first=50, steps=10, begin=0.25))
    rates = [0.4 * start.ramp.factor(step) for step in range(50, 62)]
    assert rates == sorted(rates)
    assert 0.1 < rates[0] < 0.15
    assert rates[-1] == pytest.approx(0.4)


def test_a_lower_rate_applies_at_once() -> None:
    old, new = recipe(64, 250, rate=0.4), recipe(16, 1000, rate=0.1)
    assert continued_start(through_a_checkpoint(fresh_start(old, 32, 1), 50, 0.4, old), new, 8, attempt=2).ramp is None
