"""What `configure_optimizers` returns: one optimizer, with or without schedulers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.lightning.needs import NeedsTrainerError
from tpu_trainer.optim.schedulers import check_scheduler
from tpu_trainer.task.horizon import SteppedScheduler

if TYPE_CHECKING:
    from torch.optim import Optimizer

_SCHEDULER_KEYS = {"scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau"}
_OPTIMIZER_KEYS = {"optimizer", "lr_scheduler", "monitor"}
_COUNTED = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
"""The state of a ReduceLROnPlateau; what else it keeps are its settings, which are the task's."""

_FORMS = (
    "an optimizer, [optimizer], ([optimizer], [schedulers]), or "
    '{"optimizer": ..., "lr_scheduler": scheduler or {"scheduler": ..., "interval": "step" or "epoch", "frequency": n}}'
)


@dataclass(frozen=True)
class Configured:
    optimizer: Optimizer
    schedulers: tuple[SteppedScheduler, ...]


def configured(given: Any) -> Configured:
    """The optimizer and its schedulers, from any form that Lightning accepts for one optimizer.

    Raises:
        UserCodeError: no optimizer or several, or a form unknown to Lightning.
        NeedsTrainerError: a scheduler that waits for a metric, unless it is torch's ReduceLROnPlateau.
    """
    optimizers, schedulers = _parts(given)
    if len(optimizers) != 1:
        raise UserCodeError(
            f"configure_optimizers: it returns {len(optimizers)} optimizers; with automatic optimization there is one. "
            "Set automatic_optimization = False and make the steps in training_step: Lightning's own Trainer then "
            "trains it"
        )
    (optimizer,) = optimizers
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserCodeError(f"configure_optimizers: a {type(optimizer).__name__} is not a torch optimizer")
    found = tuple(_scheduled(scheduler, optimizer) for scheduler in schedulers)
    if len(found) > 1 and any(each.monitor is not None for each in found):
        raise UserCodeError(
            "configure_optimizers: ReduceLROnPlateau beside another scheduler is not supported, because a resumed run "
            "could not tell which of them has set the rate"
        )
    return Configured(optimizer, found)


def _parts(given: Any) -> tuple[list[Any], list[Any]]:
    """The optimizers and the schedulers."""
    if isinstance(given, torch.optim.Optimizer):
        return [given], []
    if isinstance(given, Mapping):
        return _of_mapping(given)
    if isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) == 2 and isinstance(given[0], list):
            schedulers = given[1]
            return list(given[0]), list(schedulers) if isinstance(schedulers, list | tuple) else [schedulers]
        if given and all(isinstance(each, Mapping) for each in given):
            parts = [_of_mapping(each) for each in given]
            return [one for found, _ in parts for one in found], [one for _, found in parts for one in found]
        return list(given), []
    raise UserCodeError(f"configure_optimizers: it returns a {type(given).__name__}; it must return {_FORMS}")


def _of_mapping(given: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    if "optimizer" not in given:
        raise UserCodeError(
            f'configure_optimizers: a dict without "optimizer", it has {", ".join(map(str, given)) or "nothing"}; it '
            f"must return {_FORMS}"
        )
    # Lightning warns and leaves it out: a schedule under a misspelt key would train with another rate.
    if unknown := sorted(str(key) for key in set(given) - _OPTIMIZER_KEYS):
        raise UserCodeError(f"configure_optimizers: its dict has {', '.join(unknown)}; it must return {_FORMS}")
    scheduler = given.get("lr_scheduler")
    if scheduler is not None and "monitor" in given and not isinstance(scheduler, Mapping):
        scheduler = {"scheduler": scheduler, "monitor": given["monitor"]}
    return [given["optimizer"]], [] if scheduler is None else [scheduler]


def _scheduled(given: Any, optimizer: Optimizer) -> SteppedScheduler:
    parts: Mapping[str, Any] = given if isinstance(given, Mapping) else {"scheduler": given}
    scheduler = parts.get("scheduler")
    if unknown := sorted(set(parts) - _SCHEDULER_KEYS):
        raise UserCodeError(f"configure_optimizers: lr_scheduler has {', '.join(unknown)}; it must return {_FORMS}")
    if isinstance(scheduler, ReduceLROnPlateau):
        return _on_plateau(parts, scheduler)
    if parts.get("reduce_on_plateau"):
        raise NeedsTrainerError(f"configure_optimizers: {type(scheduler).__name__} waits for a metric")
    check_scheduler(scheduler, optimizer, "configure_optimizers")
    interval, frequency = parts.get("interval", "epoch"), parts.get("frequency", 1)
    if interval not in ("step", "epoch"):
        raise UserCodeError(f'configure_optimizers: interval must be "step" or "epoch", got {interval!r}')
    if not isinstance(frequency, int) or frequency < 1:
        raise UserCodeError(f"configure_optimizers: frequency must be an integer of at least 1, got {frequency!r}")
    return SteppedScheduler(scheduler, interval, frequency)


def _on_plateau(parts: Mapping[str, Any], scheduler: ReduceLROnPlateau) -> SteppedScheduler:
    monitor = parts.get("monitor")
    if not isinstance(monitor, str) or not monitor:
        raise UserCodeError(
            'configure_optimizers: ReduceLROnPlateau needs "monitor", the name of a metric that validation_step logs'
        )
    if parts.get("interval", "epoch") != "epoch" or parts.get("frequency", 1) != 1:
        raise UserCodeError(
            "configure_optimizers: ReduceLROnPlateau is stepped after every evaluation (recipe.evaluateEverySteps); "
            'leave out "interval" and "frequency"'
        )
    return SteppedScheduler(scheduler, monitor=monitor)
