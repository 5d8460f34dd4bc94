"""All that crosses between replicas in a step, as one bucket, so that a step costs one collective.

The bucket is every trainable parameter's gradient in the model's order, then the signals: loss and stop flag; float32.
`loop` fills and empties it; a backend makes it flat (`flatten`, `unflatten`) where its collective needs that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

SIGNALS = 2
"""The values behind the gradients: loss, stop flag."""


def take(parameters: Sequence[nn.Parameter], loss: Tensor, stop: Tensor) -> tuple[list[Tensor], Tensor]:
    """This replica's gradients and its signals, from `loss` (no dimensions) and `stop` (shape [1]).

    The gradients are taken off the parameters: kept alive over a sync they would become outputs of the compiled graph
    (1x the parameters in memory, a fifth of the speed of a small model). A parameter without a gradient counts as
    zero, so that one which only some replicas used is still updated alike in all of them.
    """
    gradients = [
        torch.zeros_like(parameter, dtype=torch.float32) if parameter.grad is None else parameter.grad.float()
        for parameter in parameters
    ]
    for parameter in parameters:
        parameter.grad = None
    return gradients, torch.cat([loss.detach().reshape(1).float(), stop])


def give(sums: Sequence[Tensor], parameters: Sequence[nn.Parameter], world: int) -> None:
    """Makes the summed gradients, divided by `world`, the parameters' own."""
    for parameter, total in zip(parameters, sums, strict=True):
        parameter.grad = (total / world).to(parameter.dtype)


def read(sums: Sequence[Tensor], world: int) -> tuple[list[float], bool]:
    """The global loss of every step, and whether any replica wants to stop, from each step's summed signals."""
    values = torch.stack(list(sums)).tolist()
    return [loss / world for loss, _ in values], any(stop > 0 for _, stop in values)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor with all the elements, in order."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `flatten`: pieces of `flat` in the shapes of `like`."""
    pieces = torch.split(flat, [tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
