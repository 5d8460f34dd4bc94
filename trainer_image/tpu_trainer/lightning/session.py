"""One LightningModule in training: its hooks, its log, and what it sees of a Trainer.

`self.log` leaves values on the device: reading one would make every step wait for the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.lightning.lightning_run import ADVICE, only_under_lightning
from tpu_trainer.task.board import ReportLogger
from tpu_trainer.task.horizon import SteppedScheduler
from tpu_trainer.task.logbook import Style, note
from tpu_trainer.task.task import Batch

if TYPE_CHECKING:
    from torch import nn

LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
"""Packages whose own methods are defaults: they do nothing, or call a Trainer that is not there."""


@runtime_checkable
class Metric(Protocol):
    """The parts of torchmetrics.Metric that are used here."""

    _update_count: int

    def compute(self) -> Any: ...

    def reset(self) -> None: ...


def is_metric(value: Any) -> TypeGuard[Metric]:
    return isinstance(value, Metric)


_KINDS: Mapping[Any, Literal["mean", "sum"]] = {"mean": "mean", "sum": "sum", torch.mean: "mean", torch.sum: "sum"}


def reduction_of(name: str, reduce_fx: Any) -> Literal["mean", "sum"]:
    """Returns how to reduce a logged value. Raises UserCodeError for anything but a mean and a sum."""
    kind = _KINDS.get(reduce_fx)
    if kind is None:
        raise only_under_lightning(f'self.log("{name}", reduce_fx={getattr(reduce_fx, "__name__", reduce_fx)})')
    return kind


class ModuleLog:
    """A module's `self.log`. `latest`: the last value of every name. `metrics`: metric objects logged in training,
    which the end of the epoch resets. `collector`: takes the values that an evaluation logs, while it runs."""

    def __init__(self, latest: dict[str, Any]) -> None:
        self.latest = latest
        self.metrics: list[Metric] = []
        self.collector: Callable[..., None] | None = None

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        *_: Any,
        batch_size: int | None = None,
        sync_dist: bool = False,
        **__: Any,
    ) -> None:
        """Logs a value: Lightning's `log`. Values are always reduced over all processes, whatever `sync_dist` is."""
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise UserCodeError(f'self.log("{name}"): a single number is needed, got shape {list(value.shape)}')
            value = self.latest[name] = value.detach()
        elif isinstance(value, int | float):
            self.latest[name] = value
        elif not is_metric(value):
            raise UserCodeError(
                f'self.log("{name}"): a {type(value).__name__} is not a number, tensor or metric; log several values '
                "with self.log_dict"
            )
        elif self.collector is None and not any(value is known for known in self.metrics):
            self.metrics.append(value)
        if self.collector is not None:
            if on_epoch is not False:
                self.collector(name, value, reduce_fx, batch_size, sync_dist=sync_dist)
        # The loss is reported anyway.
        elif logger is not False and name != "loss":
            style = Style(reduction_of(name, reduce_fx), on_step is not False, bool(on_epoch), prog_bar)
            # What a metric's forward has computed for this batch.
            number = getattr(value, "_forward_cache", None) if is_metric(value) else value
            is_number = isinstance(number, int | float) or (isinstance(number, Tensor) and number.numel() == 1)
            if is_number and (style.step or style.epoch):
                note(name, number, 1.0 if batch_size is None or style.kind == "sum" else batch_size, style)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        for name, value in dictionary.items():
            self.log(name, value, *args, **options)

    def epoch_ends(self) -> None:
        """Resets the metrics that the epoch logged, as Lightning does."""
        for metric in self.metrics:
            metric.reset()
        self.metrics.clear()


# With slots, setting an attribute without effect, such as `trainer.should_stop`, is an error.
@dataclass(slots=True)
class TrainerView:
    """A LightningModule's `self.trainer`: names and meanings are Lightning's, other names are an error.

    A rank is a process; steps are the job's, not one process's batches. max_epochs is -1 and num_training_batches
    infinite if the training data has no length. callback_metrics holds the last value of every name: on the device in
    training, an evaluation's results after it.
    """

    max_steps: int
    accumulate_grad_batches: int
    world_size: int
    global_rank: int
    local_rank: int
    datamodule: Any
    max_epochs: int = -1
    num_training_batches: int | float = float("inf")
    current_epoch: int = 0
    global_step: int = 0
    training: bool = True
    validating: bool = False
    sanity_checking: bool = False
    optimizers: list[Any] = field(default_factory=list)
    lr_scheduler_configs: list[SteppedScheduler] = field(default_factory=list)
    callback_metrics: dict[str, Any] = field(default_factory=dict)
    logger: ReportLogger = field(default_factory=ReportLogger)
    callbacks: tuple[()] = ()
    progress_bar_callback: None = None
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    num_nodes: int = 1
    testing: bool = False
    predicting: bool = False

    @property
    def estimated_stepping_batches(self) -> int:
        return self.max_steps

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def loggers(self) -> list[ReportLogger]:
        return [self.logger]

    @property
    def num_devices(self) -> int:
        """The number of processes: modules expect that `num_nodes` (1) x `num_devices` is."""
        return self.world_size

    @property
    def logged_metrics(self) -> dict[str, Any]:
        return self.callback_metrics

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in type(self).__slots__:
            raise AttributeError(f"setting trainer.{name}: the trainer's own loop does not support this. {ADVICE}")
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> NoReturn:
        known = ", ".join(_readable_names())
        raise AttributeError(f"trainer.{name}: the trainer's own loop does not support this, only {known}. {ADVICE}")


def _readable_names() -> list[str]:
    properties = [name for name, value in vars(TrainerView).items() if isinstance(value, property)]
    return sorted([*(part.name for part in fields(TrainerView)), *properties])


def overrides(target: object, name: str) -> bool:
    """Returns whether `target` has a method `name` that is not Lightning's own default; False for None."""
    kind: Any = type(target)
    return _overrides(kind, name)


# Every step asks for a dozen hooks.
@cache
def _overrides(kind: Any, name: str) -> bool:
    owner = next((owner for owner in kind.__mro__ if name in vars(owner)), None)
    return owner is not None and owner.__module__.partition(".")[0] not in LIGHTNING


@dataclass
class ModuleSession:
    """A module in training. `data`: the LightningDataModule, or None; `trained`: the last step is done; `remarks`:
    texts for users."""

    module: nn.Module
    data: Any
    view: TrainerView
    log: ModuleLog
    trained: bool = False
    remarks: list[str] = field(default_factory=list)
    _indexed: dict[str, bool] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Returns whether the module has its own hook."""
        return overrides(self.module, name)

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Calls the module's hook; returns None if it does not override the hook."""
        return _call(self.module, name, *arguments, **named) if self.has(name) else None

    def call_both(self, name: str, *arguments: Any) -> None:
        """Calls the data module's hook, then the module's."""
        for target in (self.data, self.module):
            if overrides(target, name):
                _call(target, name, *arguments)

    def data_hook(self, name: str) -> Callable[..., Any] | None:
        """Returns the hook of the data module, or else of the module, as Lightning does; None if neither has it."""
        return next((getattr(target, name) for target in (self.data, self.module) if overrides(target, name)), None)

    def move(self, batch: Batch) -> Batch:
        """Returns the batch after the hooks that move it to the device."""
        with user_code("the hooks of the batch's transfer"):
            if (move := self.data_hook("transfer_batch_to_device")) is not None:
                batch = move(batch, next(self.module.parameters()).device, 0)
            if (after := self.data_hook("on_after_batch_transfer")) is not None:
                batch = after(batch, 0)
        return batch

    def step(self, name: str, batch: Batch, index: int) -> Any:
        """Calls `training_step` or `validation_step`, which may leave out the batch's index."""
        method = getattr(self.module, name)
        if name not in self._indexed:
            self._indexed[name] = takes_index(method)
        with user_code(name):
            return method(batch, index) if self._indexed[name] else method(batch)


def takes_index(step: Callable[..., Any]) -> bool:
    """Returns whether a step takes (batch, batch_idx). Raises UserCodeError for other arguments than a batch."""
    parameters = list(inspect.signature(step).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if not positional or len(needed) > 2:
        name = getattr(step, "__name__", "the step")
        raise only_under_lightning(f"{name} takes ({', '.join(needed)}), not (batch) or (batch, batch_idx)")
    return len(positional) > 1


def _call(target: object, name: str, *arguments: Any, **named: Any) -> Any:
    with user_code(name):
        return getattr(target, name)(*arguments, **named)
