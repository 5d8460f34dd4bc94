"""The learning rate of every step: warm-up, then the recipe's schedule, unless the task sets the rate itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tpu_trainer.contract.findings import Finding
from tpu_trainer.contract.spec import ScheduleSpec

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from tpu_trainer.task.task import Hyperparameters

DROP = 0.1
"""The default factor of schedules Step and Plateau."""
_END_FACTOR = 0.0

Rate = Any
"""A group's rate as its optimizer has it: a float, a tensor of shape [], or None."""


@dataclass(frozen=True)
class Ramp:
    """After a change of the slice the rate rises linearly from `begin` times the schedule's to all of it, in `steps`
    steps beginning with step `first`, counted from 0."""

    first: int
    steps: int
    begin: float

    def factor(self, step: int) -> float:
        done = min((step - self.first + 1) / (self.steps + 1), 1.0)
        return self.begin + (1 - self.begin) * done


class RateOwner(StrEnum):
    """Who sets the rates: the recipe; the task from the start, by a scheduler; or the task since some step."""

    RECIPE = "recipe"
    TASK = "task"
    HOOKS = "hooks"


@dataclass(frozen=True)
class _Seen:
    """A group's rate when it was last looked at. torch counts the writes to a tensor in its version, so one that was
    filled in place shows without a read of the device."""

    rate: Rate
    version: int

    @staticmethod
    def of(group: Mapping[str, Any]) -> _Seen:
        rate = group.get("lr")
        return _Seen(rate, _version(rate))

    def is_still(self, rate: Rate) -> bool:
        if isinstance(rate, Tensor) or isinstance(self.rate, Tensor):
            return rate is self.rate and _version(rate) == self.version
        return bool(rate == self.rate)


_TAKEN = "From here on the rate is the task's: the recipe's warm-up and schedule are not used"


class LearningRateSetter:
    """Sets every parameter group's rate, based on the one the optimizer was built with, until the task sets one itself.

    A rate that differs from the one set here last was set by the task's own code, in a hook or in its optimizer. It
    stands, and from then on all rates are the task's, which `tell` is told once. `own`: they are from the start.
    `ramp`: None without one, and if the rates are the task's. `reduction`: what schedule Plateau has multiplied the
    recipe's rates by so far.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        hp: Hyperparameters,
        ramp: Ramp | None = None,
        *,
        own: bool = False,
        tell: Callable[[Finding], None] = lambda finding: None,
    ) -> None:
        self._optimizer, self._hp, self._tell = optimizer, hp, tell
        self.ramp = None if own else ramp
        self.reduction = 1.0
        self._whose = RateOwner.TASK if own else RateOwner.RECIPE
        self._built: list[Rate] = []
        self._last: list[_Seen] = []
        self._factor = 1.0
        self._take_in_new_groups()
        if not own:
            for group, scale in zip(optimizer.param_groups, _layer_scales(optimizer), strict=True):
                if scale != 1:
                    group["lr"] = group["lr"] * scale
            self._built, self._last = [], []
            self._take_in_new_groups()

    @property
    def present(self) -> float:
        """The first group's rate; 0 for an optimizer that works without one."""
        rate = self._optimizer.param_groups[0].get("lr")
        return 0.0 if rate is None else float(rate)

    def reached(self, steps: int) -> float:
        """Returns the recipe's own rate in the last of `steps` steps, of which groups may have other shares; the first
        group's if the rates are the task's."""
        return self._hp.learning_rate * self._factor_of(steps - 1) if self._whose is RateOwner.RECIPE else self.present

    def set(self, step: int) -> None:
        """Sets the rates for step `step`, counted from 0."""
        self._take_in_new_groups()
        groups = self._optimizer.param_groups
        if self._whose is RateOwner.RECIPE and not all(
            last.is_still(group.get("lr")) for group, last in zip(groups, self._last, strict=True)
        ):
            self._taken_over(step)
        if self._whose is not RateOwner.RECIPE:
            return
        self._factor = self._factor_of(step)
        for group, rate in zip(groups, self._built, strict=True):
            if rate is not None:
                group["lr"] = rate * self._factor
        self._last = [_Seen.of(group) for group in groups]

    def _factor_of(self, step: int) -> float:
        """Returns the factor of the recipe's rate in step `step`, counted from 0."""
        factor = self.reduction * rate_factor(step, self._hp.train_steps, self._hp.warmup_steps, self._hp.schedule)
        return factor if self.ramp is None else factor * self.ramp.factor(step)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON: whose the rates are, the groups' original rates and their present ones."""
        present = [group.get("lr") for group in self._optimizer.param_groups]
        return {"whose": self._whose, "built": _numbers(self._built), "present": _numbers(present)}

    def load(self, kept: Mapping[str, Any] | None) -> None:
        """Restores rates that the task had set, in proportion if its optimizer is now built with others; the recipe's
        own need no state. None: an older checkpoint, which does not keep this."""
        if kept is None or kept["whose"] not in (RateOwner.HOOKS, self._whose):
            return
        if kept["whose"] == RateOwner.RECIPE:
            self._load_new_groups(kept["built"])
            return
        if self._whose is RateOwner.RECIPE:
            self._whose, self.ramp = RateOwner.HOOKS, None
            text = f"before the checkpoint the task's own code set the learning rate. {_TAKEN}"
            self._tell(Finding("LearningRate", 0, text))
        groups = self._optimizer.param_groups
        for group, now, then, rate in zip(groups, _numbers(self._built), kept["built"], kept["present"], strict=False):
            if rate is not None:
                group["lr"] = rate if now == then or not now or not then else rate * now / then

    def rewind(self, kept: Mapping[str, Any]) -> None:
        """Notes that the groups have the rates of a `state` of this run again: whoever set them then sets them from
        here."""
        self._whose = RateOwner(kept["whose"])
        self._last = [_Seen.of(group) for group in self._optimizer.param_groups]

    def _load_new_groups(self, built: Sequence[float | None]) -> None:
        """Groups that a hook had added come with the rate of their last step; here they get their original rate, in
        proportion to the recipe's."""
        count = len(self._built)
        now, then = _numbers(self._built[:1])[0], built[0]
        for group, rate in zip(self._optimizer.param_groups[count:], built[count:], strict=False):
            if rate is not None:
                group["lr"] = rate * now / then if now and then else rate

    def _take_in_new_groups(self) -> None:
        for group in self._optimizer.param_groups[len(self._built) :]:
            rate = group.get("lr")
            self._built.append(rate.clone() if isinstance(rate, Tensor) else rate)
            self._last.append(_Seen.of(group))

    def _taken_over(self, step: int) -> None:
        self._whose = RateOwner.HOOKS
        groups = self._optimizer.param_groups
        present, built = next(
            (group.get("lr"), built)
            for group, built, last in zip(groups, self._built, self._last, strict=True)
            if not last.is_still(group.get("lr"))
        )
        before = None if built is None else built * self._factor
        rates = f"to {_short(present)}, it was {_short(before)}"
        text = f"step {step + 1}: the task's own code set the learning rate {rates}. {_TAKEN}"
        self._tell(Finding("LearningRate", step, text))


def _layer_scales(optimizer: Optimizer) -> list[float]:
    """Each group's `lr_scale`, with which timm and others leave layer-wise decay to the scheduler; 1 without one, or if
    the group's rate has been set apart already."""
    default = getattr(optimizer, "defaults", {}).get("lr")
    return [
        float(group["lr_scale"]) if "lr_scale" in group and group.get("lr") == default else 1.0
        for group in optimizer.param_groups
    ]


def _version(rate: Rate) -> int:
    return rate._version if isinstance(rate, Tensor) else 0


def _numbers(rates: Sequence[Rate]) -> list[float | None]:
    return [None if rate is None else float(rate) for rate in rates]


def _short(rate: Rate) -> str:
    return "nothing" if rate is None else f"{float(rate):.6g}"


def rate_factor(step: int, steps: int, warmup: int, schedule: ScheduleSpec) -> float:
    """The rate of step `step` (counted from 0) over the recipe's.

    While step < warmup it is (step + 1) / warmup (gradual warm-up, Goyal et al. 2017, section 2.2). It is never 0: XLA
    would compile a step with a rate of exactly 0 separately, so Linear and Cosine end one step above `factor`.
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
            factor = DROP if schedule.factor is None else schedule.factor
            return math.prod([factor for milestone in schedule.milestones if step >= milestone])
        case _:
            return 1.0
