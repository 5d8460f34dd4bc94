"""Finds the parameter groups of a task's optimizer whose rate does not follow the recipe's.

The task gets the recipe's rate as a number that what is computed from it takes after. So the optimizer is built once,
and whatever its building does happens once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from tpu_trainer.task.task import Hyperparameters


class FollowedRate(float):
    """A rate. What is computed from one by arithmetic is one, too; a copy or a pickle of it is a plain number."""

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)


def _followed(name: str) -> Any:
    def compute(self: FollowedRate, *others: Any) -> Any:
        result = getattr(float, name)(self, *others)
        return FollowedRate(result) if isinstance(result, float) else result

    return compute


for _name in ("add", "sub", "mul", "truediv", "pow"):
    for _side in ("", "r"):
        setattr(FollowedRate, f"__{_side}{_name}__", _followed(f"__{_side}{_name}__"))


def followed(hp: Hyperparameters) -> Hyperparameters:
    """Returns the same hyperparameters for the task's own code."""
    return replace(hp, learning_rate=FollowedRate(hp.learning_rate))


def find_fixed_rates(optimizer: Optimizer) -> Iterator[str]:
    """Yields a text for each parameter group with a rate of its own beside groups that follow the recipe's. Makes all
    rates plain numbers."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(rate, FollowedRate):
            group["lr"] = float(rate)
    following = next((number for number, rate in enumerate(rates) if isinstance(rate, FollowedRate)), None)
    if following is None:
        # Nothing shows where the rates come from.
        return
    for number, rate in enumerate(rates):
        if type(rate) in (int, float) and rate:
            yield (
                f"parameter group {number} of the task's {type(optimizer).__name__} keeps the rate {rate:g} on every "
                f"slice, and group {following} follows the recipe's (here {rates[following]:g}). If that is not meant, "
                "compute it from learning_rate"
            )
