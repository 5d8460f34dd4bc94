"""One LightningModule in training: who has which hook, and how it is called. Made by `module`, used by the rest."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tpu_trainer.errors import UserCodeError, user_code
from tpu_trainer.lightning.logging import Log
from tpu_trainer.lightning.trainer import TrainerView
from tpu_trainer.task import Batch

if TYPE_CHECKING:
    from torch import nn

LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
"""Packages whose own methods are defaults, which do nothing here or speak to a Trainer that is not there."""


def overridden(target: object, name: str) -> bool:
    """Whether `target` has a method `name` that is not Lightning's own default."""
    for owner in type(target).__mro__:
        if name in vars(owner):
            return owner.__module__.partition(".")[0] not in LIGHTNING
    return False


@dataclass
class Session:
    """`data` is the LightningDataModule, or None; `trained`: the last step is done."""

    module: nn.Module
    data: Any
    view: TrainerView
    log: Log
    trained: bool = False
    _known: dict[str, bool] = field(default_factory=dict)
    _indexed: dict[str, bool] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether the module has a hook of its own; looked up once, since every step asks for a dozen."""
        if name not in self._known:
            self._known[name] = overridden(self.module, name)
        return self._known[name]

    def data_has(self, name: str) -> bool:
        return self.data is not None and overridden(self.data, name)

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """The module's hook, None where it has none of its own."""
        if not self.has(name):
            return None
        return _call(self.module, name, *arguments, **named)

    def call_both(self, name: str, *arguments: Any) -> None:
        """The hook of the data module first, then the module's."""
        for target in (self.data, self.module):
            if target is not None and overridden(target, name):
                _call(target, name, *arguments)

    def of_data(self, name: str) -> Callable[..., Any] | None:
        """A hook that the data module has before the module, as Lightning has it; None if neither has."""
        for target in (self.data, self.module):
            if target is not None and overridden(target, name):
                method: Callable[..., Any] = getattr(target, name)
                return method
        return None

    def received(self, batch: Batch) -> Batch:
        """The batch after the hooks that follow its way to the device."""
        if (move := self.of_data("transfer_batch_to_device")) is not None:
            with user_code("transfer_batch_to_device"):
                batch = move(batch, next(self.module.parameters()).device, 0)
        if (after := self.of_data("on_after_batch_transfer")) is not None:
            with user_code("on_after_batch_transfer"):
                batch = after(batch, 0)
        return batch

    def step(self, name: str, batch: Batch, index: int) -> Any:
        """`training_step` or `validation_step`, which may leave out the batch's index."""
        method = getattr(self.module, name)
        if name not in self._indexed:
            self._indexed[name] = takes_index(method)
        with _lightning_code(name):
            return method(batch, index) if self._indexed[name] else method(batch)

    def finish(self) -> None:
        """Nothing will be trained or evaluated any more."""
        self.call("on_fit_end")
        self.call_both("teardown", "fit")


_OF_LOGGERS = (
    "experiment",
    "log_hyperparams",
    "log_image",
    "log_metrics",
    "log_table",
    "log_text",
    "save_dir",
    "watch",
)


class _lightning_code(user_code):  # noqa: N801 - reads as a statement, as user_code does
    """Says of an attribute of the logger that there is none: `None` alone tells nobody whose fault that is."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        if isinstance(error, AttributeError) and error.obj is None and error.name in _OF_LOGGERS:
            error.add_note(
                "self.logger is None: tpu_trainer has no loggers. What self.log is given in an evaluation goes to the "
                "report and to TensorBoard (spec.report); ask `if self.logger:` before using one"
            )
        super().__exit__(kind, error, frames)


def takes_index(step: Callable[..., Any]) -> bool:
    """Whether a step takes (batch, batch_idx).

    Raises:
        UserCodeError: it needs more than these.
    """
    parameters = list(inspect.signature(step).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if not positional or len(needed) > 2:
        name = getattr(step, "__name__", "the step")
        raise UserCodeError(f"{name}: it takes ({', '.join(needed)}), it must take (batch) or (batch, batch_idx)")
    return len(positional) > 1


def _call(target: object, name: str, *arguments: Any, **named: Any) -> Any:
    with _lightning_code(name):
        return getattr(target, name)(*arguments, **named)
