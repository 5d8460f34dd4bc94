"""The optimizer's step. With recipe.onNotFinite: Skip, one whose loss or gradients are not finite leaves no trace.

The host must not wait for the device in every step to learn whether this one counts. So on a device that works ahead
the step is always made, and what it changed is chosen afterwards, on the device, from the old and the new values. Only
in a step that trains a parameter for the first time does the host wait: the optimizer makes its state in it, and there
are no old values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tpu_trainer import bucket
from tpu_trainer.backends.base import Backend
from tpu_trainer.errors import UserCodeError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from tpu_trainer.average import Average


class Update:
    """Makes every step's update; this one makes all of them."""

    def begins(self) -> None:
        """Before the step's first forward pass."""

    def make(self, step: Callable[[], None], parameters: Sequence[nn.Parameter], signals: Tensor) -> None:
        """`step`: the optimizer's, with whatever belongs to it. `parameters`: those it trains. `signals`: summed."""
        step()


class SkippingUpdate(Update):
    """Leaves out the steps that are not `bucket.sound`. All replicas do alike, for they have the same sums.

    What stays as it was: parameters and their average, the optimizer's state as far as it is tensors on the parameters'
    device (`count_on_device` brings torch's step counts there), and the model's buffers, which the forward pass has
    changed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        average: Average | None,
        backend: Backend,
        aside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`aside`: around what belongs to no step."""
        self._model, self._optimizer, self._average = model, optimizer, average
        self._backend, self._aside = backend, aside
        self._begun: list[tuple[Tensor, Tensor]] = []
        self._known: set[nn.Parameter] = set()

    def begins(self) -> None:
        self._begun = _copies(self._model.buffers())

    def make(self, step: Callable[[], None], parameters: Sequence[nn.Parameter], signals: Tensor) -> None:
        buffers, self._begun = self._begun, []
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        if self._backend.device.type == "cpu" or not self._known.issuperset(trained):
            if self._read(bucket.sound(signals)):
                step()
                self._known.update(trained)
            else:
                _put_back(buffers)
            return
        sound = bucket.sound(signals)
        # Where the sums pass through host memory: as a number of the host it would be compiled in.
        sound = sound if sound.device.type == self._backend.device.type else self._backend.to_device(sound)
        with torch.no_grad():
            for parameter in trained:
                assert parameter.grad is not None
                parameter.grad = torch.where(sound, parameter.grad, torch.zeros_like(parameter.grad))
        before = [old for _, old in _copies([*trained, *self._state()])]
        step()
        now = [*trained, *self._state()]
        if len(now) != len(before):
            raise UserCodeError(
                f"recipe.onNotFinite: Skip cannot take back a step of {type(self._optimizer).__name__}: the number of "
                "tensors in its state changes from step to step; use Stop or Warn"
            )
        with torch.no_grad():
            for tensor, old in [*zip(now, before, strict=True), *buffers]:
                tensor.copy_(torch.where(sound, tensor, old))

    def _read(self, sound: Tensor) -> bool:
        with self._aside():
            # Everything pending, not only this value: the passes behind it would be run once more.
            self._backend.sync()
            (here,) = self._backend.to_host([sound])
        return bool(here)

    def _state(self) -> Iterator[Tensor]:
        for tensor in _tensors(list(self._optimizer.state.values())):
            if tensor.device.type == self._backend.device.type:
                yield tensor
        if self._average is not None:
            yield from self._average.tensors.values()


def update_of(
    skips: bool,
    model: nn.Module,
    optimizer: Optimizer,
    average: Average | None,
    backend: Backend,
    aside: Callable[[], AbstractContextManager[None]],
) -> Update:
    return SkippingUpdate(model, optimizer, average, backend, aside) if skips else Update()


def count_on_device(optimizer: Optimizer, device: torch.device) -> None:
    """Has torch's own optimizers keep their step counts on the device, where a skipped step can be taken back."""
    if device.type not in ("xla", "cuda", "xpu"):
        return
    for options in (optimizer.defaults, *optimizer.param_groups):
        if "capturable" in options:
            options["capturable"] = True


def _copies(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Each tensor with a copy of its present values."""
    return [(tensor, tensor.detach().clone()) for tensor in tensors]


def _put_back(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for tensor, old in copies:
            tensor.copy_(old)


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
