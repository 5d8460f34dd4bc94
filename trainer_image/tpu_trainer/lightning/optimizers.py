"""What `configure_optimizers` returns: one optimizer, with or without schedulers."""

from __future__ import annotations

import math
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
_COUNTED = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
"""The state of a ReduceLROnPlateau; what else it keeps are its settings, which are the task's."""

_FORMS = (
    "an optimizer, [optimizer], ([optimizer], [schedulers]), or "
    '{"optimizer": ..., "lr_scheduler": scheduler or {"scheduler": ..., "interval": "step" or "epoch", "frequency": n}}'
)


@dataclass(frozen=True)
class Scheduled:
    """A scheduler, stepped after every `frequency`-th "step" or "epoch" of the run. With `monitor` it is stepped with
    that metric instead, after every evaluation."""

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None


@dataclass(frozen=True)
class Configured:
    optimizer: Optimizer
    schedulers: tuple[Scheduled, ...]


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
    scheduler = given.get("lr_scheduler")
    if scheduler is not None and "monitor" in given and not isinstance(scheduler, Mapping):
        scheduler = {"scheduler": scheduler, "monitor": given["monitor"]}
    return [given["optimizer"]], [] if scheduler is None else [scheduler]


def _scheduled(given: Any, optimizer: Optimizer) -> Scheduled:
    parts: Mapping[str, Any] = given if isinstance(given, Mapping) else {"scheduler": given}
    scheduler = parts.get("scheduler")
    name = type(scheduler).__name__
    if unknown := sorted(set(parts) - _SCHEDULER_KEYS):
        raise UserCodeError(f"configure_optimizers: lr_scheduler has {', '.join(unknown)}; it must return {_FORMS}")
    if isinstance(scheduler, ReduceLROnPlateau):
        return _on_plateau(parts, scheduler)
    if parts.get("reduce_on_plateau"):
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


def _on_plateau(parts: Mapping[str, Any], scheduler: ReduceLROnPlateau) -> Scheduled:
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
    return Scheduled(scheduler, monitor=monitor)


class Schedules:
    """The schedulers of a run. A rate depends on the steps and epochs done, or, with ReduceLROnPlateau, on the
    evaluations, and on nothing else.

    `advance` makes one scheduler's step, with its metric if it has one.
    """

    def __init__(self, configured: Configured, advance: Callable[[Any, float | None], None]) -> None:
        self._schedulers = configured.schedulers
        self._advance = advance
        self._fresh = [
            {key: value for key, value in group.items() if key != "params"}
            for group in configured.optimizer.param_groups
        ]

    def after(self, interval: str, count: int) -> None:
        """Advances the schedulers that are due after `count` steps or epochs."""
        for each in self._schedulers:
            if each.monitor is None and each.interval == interval and count % each.frequency == 0:
                self._advance(each.scheduler, None)

    @property
    def monitors(self) -> tuple[str, ...]:
        return tuple(each.monitor for each in self._schedulers if each.monitor is not None)

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """`metrics`: at least the monitored ones."""
        for each in self._schedulers:
            if each.monitor is not None:
                self._advance(each.scheduler, metrics[each.monitor])

    def state(self) -> dict[str, Any] | None:
        """What ReduceLROnPlateau has counted, as JSON; its rates are in the checkpoint as the task's own."""
        for each in self._schedulers:
            if each.monitor is not None:
                counted = {name: getattr(each.scheduler, name) for name in _COUNTED}
                return {name: value if math.isfinite(value) else None for name, value in counted.items()}
        return None

    def load(self, kept: Mapping[str, Any] | None) -> None:
        for each in self._schedulers:
            if each.monitor is not None and kept is not None:
                known = {name: value for name, value in kept.items() if value is not None}
                each.scheduler.load_state_dict(each.scheduler.state_dict() | known)

    def fast_forward(self, optimizer: Optimizer, steps: int, epochs: int) -> None:
        """Puts every scheduler where it is after that many steps and epochs.

        Their steps are repeated from the start instead of loaded: on another slice a run has another number of steps,
        and the state of a scheduler made for the old number would be wrong. For the same reason the groups start with
        the schedulers' initial rates, not the checkpoint's. Costs some 10 microseconds a step. The rates of
        ReduceLROnPlateau, which follow from no number of steps, are the checkpoint's.
        """
        if not self._schedulers or self.monitors or steps == 0:
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
