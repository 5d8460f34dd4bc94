"""Reads the result of `configure_optimizers`: one optimizer, with or without schedulers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
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
class OptimizerConfiguration:
    optimizer: Optimizer
    schedulers: tuple[SteppedScheduler, ...]


def read_configuration(returned: Any) -> OptimizerConfiguration:
    """Reads the optimizer and its schedulers from any form that Lightning accepts for one optimizer.

    Raises:
        UserCodeError: there is not exactly one optimizer, or Lightning does not know the form.
        NeedsTrainerError: a scheduler waits for a metric, and is not torch's ReduceLROnPlateau.
    """
    optimizers, configs = _parts(returned)
    if len(optimizers) != 1:
        raise UserCodeError(
            f"configure_optimizers: it returns {len(optimizers)} optimizers; automatic optimization takes one. "
            "Set automatic_optimization = False and make the steps in training_step; Lightning's own Trainer then "
            "trains the module"
        )
    (optimizer,) = optimizers
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserCodeError(f"configure_optimizers: a {type(optimizer).__name__} is not a torch optimizer")
    schedulers = tuple(_scheduler(config, optimizer) for config in configs)
    if len(schedulers) > 1 and any(scheduler.monitor is not None for scheduler in schedulers):
        raise UserCodeError(
            "configure_optimizers: ReduceLROnPlateau beside another scheduler is not supported, because a resumed run "
            "could not tell which of them has set the rate"
        )
    return OptimizerConfiguration(optimizer, schedulers)


def _parts(given: Any) -> tuple[list[Any], list[Any]]:
    """Returns the optimizers and the schedulers."""
    if isinstance(given, torch.optim.Optimizer):
        return [given], []
    if isinstance(given, Mapping):
        return _mapping_parts(given)
    if isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) == 2 and isinstance(given[0], list):
            schedulers = given[1]
            return list(given[0]), list(schedulers) if isinstance(schedulers, list | tuple) else [schedulers]
        if given and all(isinstance(item, Mapping) for item in given):
            optimizers, schedulers = zip(*(_mapping_parts(item) for item in given), strict=True)
            return list(chain(*optimizers)), list(chain(*schedulers))
        return list(given), []
    raise UserCodeError(f"configure_optimizers: it returns a {type(given).__name__}; it must return {_FORMS}")


def _mapping_parts(given: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    if "optimizer" not in given:
        raise UserCodeError(
            f'configure_optimizers: its dict has no "optimizer", only {", ".join(map(str, given)) or "nothing"}; it '
            f"must return {_FORMS}"
        )
    # Lightning only warns, and would train at another rate than a schedule under a misspelt key asks for.
    if unknown := sorted(str(key) for key in set(given) - _OPTIMIZER_KEYS):
        raise UserCodeError(f"configure_optimizers: its dict has {', '.join(unknown)}; it must return {_FORMS}")
    scheduler = given.get("lr_scheduler")
    if scheduler is not None and "monitor" in given and not isinstance(scheduler, Mapping):
        scheduler = {"scheduler": scheduler, "monitor": given["monitor"]}
    return [given["optimizer"]], [] if scheduler is None else [scheduler]


def _scheduler(given: Any, optimizer: Optimizer) -> SteppedScheduler:
    parts: Mapping[str, Any] = given if isinstance(given, Mapping) else {"scheduler": given}
    scheduler = parts.get("scheduler")
    if unknown := sorted(set(parts) - _SCHEDULER_KEYS):
        raise UserCodeError(f"configure_optimizers: lr_scheduler has {', '.join(unknown)}; it must return {_FORMS}")
    if isinstance(scheduler, ReduceLROnPlateau):
        return _plateau_scheduler(parts, scheduler)
    if parts.get("reduce_on_plateau"):
        raise NeedsTrainerError(f"configure_optimizers: {type(scheduler).__name__} waits for a metric")
    check_scheduler(scheduler, optimizer, "configure_optimizers")
    interval, frequency = parts.get("interval", "epoch"), parts.get("frequency", 1)
    if interval not in ("step", "epoch"):
        raise UserCodeError(f'configure_optimizers: interval must be "step" or "epoch", got {interval!r}')
    if not isinstance(frequency, int) or frequency < 1:
        raise UserCodeError(f"configure_optimizers: frequency must be an integer of at least 1, got {frequency!r}")
    return SteppedScheduler(scheduler, interval, frequency)


def _plateau_scheduler(parts: Mapping[str, Any], scheduler: ReduceLROnPlateau) -> SteppedScheduler:
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
