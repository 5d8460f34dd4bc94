"""All that crosses between replicas in a step, as one bucket, so that a step costs one collective.

The bucket is every trainable parameter's gradient in the model's order, then the signals: loss, stop flag and, where
the gradient noise scale is wanted, the square of this replica's gradient; float32. `loop` sends it round; a backend
makes it flat (`flatten`, `unflatten`) where its collective needs that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from tpu_trainer.backends.base import Backend

SIGNALS = 2
"""The values behind the gradients: loss, stop flag; a third one with the noise scale."""

AfterBackward = Callable[[], None]


def exchange(
    parameters: Sequence[nn.Parameter], loss: Tensor, stop: Tensor, backend: Backend, squares: bool = False
) -> Tensor:
    """Makes every parameter's gradient the mean over all replicas; returns the summed signals, shape [2] or [3].

    No gradient outlives this call but on its parameter: one that is still referred to at a sync becomes an output of
    the compiled graph (1x the parameters in memory, a fifth of the speed of a small model).
    """
    gradients, signals = take(parameters, loss, stop, squares)
    sums, total = backend.reduce_bucket(gradients, signals)
    give(sums, parameters, backend.terms)
    return total


def take(
    parameters: Sequence[nn.Parameter], loss: Tensor, stop: Tensor, squares: bool = False
) -> tuple[list[Tensor], Tensor]:
    """This replica's gradients and its signals, from `loss` (no dimensions) and `stop` (Backend.flag).

    The gradients are taken off the parameters. A parameter without a gradient counts as zero, so that one which only
    some replicas used is still updated alike in all of them.
    """
    gradients = [
        torch.zeros_like(parameter, dtype=torch.float32) if parameter.grad is None else parameter.grad.float()
        for parameter in parameters
    ]
    for parameter in parameters:
        parameter.grad = None
    signals = [loss.detach().reshape(1).float(), stop.sum().reshape(1)]
    if squares:
        signals.append(square(gradients).reshape(1))
    return gradients, torch.cat(signals)


def give(sums: Sequence[Tensor], parameters: Sequence[nn.Parameter], terms: int) -> None:
    """Makes the summed gradients, divided by `terms`, the parameters' own."""
    for parameter, total in zip(parameters, sums, strict=True):
        mean = total / terms if terms > 1 else total
        parameter.grad = mean.to(parameter.dtype)


def square(gradients: Sequence[Tensor]) -> Tensor:
    """The squared length of all gradients together; no dimensions."""
    return torch.stack([gradient.detach().float().square().sum() for gradient in gradients]).sum()


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor with all the elements, in order."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `flatten`: pieces of `flat` in the shapes of `like`."""
    pieces = torch.split(flat, [tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
