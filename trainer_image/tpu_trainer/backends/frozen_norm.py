"""Batch norm in evaluation mode that gradients pass through, as in a model whose norms are frozen.

torch_xla 2.9 has no backward pass for it: it looks for the statistics of the batch, which only training mode has, and
raises. Here it is written as the multiplication and the addition that it is.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_torchs = functional.batch_norm


def mend_frozen_norms() -> None:
    """Puts `batch_norm` in the place of torch's for this process; other devices compute as before."""
    functional.batch_norm = batch_norm


def batch_norm(
    input: Tensor,  # noqa: A002 -- torch's own name
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalises as `torch.nn.functional.batch_norm` does, whose parameters these are; in float32 for 16-bit inputs."""
    watched = torch.is_grad_enabled() and input.device.type == "xla" and not training
    if not watched or running_mean is None or running_var is None:
        return _torchs(input, running_mean, running_var, weight, bias, training, momentum, eps)
    kind = torch.promote_types(input.dtype, torch.float32)
    scale = (running_var.to(kind) + eps).rsqrt()
    if weight is not None:
        scale = scale * weight.to(kind)
    shift = -running_mean.to(kind) * scale
    if bias is not None:
        shift = shift + bias.to(kind)
    shape = [-1, *[1] * (input.dim() - 2)]
    return (input.to(kind) * scale.view(shape) + shift.view(shape)).to(input.dtype)
