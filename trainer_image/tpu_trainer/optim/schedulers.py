"""Schedulers that a task brings: stepped after steps or epochs, and replayed from the start in a resumed run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.task.hooks import Hooks
from tpu_trainer.task.horizon import SteppedScheduler

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from tpu_trainer.task.task import Hyperparameters, Task


_COUNTED = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
"""The state of a ReduceLROnPlateau, without its settings, which are the task's."""


def check_scheduler(scheduler: Any, optimizer: Optimizer, where: str) -> None:
    """Checks that a scheduler can be stepped. `where`: the code that made it.

    Raises:
        UserCodeError: it waits for a metric, it cannot be stepped, or it schedules another optimizer.
    """
    name = type(scheduler).__name__
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UserCodeError(f"{where}: {name} waits for a metric; recipe.schedule.name: Plateau does the same")
    if not callable(getattr(scheduler, "step", None)):
        raise UserCodeError(f"{where}: a {name} is not a scheduler: it must have step()")
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise UserCodeError(f"{where}: {name} belongs to another optimizer than the one returned")


class Schedules:
    """The schedulers of a run. A rate depends only on the steps and epochs done, or with ReduceLROnPlateau, on the
    evaluations.

    `advance` makes one scheduler's step, with its metric if it has one.
    """

    def __init__(
        self, optimizer: Optimizer, schedulers: Sequence[SteppedScheduler], advance: Callable[[Any, float | None], None]
    ) -> None:
        self.schedulers = schedulers
        self._advance = advance
        self._fresh = [
            {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]

    def after(self, interval: str, count: int) -> None:
        """Advances the schedulers that are due after `count` steps or epochs."""
        for item in self.schedulers:
            if item.monitor is None and item.interval == interval and count % item.frequency == 0:
                self._advance(item.scheduler, None)

    @property
    def monitors(self) -> tuple[str, ...]:
        return tuple(item.monitor for item in self.schedulers if item.monitor is not None)

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Steps the schedulers that monitor a metric. `metrics`: at least those."""
        for item in self.schedulers:
            if item.monitor is not None:
                self._advance(item.scheduler, metrics[item.monitor])

    def state(self) -> dict[str, Any] | None:
        """Returns the counts of ReduceLROnPlateau, as JSON; its rates are in the checkpoint as the task's own."""
        for item in self.schedulers:
            if item.monitor is not None:
                counted = {name: getattr(item.scheduler, name) for name in _COUNTED}
                return {name: value if math.isfinite(value) else None for name, value in counted.items()}
        return None

    def load(self, state: Mapping[str, Any] | None) -> None:
        for item in self.schedulers:
            if item.monitor is not None and state is not None:
                known = {name: value for name, value in state.items() if value is not None}
                item.scheduler.load_state_dict(item.scheduler.state_dict() | known)

    def fast_forward(self, optimizer: Optimizer, steps: int, epochs: int) -> None:
        """Puts every scheduler where it is after that many steps and epochs.

        Their steps are replayed from the start instead of loaded: on another slice a run has another number of steps,
        and the state of a scheduler made for the old number would be wrong. For the same reason the groups start with
        the schedulers' initial rates, not the checkpoint's. Takes some 10 microseconds a step. The rates of
        ReduceLROnPlateau, which do not follow from a number of steps, are the checkpoint's.
        """
        if not self.schedulers or self.monitors or steps == 0:
            return
        # Groups that a hook has added keep the checkpoint's rates: their origin is unknown.
        added = optimizer.param_groups[len(self._fresh) :]
        del optimizer.param_groups[len(self._fresh) :]
        for group, fresh in zip(optimizer.param_groups, self._fresh, strict=True):
            group.update(fresh)
        # torch warns if a scheduler steps before its optimizer, which this one did in an earlier process.
        vars(optimizer)["_opt_called"] = True
        for count in range(1, steps + 1):
            self.after("step", count)
        for count in range(1, epochs + 1):
            self.after("epoch", count)
        optimizer.param_groups.extend(added)


def build_schedulers(task: Task, hooks: Hooks, optimizer: Optimizer, hp: Hyperparameters) -> Schedules:
    """Builds the Task's scheduler, if it has one, beside those that its hooks have built with the optimizer."""
    scheduled = hooks.scheduled
    if task.scheduler is not None:
        build, interval = task.scheduler if isinstance(task.scheduler, tuple) else (task.scheduler, "step")
        with user_code("the task's scheduler"):
            scheduler = build(optimizer, hp)
        check_scheduler(scheduler, optimizer, "the task's scheduler")
        scheduled = (*scheduled, SteppedScheduler(scheduler, interval))
    return Schedules(optimizer, scheduled, hooks.advance_scheduler)
