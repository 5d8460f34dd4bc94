"""Schedulers that were built for another number of steps than the run has: known before the first step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from tests.trainer import in_process, whole_runs
from tests.trainer.lightning.test_lightning_trainer import spec
from tpu_contract.protocol import ExitCode
from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.task.horizon import SteppedScheduler, find_differences
from tpu_trainer.task.task import Hyperparameters, Task

# Schedulers are only built here, not stepped.
pytestmark = pytest.mark.filterwarnings("ignore")


def linear(step: int, *, num_training_steps: int) -> float:
    return max(0.0, 1 - step / num_training_steps)


def warm(o: SGD, warmup: int, rest: int, milestone: int) -> SequentialLR:
    return SequentialLR(o, [LinearLR(o, 0.1, total_iters=warmup), CosineAnnealingLR(o, rest)], [milestone])


SAID: list[tuple[Any, list[str]]] = [
    (lambda o: CosineAnnealingLR(o, 60), []),
    (lambda o: CosineAnnealingLR(o, 59), []),
    (lambda o: CosineAnnealingLR(o, 600), ["CosineAnnealingLR is built for 600 steps"]),
    (lambda o: CosineAnnealingLR(o, 30), ["CosineAnnealingLR is built for 30 steps"]),
    (lambda o: OneCycleLR(o, 1.0, total_steps=60), []),
    (lambda o: OneCycleLR(o, 1.0, total_steps=200), ["OneCycleLR is built for 200 steps"]),
    (lambda o: PolynomialLR(o, 30), ["PolynomialLR is built for 30 steps"]),
    (lambda o: LinearLR(o, 1.0, 0.0, total_iters=30), ["LinearLR is built for 30 steps"]),
    (lambda o: LinearLR(o, 0.1, total_iters=5), []),
    (lambda o: LinearLR(o, 0.1, total_iters=500), ["LinearLR is built for 500 steps"]),
    (lambda o: ConstantLR(o, total_iters=5), []),
    (lambda o: MultiStepLR(o, [20, 40]), []),
    (lambda o: MultiStepLR(o, [40, 80, 90]), ["MultiStepLR never reaches its milestones 80, 90"]),
    (lambda o: StepLR(o, 30), []),
    (lambda o: CosineAnnealingWarmRestarts(o, 10), []),
    (lambda o: LambdaLR(o, lambda step: 1.0), []),
    (lambda o: LambdaLR(o, partial(linear, num_training_steps=60)), []),
    (lambda o: LambdaLR(o, partial(linear, num_training_steps=20)), ["LambdaLR is built for 20 steps"]),
    (lambda o: warm(o, 5, 55, 5), []),
    (lambda o: warm(o, 5, 500, 5), ["CosineAnnealingLR is built for 500 steps (T_max), and this run steps it 55"]),
    (lambda o: warm(o, 50, 30, 10), ["LinearLR is built for 50", "CosineAnnealingLR is built for 30"]),
    (lambda o: warm(o, 100, 900, 100), ["SequentialLR never reaches its milestones 100", "LinearLR is built for 100"]),
    (lambda o: ChainedScheduler([LinearLR(o, total_iters=5), CosineAnnealingLR(o, 60)], o), []),
    (lambda o: ChainedScheduler([CosineAnnealingLR(o, 90)], o), ["CosineAnnealingLR is built for 90"]),
]


def optimizer() -> SGD:
    return SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)


@pytest.mark.parametrize("made", range(len(SAID)))
def test_a_scheduler_is_compared_with_a_run_of_60_steps(made: int) -> None:
    build, expected = SAID[made]
    found = list(find_differences([SteppedScheduler(build(optimizer()), "step")], 60, None))
    assert [text.startswith(start) for text, start in zip(found, expected, strict=True)] == [True] * len(expected)


def test_epochs_and_every_other_step_are_counted_as_such() -> None:
    def said(frequency: int, interval: str, epochs: int | None) -> list[str]:
        return list(
            find_differences([SteppedScheduler(CosineAnnealingLR(optimizer(), 10), interval, frequency)], 20, epochs)
        )

    assert not said(1, "epoch", 10)
    assert not said(2, "step", 3)
    assert not said(1, "epoch", None)
    assert said(1, "step", None)[0].startswith("CosineAnnealingLR is built")
    assert "10 steps" in said(1, "step", None)[0]
    assert said(1, "epoch", 30)[0].startswith("CosineAnnealingLR is built")
    assert "10 epochs" in said(1, "epoch", 30)[0]


@pytest.mark.parametrize("inside", [False, True])
def test_what_would_end_the_run_in_its_middle_is_refused(inside: bool, snapshot: SnapshotAssertion) -> None:
    o = optimizer()
    cycle: Any = OneCycleLR(o, 1.0, total_steps=21)
    cycle = SequentialLR(o, [ConstantLR(o), cycle], [5]) if inside else cycle
    with pytest.raises(UserCodeError) as caught:
        list(find_differences([SteppedScheduler(cycle, "step")], 60, None))
    assert "21 steps" in str(caught.value)
    assert str(caught.value) == snapshot


def task(make: Any, interval: str) -> Task:
    data = torch.utils.data.TensorDataset(torch.randn(64, 2))
    return Task(nn.Linear(2, 1), data, lambda model, batch: model(batch[0]).mean(), scheduler=(make, interval))


def test_a_tasks_own_scheduler_is_compared_before_the_first_step() -> None:
    def made(make: Any, interval: str) -> Any:
        def build(hp: Hyperparameters, rank: int) -> Task:
            return task(make, interval)

        return whole_runs.run(build, trainSteps=8)

    refused = made(lambda o, hp: OneCycleLR(o, 1.0, total_steps=3), "step").outcome
    assert refused.code is ExitCode.UserError
    assert not refused.step
    said = made(lambda o, hp: CosineAnnealingLR(o, 100), "epoch").warnings
    expected = "CosineAnnealingLR is built for 100 epochs (T_max), and this run steps it 2 times"
    assert any(expected in text for text in said)


@pytest.mark.parametrize(("cycles", "anneals"), [("Cycles", "Anneals"), ("cycles", "anneals")])
def test_so_is_a_modules_under_either_loop(cycles: str, anneals: str, tmp_path: Path) -> None:
    refused = in_process.run(spec(cycles), tmp_path).outcome
    assert "is built for 3 steps" in refused.message
    assert not refused.step
    done = in_process.run(spec(anneals), tmp_path)
    assert done.outcome.code is ExitCode.Succeeded
    assert any("is built for 100 epochs" in text for text in done.warnings)
