"""What `configure_optimizers` returns: one optimizer, with or without schedulers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tpu_trainer.errors import UserCodeError
from tpu_trainer.lightning.needs import NeedsTrainerError

if TYPE_CHECKING:
    from torch.optim import Optimizer

_SCHEDULER_KEYS = {"scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau"}
_FORMS = (
    "an optimizer, [optimizer], ([optimizer], [schedulers]), or "
    '{"optimizer": ..., "lr_scheduler": scheduler or {"scheduler": ..., "interval": "step" or "epoch", "frequency": n}}'
)


@dataclass(frozen=True)
class Scheduled:
    """A scheduler, stepped after every `frequency`-th "step" or "epoch" of the run."""

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1


@dataclass(frozen=True)
class Configured:
    optimizer: Optimizer
    schedulers: tuple[Scheduled, ...]


def configured(given: Any) -> Configured:
    """The optimizer and its schedulers, from any form that Lightning accepts for one optimizer.

    Raises:
        UserCodeError: no optimizer or several, or a form unknown to Lightning.
        NeedsTrainerError: a scheduler that waits for a metric.
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
    return Configured(optimizer, tuple(_scheduled(scheduler, optimizer) for scheduler in schedulers))


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
    return [given["optimizer"]], [given["lr_scheduler"]] if given.get("lr_scheduler") is not None else []


def _scheduled(given: Any, optimizer: Optimizer) -> Scheduled:
    parts: Mapping[str, Any] = given if isinstance(given, Mapping) else {"scheduler": given}
    scheduler = parts.get("scheduler")
    name = type(scheduler).__name__
    if unknown := sorted(set(parts) - _SCHEDULER_KEYS):
        raise UserCodeError(f"configure_optimizers: lr_scheduler has {', '.join(unknown)}; it must return {_FORMS}")
    if parts.get("reduce_on_plateau") or isinstance(scheduler, ReduceLROnPlateau):
        raise NeedsTrainerError(f"configure_optimizers: {name} waits for a metric")
    if not callable(getattr(scheduler, "step", None)):
        raise UserCodeError(f'configure_optimizers: lr_scheduler "scheduler" is a {name}; it must have step()')
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise UserCodeError(f"configure_optimizers: {name} belongs to another optimizer than the one returned")
    interval, frequency = parts.get("interval", "epoch"), parts.get("frequency", 1)
    if interval not in ("step", "epoch"):
        raise UserCodeError(f'configure_optimizers: interval must be "step" or "epoch", got {interval!r}')
    if not isinstance(frequency, int) or frequency < 1:
        raise UserCodeError(f"configure_optimizers: frequency must be an integer of at least 1, got {frequency!r}")
    return Scheduled(scheduler, interval, frequency)


class Schedules:
    """The schedulers of a run. A rate depends on the steps and epochs done, and on nothing else.

    `advance` makes one scheduler's step.
    """

    def __init__(self, configured: Configured, advance: Callable[[Any], None]) -> None:
        self._schedulers = configured.schedulers
        self._advance = advance
        self._fresh = [
            {key: value for key, value in group.items() if key != "params"}
            for group in configured.optimizer.param_groups
        ]

    def after(self, interval: str, count: int) -> None:
        """Advances the schedulers that are due after `count` steps or epochs."""
        for each in self._schedulers:
            if each.interval == interval and count % each.frequency == 0:
                self._advance(each.scheduler)

    def fast_forward(self, optimizer: Optimizer, steps: int, epochs: int) -> None:
        """Puts every scheduler where it is after that many steps and epochs.

        Their steps are repeated from the start instead of loaded: on another slice a run has another number of steps,
        and the state of a scheduler made for the old number would be wrong. For the same reason the groups start with
        the schedulers' initial rates, not the checkpoint's. Costs some 10 microseconds a step.
        """
        if not self._schedulers or steps == 0:
            return
        # Groups that a hook has added keep the checkpoint's rates: how they got them is unknown.
        added = optimizer.param_groups[len(self._fresh) :]
        del optimizer.param_groups[len(self._fresh) :]
        for group, fresh in zip(optimizer.param_groups, self._fresh, strict=True):
            group.update(fresh)
        # torch warns if a scheduler steps before its optimizer. This optimizer has stepped, in an earlier process.
        vars(optimizer)["_opt_called"] = True
        for count in range(1, steps + 1):
            self.after("step", count)
        for count in range(1, epochs + 1):
            self.after("epoch", count)
        optimizer.param_groups.extend(added)
