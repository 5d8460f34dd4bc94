"""Reads the result of `configure_optimizers`: one optimizer, with or without a scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.lightning.lightning_run import only_under_lightning
from tpu_trainer.optim.schedulers import check_scheduler
from tpu_trainer.task.horizon import SteppedScheduler

if TYPE_CHECKING:
    from torch.optim import Optimizer

_SCHEDULER_KEYS = {"scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau"}
_OPTIMIZER_KEYS = {"optimizer", "lr_scheduler", "monitor"}

_FORMS = (
    "an optimizer, [optimizer], ([optimizer], [scheduler]), or "
    '{"optimizer": ..., "lr_scheduler": scheduler or {"scheduler": ..., "interval": "step" or "epoch", "frequency": n}}'
)


def read_configuration(returned: Any) -> tuple[Optimizer, SteppedScheduler | None]:
    """Returns the optimizer and its scheduler, from any form that Lightning accepts.

    Raises:
        UserCodeError: Lightning does not know the form, or the trainer's own loop does not support what it says.
    """
    optimizers, configs = _parts(returned)
    if len(optimizers) != 1 or len(configs) > 1:
        raise only_under_lightning(
            f"configure_optimizers returns {len(optimizers)} optimizers and {len(configs)} schedulers, not one "
            "optimizer and at most one scheduler"
        )
    (optimizer,) = optimizers
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserCodeError(f"configure_optimizers: a {type(optimizer).__name__} is not a torch optimizer")
    return optimizer, _scheduler(configs[0], optimizer) if configs else None


def _parts(returned: Any) -> tuple[list[Any], list[Any]]:
    """Returns the optimizers and the schedulers."""
    match returned:
        case torch.optim.Optimizer():
            return [returned], []
        case Mapping():
            return _mapping_parts(returned)
        case [list() as optimizers, schedulers]:
            return optimizers, list(schedulers) if isinstance(schedulers, list | tuple) else [schedulers]
        case [Mapping() as only]:
            return _mapping_parts(only)
        case [*optimizers]:
            return optimizers, []
    raise UserCodeError(f"configure_optimizers: it returns a {type(returned).__name__}; it must return {_FORMS}")


def _mapping_parts(returned: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    # Lightning only warns, and would train at another rate than a schedule under a misspelt key asks for.
    if "optimizer" not in returned or set(returned) - _OPTIMIZER_KEYS:
        keys = ", ".join(map(str, returned)) or "nothing"
        raise UserCodeError(f"configure_optimizers: its dict has {keys}; it must return {_FORMS}")
    scheduler = returned.get("lr_scheduler")
    if scheduler is not None and "monitor" in returned and not isinstance(scheduler, Mapping):
        scheduler = {"scheduler": scheduler, "monitor": returned["monitor"]}
    return [returned["optimizer"]], [] if scheduler is None else [scheduler]


def _scheduler(config: Any, optimizer: Optimizer) -> SteppedScheduler:
    parts: Mapping[str, Any] = config if isinstance(config, Mapping) else {"scheduler": config}
    scheduler = parts.get("scheduler")
    if unknown := sorted(set(parts) - _SCHEDULER_KEYS):
        raise UserCodeError(f"configure_optimizers: lr_scheduler has {', '.join(unknown)}; it must return {_FORMS}")
    interval, frequency = parts.get("interval", "epoch"), parts.get("frequency", 1)
    if isinstance(scheduler, ReduceLROnPlateau):
        monitor = parts.get("monitor")
        if not isinstance(monitor, str) or not monitor:
            raise UserCodeError(
                'configure_optimizers: ReduceLROnPlateau needs "monitor", the name of a metric that validation_step '
                "logs"
            )
        if (interval, frequency) != ("epoch", 1):
            raise UserCodeError(
                "configure_optimizers: ReduceLROnPlateau is stepped after every evaluation "
                '(recipe.evaluateEverySteps); leave out "interval" and "frequency"'
            )
        return SteppedScheduler(scheduler, monitor=monitor)
    if parts.get("reduce_on_plateau"):
        raise only_under_lightning(f"configure_optimizers: {type(scheduler).__name__} waits for a metric")
    check_scheduler(scheduler, optimizer, "configure_optimizers")
    if interval not in ("step", "epoch"):
        raise UserCodeError(f'configure_optimizers: interval must be "step" or "epoch", got {interval!r}')
    if not isinstance(frequency, int) or frequency < 1:
        raise UserCodeError(f"configure_optimizers: frequency must be an integer of at least 1, got {frequency!r}")
    return SteppedScheduler(scheduler, interval, frequency)
