"""Whether the loss of a run has fallen, and whether it has risen above its start: the shapes of losses as a table, and
the errors of the tests over many trainings that learn nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer import in_process
from tests.trainer.gang_processes import run_spec
from tpu_contract.protocol import LOSS_FALLS
from tpu_trainer.reporting.learning import FEWEST_STEPS, Followed, find_unlearned
from tpu_trainer.reporting.loss_trend import MOST_POINTS, LossTrend


def trend(losses: Sequence[float], warm_up: int = 0) -> LossTrend:
    found = LossTrend(warm_up)
    # A run reports ten steps at a time.
    for first in range(0, len(losses), 10):
        found.add(losses[first : first + 10])
    return found


def falls(losses: Sequence[float]) -> bool:
    errors = trend(losses).errors_fallen
    return errors is not None and errors > LOSS_FALLS


def noise(steps: int, seed: int, size: float = 1.0) -> list[float]:
    draw = random.Random(seed)
    return [size * draw.gauss(0, 1) for _ in range(steps)]


def plus(shape: Callable[[int], float], steps: int, size: float, seed: int = 1) -> list[float]:
    return [shape(step) + error for step, error in enumerate(noise(steps, seed, size))]


# From the first steps of a real training with a rate that is 16 times too high, with a warm-up of 6 steps.
DIVERGED = [2.31, 2.29, 2.2, 2.02, 1.65, 1.15, 0.96, 3.64, 7.1, 5.51, 7.49, 5.41, 3.5, 2.4, 2.2, 2.1]
RECOVERED = [*DIVERGED, *plus(lambda step: 1.9 - step / 40, 60, 0.03)]


@pytest.mark.parametrize(
    ("losses", "is_fall", "is_rise"),
    [
        pytest.param([], False, False, id="none"),
        pytest.param([2.0], False, False, id="one"),
        pytest.param([math.nan] * 40, False, False, id="never finite"),
        pytest.param([2.0] * 40, False, False, id="constant"),
        pytest.param([0.0] * 40, False, False, id="0"),
        pytest.param([2.0 - step / 10 for step in range(10)], True, False, id="10 steps without noise"),
        pytest.param([-1.0 - step / 10 for step in range(10)], True, False, id="10 steps below 0"),
        pytest.param([2.0 + step / 10 for step in range(40)], False, True, id="rises"),
        pytest.param(plus(lambda step: 2.0, 200, 0.1), False, False, id="noise"),
        pytest.param(plus(lambda step: 2.0 - step / 200, 200, 0.5), True, False, id="falls in noise"),
        pytest.param(plus(lambda step: 2.0 - step / 1e4, 40, 0.5), False, False, id="falls too little to tell"),
        pytest.param([3.0, 2.5, 2.0, 1.5, *plus(lambda step: 1.0, 4000, 0.05)], True, False, id="falls at once"),
        pytest.param(plus(lambda step: 1e30 if step == 50 else 2.0, 200, 0.1), False, False, id="a giant spike"),
        pytest.param(
            plus(lambda step: 1e30 if step == 50 else 2.0 - step / 100, 200, 0.1), True, False, id="falls with a spike"
        ),
        pytest.param([*[2.0 - step / 40 for step in range(40)], math.nan], True, False, id="ends with NaN"),
        pytest.param(RECOVERED, True, True, id="diverges and comes back"),
    ],
)
def test_losses(losses: list[float], is_fall: bool, is_rise: bool) -> None:
    assert falls(losses) is is_fall
    assert (trend(losses).rise is not None) is is_rise


def test_a_rise_within_the_warm_up_is_not_one() -> None:
    losses = [*[2.0] * 10, *[5.0] * 10, *[1.9 - step / 100 for step in range(40)]]
    assert trend(losses, warm_up=20).rise is None
    assert trend(losses, warm_up=10).rise is not None


def test_a_rise_has_its_numbers() -> None:
    rise = trend(RECOVERED, warm_up=6).rise
    assert rise is not None
    assert (rise.start, rise.peak, rise.step) == (2.2, 5.51, 9)


@pytest.mark.parametrize("steps", [10, 30, 100])
@pytest.mark.parametrize("draw", [random.Random.random, lambda own: own.gauss(0, 1), lambda own: own.paretovariate(1)])
def test_at_most_one_in_a_hundred_trainings_that_learn_nothing_passes(
    steps: int, draw: Callable[[random.Random], float]
) -> None:
    own = random.Random(steps)
    passed = sum(falls([draw(own) for _ in range(steps)]) for _ in range(2000))
    # 0.01 and three standard errors of this count.
    assert passed <= 33


@pytest.mark.parametrize("steps", [15, 40, 200, 1000])
@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(lambda own, share: own.gauss(0, 1), id="normal"),
        pytest.param(lambda own, share: own.expovariate(1), id="skewed"),
        pytest.param(lambda own, share: own.lognormvariate(0, 1), id="very skewed"),
        pytest.param(lambda own, share: own.gauss(0, 1 + 9 * share), id="grows"),
        pytest.param(lambda own, share: own.gauss(0, 1 + 9 * math.sin(math.pi * share)), id="grows and shrinks"),
    ],
)
def test_at_most_one_in_a_hundred_flat_losses_rises(steps: int, draw: Callable[[random.Random, float], float]) -> None:
    own, runs = random.Random(steps), 1000 if steps < 500 else 200
    risen = sum(trend([draw(own, step / steps) for step in range(steps)]).rise is not None for _ in range(runs))
    # 0.01 and three standard errors of this count.
    assert risen <= runs / 100 + 3 * math.sqrt(runs / 100)


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=80), st.floats(0.1, 10), st.floats(-10, 10))
def test_neither_unit_nor_origin_of_the_loss_matters(losses: list[float], unit: float, origin: float) -> None:
    # Halves of integers, so that no two losses become equal by rounding.
    whole = [round(loss) / 2 for loss in losses]
    moved = [2**8 * loss + 64 for loss in whole]
    assert trend(whole).errors_fallen == trend(moved).errors_fallen


@given(st.integers(1, 5 * MOST_POINTS))
def test_the_means_are_those_of_all_losses_however_many(steps: int) -> None:
    losses = [float(step % 7) for step in range(steps)]
    found = trend(losses)
    assert (found.count, found.broken) == (steps, 0)
    assert found.first is not None
    assert found.first.count <= max(1, steps / 4 + 8)
    assert found.first.value == pytest.approx(math.fsum(losses[: found.first.count]) / found.first.count)


@pytest.mark.parametrize(("rate", "words"), [("1e-12", ["the training did not learn: loss"]), ("0.3", [])])
def test_a_run_that_was_interrupted_is_judged_from_its_first_step_on(
    tmp_path: Path, rate: str, words: list[str]
) -> None:
    place = {"checkpoint": {"uri": str(tmp_path / "checkpoints"), "keep": 1}}
    spec = run_spec(replicas=1, trainSteps=160, **place)
    spec["optimizer"]["learningRate"] = rate
    in_process.run(spec | {"trainSteps": 120}, tmp_path, tmp_path / "report")
    found = [text for text in in_process.run(spec, tmp_path, tmp_path / "report").warnings if "learn" in text]
    assert len(found) == len(words)
    assert all(line.startswith(text) for text, line in zip(words, found, strict=True))


FLAT, FALLING = plus(lambda step: 2.0, 200, 0.1), plus(lambda step: 2.0 - step / 200, 200, 0.1)


@pytest.mark.parametrize(
    ("losses", "followed", "words"),
    [
        (FLAT, None, ["the training did not learn: loss 2"]),
        (FALLING, None, []),
        (RECOVERED, None, ["the loss rose from 2.2 to 5.51 at step 9, above its first value, after the warm-up"]),
        (FLAT[: FEWEST_STEPS - 1], None, []),
        ([0.0] * 200, None, []),
        ([], None, []),
        # Two networks that compete: neither loss needs to fall.
        (FLAT, Followed("score", 0.1, 0.9, is_better=True), []),
        (FALLING, Followed("accuracy", 0.1, 0.1, is_better=False), ["did not learn: accuracy 0.1 at the end, 0.1 at"]),
    ],
)
def test_what_is_said_of_a_run(losses: list[float], followed: Followed | None, words: list[str]) -> None:
    found = list(find_unlearned(trend(losses, warm_up=6), followed))
    assert len(found) == len(words)
    assert all(text in line for text, line in zip(words, found, strict=True))
