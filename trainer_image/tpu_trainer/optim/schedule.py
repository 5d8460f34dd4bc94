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


class RateOwner(StrEnum):
    """Who sets the rates: the recipe; the task from the start, by a scheduler; or the task since some step."""

    RECIPE = "recipe"
    TASK = "task"
    HOOKS = "hooks"


@dataclass(frozen=True)
class _Seen:
    """A group's rate when it was last checked. torch counts the writes to a tensor in its version, so an in-place
    change is noticed without a read from the device."""

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

    A rate that differs from the one last set here was set by the task's own code, in a hook or in its optimizer. It
    stands, and from then on all rates are the task's, which is reported to `tell` once. `own`: they are the task's from
    the start. `ramp`: None without one, and if the rates are the task's. `reduction`: the factor by which schedule
    Plateau has multiplied the recipe's rates so far.
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
        self._owner = RateOwner.TASK if own else RateOwner.RECIPE
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
    def current(self) -> float:
        """The first group's rate; 0 for an optimizer that works without one."""
        rate = self._optimizer.param_groups[0].get("lr")
        return 0.0 if rate is None else float(rate)

    def rate_after(self, steps: int) -> float:
        """Returns the recipe's rate in the last of `steps` steps, of which each group has a multiple; the first group's
        rate if the rates are the task's."""
        return self._hp.learning_rate * self._factor_of(steps - 1) if self._owner is RateOwner.RECIPE else self.current

    def set(self, step: int) -> None:
        """Sets the rates for step `step`, counted from 0."""
        self._take_in_new_groups()
        groups = self._optimizer.param_groups
        if self._owner is RateOwner.RECIPE and not all(
            last.is_still(group.get("lr")) for group, last in zip(groups, self._last, strict=True)
        ):
            self._hand_over(step)
        if self._owner is not RateOwner.RECIPE:
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
        """Returns what a checkpoint keeps, as JSON: the owner of the rates, the groups' original rates and current
        rates."""
        present = [group.get("lr") for group in self._optimizer.param_groups]
        return {"whose": self._owner, "built": _numbers(self._built), "present": _numbers(present)}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Restores rates that the task had set, in proportion if its optimizer is now built with others; the recipe's
        rates need no state. None comes from an older checkpoint, which has no such state."""
        if state is None or state["whose"] not in (RateOwner.HOOKS, self._owner):
            return
        if state["whose"] == RateOwner.RECIPE:
            self._load_new_groups(state["built"])
            return
        if self._owner is RateOwner.RECIPE:
            self._owner, self.ramp = RateOwner.HOOKS, None
            text = f"before the checkpoint the task's own code set the learning rate. {_TAKEN}"
            self._tell(Finding("LearningRate", 0, text))
        groups = self._optimizer.param_groups
        for group, now, then, rate in zip(
            groups, _numbers(self._built), state["built"], state["present"], strict=False
        ):
            if rate is not None:
                group["lr"] = rate if now == then or not now or not then else rate * now / then

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Continues with the owner of an earlier `state` of this run, whose rates the groups have again."""
        self._owner = RateOwner(state["whose"])
        self._last = [_Seen.of(group) for group in self._optimizer.param_groups]

    def _load_new_groups(self, built: Sequence[float | None]) -> None:
        """Gives groups that a hook had added their original rate, in proportion to the recipe's, instead of their
        last."""
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

    def _hand_over(self, step: int) -> None:
        self._owner = RateOwner.HOOKS
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
    """Returns each group's `lr_scale`, by which timm and others leave layer-wise decay to the scheduler; 1 without one,
    or if the group already has its own rate."""
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
    """Returns the rate of step `step` (counted from 0) over the recipe's.

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
