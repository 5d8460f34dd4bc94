"""The exponential moving average of the weights that `recipe.emaDecay` asks for. Updated by `loop`, used by `replica`.

After every step average = decay x average + (1 - decay) x weights, on the device and as a part of the step's own
program. It begins with the weights before the first step. Evaluations see the average in the place of the weights;
buffers, such as the statistics of a batch norm, are the model's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from tpu_trainer.backends.base import Backend


class Average:
    """Of the parameters that are trained; one that is unfrozen later joins with the values of its first step.

    Low-precision weights are averaged in float32: in bfloat16 a step's share of 1 - decay would round to nothing.
    """

    def __init__(self, model: nn.Module, decay: float, backend: Backend) -> None:
        """`model` is on its device, with the weights to begin with."""
        self._parameters = dict(model.named_parameters())
        self._decay, self._backend = decay, backend
        self._held: dict[str, Tensor] = {}
        self.update()
        # Left pending, the copies would be compiled into the first step.
        backend.sync()

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The averages by the name of their parameter, on the device."""
        return self._held

    @torch.no_grad()
    def update(self) -> None:
        """After the optimizer's step."""
        for name, parameter in self._parameters.items():
            held = self._held.get(name)
            if held is not None:
                held.lerp_(parameter.detach().to(held.dtype), 1 - self._decay)
            elif parameter.requires_grad:
                self._held[name] = parameter.detach().to(_precise(parameter.dtype), copy=True)

    @torch.no_grad()
    def load(self, kept: Mapping[str, Tensor]) -> None:
        """Takes back what a checkpoint kept of `tensors`, on the host."""
        for name, value in kept.items():
            self._held[name] = value.to(self._parameters[name].device, copy=True)
        self._backend.sync()

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """The model has the averages for weights while the block lasts. Costs a copy of the weights meanwhile."""
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


def _precise(kind: torch.dtype) -> torch.dtype:
    return torch.float32 if kind in (torch.bfloat16, torch.float16) else kind
