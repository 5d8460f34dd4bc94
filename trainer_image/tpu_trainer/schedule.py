"""The learning rate of every step: a linear warm-up, then the recipe's schedule. Called by `loop`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpu_trainer.spec import ScheduleSpec

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from tpu_trainer.task import Hyperparameters

_STEP_FACTOR = 0.1
_END_FACTOR = 0.0


@dataclass(frozen=True)
class Ramp:
    """After a change of the slice: from `begin` times the schedule's rate linearly to the whole of it, over `steps`
    steps from step `first` (counted from 0) on."""

    first: int
    steps: int
    begin: float

    def factor(self, step: int) -> float:
        done = min((step - self.first + 1) / (self.steps + 1), 1.0)
        return self.begin + (1 - self.begin) * done


class LearningRate:
    """Sets every parameter group's rate, from the one it was built with."""

    def __init__(self, optimizer: Optimizer, hp: Hyperparameters, ramp: Ramp | None = None) -> None:
        self._groups = optimizer.param_groups
        self._rates = [group["lr"] for group in self._groups]
        self._hp = hp
        self._ramp = ramp

    @property
    def present(self) -> float:
        """The first group's rate."""
        return float(self._groups[0]["lr"])

    def set(self, step: int) -> None:
        """Sets the rates for step `step`, counted from 0."""
        factor = rate_factor(step, self._hp.train_steps, self._hp.warmup_steps, self._hp.schedule)
        if self._ramp is not None:
            factor *= self._ramp.factor(step)
        for group, rate in zip(self._groups, self._rates, strict=True):
            group["lr"] = rate * factor


def rate_factor(step: int, steps: int, warmup: int, schedule: ScheduleSpec) -> float:
    """The rate of step `step` (counted from 0) over the recipe's.

    While step < warmup it is (step + 1) / warmup (gradual warm-up, Goyal et al. 2017). It never is 0: a rate of
    exactly 0 would cost XLA a compilation of its own, so Linear and Cosine end one step above `factor`.
    """
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    end = _END_FACTOR if schedule.factor is None else schedule.factor
    match schedule.name:
        case "Linear":
            return 1 - (1 - end) * done
        case "Cosine":
            return end + (1 - end) * (1 + math.cos(math.pi * done)) / 2
        case "Step":
            factor = _STEP_FACTOR if schedule.factor is None else schedule.factor
            return math.prod([factor for milestone in schedule.milestones if step >= milestone])
        case _:
            return 1.0
