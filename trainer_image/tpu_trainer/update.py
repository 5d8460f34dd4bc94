"""The update of a step: the optimizer's step and the moving average of the weights, and which of them count.

With recipe.onNotFinite: Skip, a step whose loss or gradients are not finite leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tpu_trainer.backends.base import Backend
from tpu_trainer.errors import UserCodeError, user_code
from tpu_trainer.exchange import Sums
from tpu_trainer.hooks import Hooks
from tpu_trainer.in_place import quickly
from tpu_trainer.steady import SteadyNumbers

if TYPE_CHECKING:
    from torch.optim import Optimizer


class Average:
    """The exponential moving average of the weights (recipe.emaDecay), on the device, in the step's own program.

    average = decay x average + (1 - decay) x weights after every step; it starts as the weights before the first step.
    Evaluations use it in place of the weights; buffers, such as batch norm's statistics, stay the model's own. Only
    trained parameters have one; a parameter that is unfrozen later joins with the values of its first step.
    Low-precision weights are averaged in float32: in bfloat16 a step's share of 1 - decay would round to nothing.
    """

    def __init__(self, model: nn.Module, decay: float, backend: Backend) -> None:
        """`model` is on its device, with its initial weights."""
        self._parameters = dict(model.named_parameters())
        self._decay, self._backend = decay, backend
        self._held: dict[str, Tensor] = {}
        self.update()
        # Left pending, the copies would be compiled into the first step.
        backend.sync()

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The averages by parameter name, on the device."""
        return self._held

    @torch.no_grad()
    def update(self) -> None:
        """After the optimizer's step."""
        for name, parameter in self._parameters.items():
            held = self._held.get(name)
            if held is not None:
                now = parameter.detach().to(held.dtype)
                quickly(Tensor.lerp_, (held, now, 1 - self._decay), {})
            elif parameter.requires_grad:
                self._held[name] = parameter.detach().to(_precise(parameter.dtype), copy=True)

    @torch.no_grad()
    def load(self, kept: Mapping[str, Tensor]) -> None:
        """Restores `tensors` from a checkpoint's, which are on the host, or on the meta device if their
        values come later."""
        for name, value in kept.items():
            here = torch.empty_like(value, device="cpu") if value.is_meta else value
            self._held[name] = here.to(self._parameters[name].device, copy=True)
        self._backend.sync()

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """The model's weights are the averages inside the block, at the cost of a copy of the weights."""
        own = {name: self._parameters[name].detach().clone() for name in self._held}
        try:
            self._fill(self._held)
            yield
        finally:
            self._fill(own)

    @torch.no_grad()
    def _fill(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self._parameters[name].copy_(value)
        self._backend.sync()


class Update:
    """The update of every step: all of them count.

    `clip_norm`: gradients are scaled down to this length; None: they are not clipped.
    """

    def __init__(
        self, optimizer: Optimizer, hooks: Hooks, average: Average | None, clip_norm: float | None, backend: Backend
    ) -> None:
        self._optimizer, self._hooks, self._average, self._clip_norm = optimizer, hooks, average, clip_norm
        self._backend = backend
        traced = backend.device.type == "xla"
        self._numbers: AbstractContextManager[Any] = SteadyNumbers() if traced else nullcontext()

    def begins(self) -> None:
        """Before the step's first forward pass."""

    def make(self, parameters: Sequence[nn.Parameter], sums: Sums) -> None:
        """`parameters`: those that the step trains. `sums`: what the replicas have exchanged."""
        self._step(parameters, sums)

    def _step(self, parameters: Sequence[nn.Parameter], sums: Sums) -> None:
        with user_code("the optimizer's step"):
            self._hooks.before_update(self._optimizer)
            if self._clip_norm is not None:
                clip(parameters, sums, self._clip_norm)
            with self._numbers:
                self._hooks.update(self._optimizer)
        if self._average is not None:
            self._average.update()


class SkippingUpdate(Update):
    """Undoes steps that are not finite. All replicas decide alike, because they have the same sums.

    The host must not wait for the device in every step. So on a device that works ahead the step is always made, and
    the device then chooses between old and new values. Only when a step trains a parameter for the first time does the
    host wait: that step creates the optimizer's state, so there are no old values.

    What a skipped step leaves unchanged: parameters and their average, the optimizer's state in tensors on the device
    (`count_on_device` moves torch's step counts there), and the model's buffers, which the forward pass has changed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        hooks: Hooks,
        average: Average | None,
        clip_norm: float | None,
        backend: Backend,
        model: nn.Module,
        aside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`aside`: a context for work that belongs to no step."""
        super().__init__(optimizer, hooks, average, clip_norm, backend)
        self._model, self._aside = model, aside
        self._begun: list[tuple[Tensor, Tensor]] = []
        self._known: set[nn.Parameter] = set()

    def begins(self) -> None:
        self._begun = _copies(self._model.buffers())

    def make(self, parameters: Sequence[nn.Parameter], sums: Sums) -> None:
        buffers, self._begun = self._begun, []
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        if self._backend.device.type == "cpu" or not self._known.issuperset(trained):
            if self._read(sums.finite(self._backend)):
                self._step(parameters, sums)
                self._known.update(trained)
            else:
                _put_back(buffers)
            return
        finite = sums.finite(self._backend)
        with torch.no_grad():
            for parameter in trained:
                assert parameter.grad is not None
                parameter.grad = torch.where(finite, parameter.grad, torch.zeros_like(parameter.grad))
        before = [old for _, old in _copies([*trained, *self._state()])]
        self._step(parameters, sums)
        now = [*trained, *self._state()]
        if len(now) != len(before):
            raise UserCodeError(
                f"recipe.onNotFinite: Skip cannot undo a step of {type(self._optimizer).__name__}: the number of "
                "tensors in its state changes from step to step; use Stop or Warn"
            )
        with torch.no_grad():
            for tensor, old in [*zip(now, before, strict=True), *buffers]:
                tensor.copy_(torch.where(finite, tensor, old))

    def _read(self, finite: Tensor) -> bool:
        with self._aside():
            # Sync everything pending, not only this value, or the passes behind it would run a second time.
            self._backend.sync()
            (here,) = self._backend.to_host([finite])
        return bool(here)

    def _state(self) -> Iterator[Tensor]:
        for tensor in tensors_in(list(self._optimizer.state.values())):
            if tensor.device.type == self._backend.device.type:
                yield tensor
        if self._average is not None:
            yield from self._average.tensors.values()


@torch.no_grad()
def clip(parameters: Sequence[nn.Parameter], sums: Sums, limit: float) -> None:
    """Scales the exchanged gradients so that they are no longer than `limit` together.

    As torch.nn.utils.clip_grad_norm_ does, but by the length that the exchange has measured, and without a read of the
    device. A length that is not finite makes all gradients so.
    """
    factor = (limit / (sums.norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            quickly(Tensor.mul_, (parameter.grad, factor.to(parameter.grad.dtype)), {})


def count_on_device(optimizer: Optimizer, device: torch.device) -> None:
    """Makes torch's own optimizers keep their step counts on the device, where a skipped step can be undone."""
    if device.type not in ("xla", "cuda", "xpu", "tpu"):
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


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested mappings, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def _precise(kind: torch.dtype) -> torch.dtype:
    return torch.float32 if kind in (torch.bfloat16, torch.float16) else kind
