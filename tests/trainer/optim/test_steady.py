"""An optimizer's numbers are data of one program, whatever values they pass through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from tests.trainer import tasks
from tests.trainer.gang_processes import Launcher, start_replicas
from tpu_contract.protocol import ExitCode
from tpu_trainer import Hyperparameters, Task
from tpu_trainer.optim.scalars_as_data import ScalarsAsData


class Given:
    """The numbers that operations get in place of those that a step asks for."""

    def __init__(self) -> None:
        self._numbers = ScalarsAsData()

    def step(self, *asked: float) -> list[float]:
        zero = torch.zeros(())
        with self._numbers:
            return [float(zero.add(torch.ones(()), alpha=value)) for value in asked]


FAR = 0.25
ONE_LESS, TINY = 1 - 2**-24, 2**-149

STEPS: dict[str, Sequence[tuple[Sequence[float], Sequence[float]]]] = {
    "nothing is in the way": [([0.5, FAR], [0.5, FAR]), ([0.75, 0.5], [0.75, 0.5])],
    "equal numbers stay one": [([FAR, FAR], [FAR, FAR]), ([0.5, 0.5], [0.5, 0.5])],
    "two that meet": [([0.5, FAR], [0.5, FAR]), ([FAR, FAR], [FAR, FAR * (1 - 2**-24)])],
    "two that meet go on": [
        ([0.5, FAR], [0.5, FAR]),
        ([FAR, FAR], [FAR, FAR * (1 - 2**-24)]),
        ([0.5, FAR], [0.5, FAR]),
    ],
    "one that comes to 1": [([0.5], [0.5]), ([1.0], [ONE_LESS])],
    "one that comes to 0": [([0.5], [0.5]), ([0.0], [TINY])],
    "what rounds to 1": [([0.5], [0.5]), ([1 - 1e-9], [ONE_LESS])],
    "1 from the start": [([1.0], [1.0]), ([1.0], [1.0])],
    "1 once more": [([1.0], [1.0]), ([0.5], [0.5]), ([1.0], [ONE_LESS])],
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_numbers_give_way_where_they_would_change_the_program(
    steps: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> None:
    given = Given()
    for asked, expected in steps:
        assert given.step(*asked) == list(expected)


def test_equal_numbers_of_different_operations_are_two_from_the_start() -> None:
    x = torch.ones(())
    with ScalarsAsData():
        assert float(x * 0.7) != float(x.add(torch.ones(()), alpha=0.7) - 1)


@pytest.mark.parametrize("value", [2, True, None, "0.5"])
def test_what_is_no_fraction_is_left_alone(value: Any) -> None:
    numbers = ScalarsAsData()
    with numbers:
        assert numbers._replace("mul", 1, value) is value


def test_other_types_and_comparisons_are_left_alone() -> None:
    exact = torch.ones((), dtype=torch.float64)
    with ScalarsAsData():
        assert float(exact * 0.7) == 0.7
        assert bool((torch.ones(()) * 1 == 1.0).all())


def onecycle(parameters: Any) -> tuple[Optimizer, Any]:
    optimizer = AdamW(parameters, lr=0.01)
    return optimizer, OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS_OF_A_RUN)


def long_adam(parameters: Any) -> tuple[Optimizer, Any]:
    """Its bias correction comes to 1 within the run."""
    optimizer = Adam(parameters, lr=0.001)
    for parameter in parameters:
        average, square = torch.zeros_like(parameter), torch.zeros_like(parameter)
        optimizer.state[parameter] = {"step": torch.tensor(16_550.0), "exp_avg": average, "exp_avg_sq": square}
    return optimizer, LambdaLR(optimizer, lambda step: 1.0)


def groups_that_meet(parameters: Any) -> tuple[Optimizer, Any]:
    one, *others = parameters
    optimizer = SGD([{"params": [one], "lr": 0.1}, {"params": others}], lr=0.05, momentum=0.9)
    return optimizer, LambdaLR(optimizer, [lambda step: max(0.5, 1 - step / 100), lambda step: 1.0])


def to_zero(parameters: Any) -> tuple[Optimizer, Any]:
    optimizer = AdamW(parameters, lr=0.1, weight_decay=0.1)
    return optimizer, CosineAnnealingLR(optimizer, T_max=150)


STEPS_OF_A_RUN = 200
CASES: dict[str, Callable[[Any], tuple[Optimizer, Any]]] = {
    build.__name__: build for build in (onecycle, long_adam, groups_that_meet, to_zero)
}


def task(hp: Hyperparameters, case: str) -> Task:
    schedulers: dict[Optimizer, Any] = {}

    def build(parameters: Any, hp: Hyperparameters) -> Optimizer:
        optimizer, schedulers[optimizer] = CASES[case](list(parameters))
        return optimizer

    def schedule(optimizer: Optimizer, hp: Hyperparameters) -> Any:
        return schedulers[optimizer]

    return replace(tasks.small(hp), optimizer=build, scheduler=schedule)


def scheduled(hp: Hyperparameters) -> Task:
    """The recipe's optimizer, whose rates and momenta a scheduler of the task moves."""

    def schedule(optimizer: Optimizer, hp: Hyperparameters) -> Any:
        return OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS_OF_A_RUN, base_momentum=0.9, max_momentum=0.999)

    return replace(tasks.small(hp), scheduler=schedule)


def test_no_step_of_a_recipes_optimizer_is_another_program(launcher: Launcher) -> None:
    spec = {"trainSteps": STEPS_OF_A_RUN, "onNotFinite": "Skip", "optimizer": "adamw"}
    gang = start_replicas(launcher, "xla", 1, entrypoint="tests.trainer.optim.test_steady:scheduled", **spec)
    assert gang.wait() == [ExitCode.Succeeded], gang.output()
    assert [line for lines in gang.warnings().values() for line in lines if "compil" in line] == []


@pytest.mark.parametrize("case", CASES)
def test_no_step_of_a_run_is_another_program(launcher: Launcher, case: str) -> None:
    spec = {
        "entrypoint": "tests.trainer.optim.test_steady:task",
        "parameters": {"case": case},
        "trainSteps": STEPS_OF_A_RUN,
    }
    gang = start_replicas(launcher, "xla", 1, **spec)
    assert gang.wait() == [ExitCode.Succeeded], gang.output()
    recompilations = [line for lines in gang.warnings().values() for line in lines if "compil" in line]
    assert recompilations == []
