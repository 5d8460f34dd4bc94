"""One flat tensor for all that crosses between replicas in a step, so that a step costs one collective.

Layout: every trainable parameter's gradient in the model's order, then the loss, then the stop flag; float32.
Used by `loop` only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

SIGNALS = 2
"""The values behind the gradients: loss, stop flag."""


def pack(parameters: Sequence[nn.Parameter], loss: Tensor, stop: Tensor) -> Tensor:
    """Moves the gradients, with `loss` (no dimensions) and `stop` (shape [1]), into one flat tensor.

    The parameters' own gradients are dropped: kept alive over a sync they would become outputs of the
    compiled graph (1x the parameters in memory, a fifth of the speed of a small model). A parameter without a
    gradient counts as zero, so that one which only some replicas used is still updated alike in all of them.
    """
    pieces = [
        (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).reshape(-1).float()
        for parameter in parameters
    ]
    for parameter in parameters:
        parameter.grad = None
    return torch.cat([*pieces, loss.detach().reshape(1).float(), stop])


def unpack(total: Tensor, parameters: Sequence[nn.Parameter], world: int) -> None:
    """Gives every parameter its part of the summed bucket, divided by `world`, as its gradient."""
    mean = total / world
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, piece in zip(parameters, torch.split(mean[: sum(sizes)], sizes), strict=True):
        parameter.grad = piece.view_as(parameter).to(parameter.dtype)


def signals(sums: Sequence[Sequence[float]], world: int) -> tuple[list[float], bool]:
    """The global loss of every step, and whether any replica wants to stop, from the summed signals."""
    return [loss / world for loss, _ in sums], any(stop > 0 for _, stop in sums)
