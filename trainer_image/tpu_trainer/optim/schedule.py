"""Decides the learning rate of every step: warm-up, then the recipe's schedule, unless the task sets it itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tpu_contract.protocol import DEFAULT_FACTOR
from tpu_contract.run_spec import ScheduleSpec
from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.contract.findings import Finding

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from tpu_trainer.task.task import Hyperparameters

SMALLEST_REDUCTION = 1e-8
"""The smallest factor of the rate by schedule Plateau: a smaller one would change nothing, and for XLA a rate of 0 is
another program."""
RAMP_SHARE = 0.05
"""The longest ramp, as a share of the remaining steps."""
_END_FACTOR = 0.0

Step = Any
"""A number of steps or a factor: a number, or a tensor of shape []."""

Rate = Any
"""A group's rate in its optimizer: a float, a tensor of shape [], or None."""


@dataclass(frozen=True)
class Ramp:
    """The rise after a change of the slice: in `steps` steps from step `first` (counted from 0), the rate rises
    linearly from `begin` times the schedule's rate to all of it."""

    first: int
    steps: int
    begin: float

    def factor(self, step: int) -> float:
        done = min((step - self.first + 1) / (self.steps + 1), 1.0)
        return self.begin + (1 - self.begin) * done


@dataclass(frozen=True)
class RecipeRate:
    """The recipe's rate in each step, counted from 0, as a factor of the rate that a group was built with.

    reduction: the factor by which schedule Plateau has multiplied the rate so far. ramp: None without one.
    """

    hp: Hyperparameters
    reduction: float = 1.0
    ramp: Ramp | None = None

    def scheduled(self, step: Step) -> Step:
        """Returns the factor by warm-up and schedule alone."""
        return rate_factor(step, self.hp.train_steps, self.hp.warmup_steps, self.hp.schedule)

    def factor(self, step: int) -> float:
        factor: float = self.reduction * self.scheduled(step)
        return factor if self.ramp is None else factor * self.ramp.factor(step)

    def reason(self, step: int) -> str:
        """Returns what determines the rate of `step`: AdaScale, the ramp, the warm-up, or the schedule."""
        warmup, schedule = self.hp.warmup_steps, self.hp.schedule
        if self.hp.ada_scale_batch_size is not None:
            return (
                f"times each step's gain (AdaScale) and the recipe's schedule {schedule.name} at the sum of the gains"
            )
        if self.ramp is not None and step < self.ramp.first + self.ramp.steps:
            return f"on a ramp of {self.ramp.steps} steps to this slice's rate"
        if step < warmup:
            return f"in the warm-up of {warmup} steps"
        text = f"by the recipe's schedule {schedule.name}"
        if schedule.name == "Plateau" and self.reduction != 1:
            return f"{text}, which has lowered it to {self.reduction:.6g} times the recipe's"
        passed = [milestone for milestone in schedule.milestones if step >= milestone]
        return f"{text}, after milestone {max(passed)}" if passed else text

    def lowered(self) -> RecipeRate:
        """Returns the rate after a plateau."""
        factor = DEFAULT_FACTOR if self.hp.schedule.factor is None else self.hp.schedule.factor
        return replace(self, reduction=max(self.reduction * factor, SMALLEST_REDUCTION))

    def ramp_from(self, old_rate: float, step: int) -> Ramp | None:
        """Returns a ramp from the last rate on another slice up to that of `step`; None if that is not higher."""
        hp = self.hp
        new_rate: float = self.reduction * hp.learning_rate * self.scheduled(step)
        steps = min(math.ceil(RAMP_SHARE * (hp.train_steps - step)), max(hp.warmup_steps, 1))
        if steps < 1 or not 0 < old_rate < new_rate:
            return None
        return Ramp(first=step, steps=steps, begin=old_rate / new_rate)


class RateOwner(StrEnum):
    """Who sets the rates: the recipe; the task from the start, by a scheduler; or the task since some step."""

    RECIPE = "recipe"
    TASK = "task"
    HOOKS = "hooks"


class LearningRateSetter:
    """Decides every parameter group's rate, and why: the recipe's `RecipeRate`, based on the rate that the optimizer
    was built with, until the task sets a rate itself.

    A rate that differs from the one last set here was set by the task's own code, in a hook or in its optimizer. It
    stands, and from then on all rates are the task's, which is reported to `tell` once. `own`: they are the task's from
    the start. `ramp` and `reduction`: see `RecipeRate`. `say` receives a line whenever the reason changes.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        hp: Hyperparameters,
        ramp: Ramp | None = None,
        reduction: float = 1.0,
        *,
        own: bool = False,
        tell: Callable[[Finding], None] = lambda finding: None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._optimizer, self._tell, self._say = optimizer, tell, say
        self.recipe = RecipeRate(hp, reduction, ramp)
        self._owner = RateOwner.TASK if own else RateOwner.RECIPE
        self._reason = ""
        self._built: list[Rate] = []
        self._last: list[Rate] = []
        self.read = None if hp.ada_scale_batch_size is None else hp.learning_rate
        """The first group's rate in the last step that has been read; None where the host knows it anyway."""
        if not own:
            for group, scale in zip(optimizer.param_groups, _layer_scales(optimizer), strict=True):
                if scale != 1:
                    group["lr"] = group["lr"] * scale
        self._take_in_new_groups()

    @property
    def ramp(self) -> Ramp | None:
        """Returns the recipe's ramp; None if the rates are the task's."""
        return self.recipe.ramp if self._owner is RateOwner.RECIPE else None

    @property
    def current(self) -> float:
        """The first group's rate; 0 for an optimizer that works without one."""
        return self.read if self.read is not None else _number(self._optimizer.param_groups[0].get("lr")) or 0.0

    @property
    def base(self) -> float:
        """The rate that the first group was built with."""
        return _number(self._built[0]) or 0.0

    def rate_after(self, steps: int) -> float:
        """Returns the recipe's rate in the last of `steps` steps, of which each group has a multiple; the first group's
        rate if the rates are the task's."""
        if self._owner is not RateOwner.RECIPE or self.read is not None:
            return self.current
        return self.recipe.hp.learning_rate * self.recipe.factor(steps - 1)

    def set(self, step: int, factor: Tensor | None = None) -> None:
        """Sets the rates for step `step`, counted from 0. `factor`: in place of the recipe's, on the device.

        Raises:
            UserCodeError: there is such a factor, and the rates are the task's.
        """
        self._take_in_new_groups()
        groups = self._optimizer.param_groups
        if (change := self._find_change()) is not None:
            self._hand_over(step, f"step {step + 1}: the task's own code set {change}")
        if factor is not None and self._owner is not RateOwner.RECIPE:
            raise UserCodeError(
                "recipe.scaling.learningRate: AdaScale sets the learning rate of every step, and here the task's own "
                "code sets it; leave the rate to the recipe, or use Linear or SquareRoot"
            )
        if self._owner is RateOwner.HOOKS:
            # A finding has reported this.
            return
        if self._owner is RateOwner.RECIPE:
            applied = self.recipe.factor(step) if factor is None else factor
            for group, rate in zip(groups, self._built, strict=True):
                if rate is not None:
                    group["lr"] = rate * applied
            self._last = [group.get("lr") if factor is not None else _copy(group.get("lr")) for group in groups]
        reason = self.reason(step)
        if reason != self._reason:
            self._reason = reason
            self._say(f"step {step + 1}: the learning rate is {self.current:.6g}, {reason}")

    def reason(self, step: int) -> str:
        """Returns what determines the rates of step `step`, counted from 0, unless hooks have set them."""
        return self.recipe.reason(step) if self._owner is RateOwner.RECIPE else "by the task's own schedule"

    def lower(self) -> None:
        """Lowers the recipe's rates after a plateau, from the next step on."""
        self.recipe = self.recipe.lowered()

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps, as JSON: the owner of the rates, the groups' original rates and current
        rates."""
        # A rate on the device is the recipe's.
        present = self._built if self.read is not None else [group.get("lr") for group in self._optimizer.param_groups]
        # A hook may have set a rate since the last step.
        owner = self._owner if self._find_change() is None else RateOwner.HOOKS
        return {"whose": owner, "built": _numbers(self._built), "present": _numbers(present)}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Restores rates that the task had set, in proportion if its optimizer is now built with others; the recipe's
        rates need no state. None comes from an older checkpoint, which has no such state."""
        if state is None or state["whose"] not in (RateOwner.HOOKS, self._owner):
            return
        if state["whose"] == RateOwner.RECIPE:
            self._load_new_groups(state["built"])
            return
        if self._owner is RateOwner.RECIPE:
            self._hand_over(0, "before the checkpoint the task's own code set the learning rate")
        groups = self._optimizer.param_groups
        for group, now, then, rate in zip(
            groups, _numbers(self._built), state["built"], state["present"], strict=False
        ):
            if rate is not None:
                group["lr"] = rate if now == then or not now or not then else rate * now / then

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Continues with the owner of an earlier `state` of this run, whose rates the groups have again."""
        self._owner = RateOwner(state["whose"])
        self._last = [_copy(group.get("lr")) for group in self._optimizer.param_groups]

    def _load_new_groups(self, built: Sequence[float | None]) -> None:
        """Gives groups that a hook had added their original rate, in proportion to the recipe's, instead of their
        last."""
        count = len(self._built)
        now, then = _number(self._built[0]), built[0]
        for group, rate in zip(self._optimizer.param_groups[count:], built[count:], strict=False):
            if rate is not None:
                group["lr"] = rate * now / then if now and then else rate

    def _take_in_new_groups(self) -> None:
        for group in self._optimizer.param_groups[len(self._built) :]:
            self._built.append(_copy(group.get("lr")))
            self._last.append(_copy(group.get("lr")))

    def _find_change(self) -> str | None:
        """Returns in words which of the recipe's rates the task has changed; None if it has changed none."""
        if self._owner is RateOwner.RECIPE:
            for group, last in zip(self._optimizer.param_groups, self._last, strict=False):
                # By identity first: reading a number from the device waits for it.
                if (rate := group.get("lr")) is not last and _number(rate) != _number(last):
                    return f"the learning rate to {_short(rate)}, it was {_short(last)}"
        return None

    def _hand_over(self, step: int, observation: str) -> None:
        self._owner = RateOwner.HOOKS
        text = f"{observation}. From here on the rate is the task's: the recipe's warm-up and schedule are not used"
        self._tell(Finding("LearningRate", step, text))


def _layer_scales(optimizer: Optimizer) -> list[float]:
    """Returns each group's `lr_scale`, by which timm and others leave layer-wise decay to the scheduler; 1 without one,
    or if the group already has its own rate."""
    default = getattr(optimizer, "defaults", {}).get("lr")
    return [
        float(group["lr_scale"]) if "lr_scale" in group and group.get("lr") == default else 1.0
        for group in optimizer.param_groups
    ]


def _copy(rate: Rate) -> Rate:
    # Code of the task may fill a tensor in place.
    return rate.clone() if isinstance(rate, Tensor) else rate


def _number(rate: Rate) -> float | None:
    return None if rate is None else float(rate)


def _numbers(rates: Sequence[Rate]) -> list[float | None]:
    return [_number(rate) for rate in rates]


def _short(rate: Rate) -> str:
    return "nothing" if rate is None else f"{float(rate):.6g}"


def rate_factor(step: Step, steps: int, warmup: int, schedule: ScheduleSpec) -> Step:
    """Returns the rate of step `step` (counted from 0; a number, or a tensor of shape []) over the recipe's.

    While step < warmup it is (step + 1) / warmup (gradual warm-up, Goyal et al. 2017, section 2.2). It is never 0: XLA
    would compile a step with a rate of exactly 0 separately, so Linear and Cosine end one step above `factor`.
    """
    choose, cos = (torch.where, torch.cos) if isinstance(step, Tensor) else (_choose, math.cos)
    done = (step - warmup) / max(1, steps - warmup)
    end = _END_FACTOR if schedule.factor is None else schedule.factor
    factor: Any = 1.0
    match schedule.name:
        case "Linear":
            factor = 1 - (1 - end) * done
        case "Cosine":
            factor = end + (1 - end) * (1 + cos(math.pi * done)) / 2
        case "Step":
            drop = DEFAULT_FACTOR if schedule.factor is None else schedule.factor
            factor = math.prod([choose(step >= milestone, drop, 1.0) for milestone in schedule.milestones])
    return choose(step < warmup, (step + 1) / max(1, warmup), factor)


def _choose(condition: bool, first: float, second: float) -> float:
    return first if condition else second
