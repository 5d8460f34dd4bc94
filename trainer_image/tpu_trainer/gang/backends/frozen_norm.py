"""Norms with running statistics in evaluation mode that gradients pass through, as in a model whose norms are frozen.

torch_xla 2.9 has no backward pass for them: it looks for the statistics of the batch, which only training mode has, and
raises. Here they are written as the multiplication and the addition that they are. That replaces the operation, not a
function of torch's: batch norm and instance norm, their modules and whatever calls them come down to it.
"""

from __future__ import annotations

from functools import cache
from threading import Lock

import torch
from torch import Tensor

_replacing = Lock()


def mend_frozen_norms() -> None:
    """Puts `batch_norm` in the place of torch's for this process; other devices compute as before."""
    # Replicas may be threads of one process.
    with _replacing:
        _replaced()


@cache
def _replaced() -> torch.library.Library:
    """Replaces the operation for as long as what is returned lives."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("batch_norm", batch_norm, "AutogradXLA")  # type: ignore[no-untyped-call]
    return library


def batch_norm(
    input: Tensor,  # noqa: A002 -- torch's own name
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Normalises as `torch.batch_norm` does, whose parameters these are; in float32 for 16-bit inputs."""
    if training or running_mean is None or running_var is None or not torch.is_grad_enabled():
        args = (input, weight, bias, running_mean, running_var, training, momentum, eps)
        normed: Tensor = torch.native_batch_norm(*args)[0]
        return normed
    kind = torch.promote_types(input.dtype, torch.float32)
    scale = (running_var.to(kind) + eps).rsqrt()
    if weight is not None:
        scale = scale * weight.to(kind)
    shift = -running_mean.to(kind) * scale
    if bias is not None:
        shift = shift + bias.to(kind)
    shape = [-1, *[1] * (input.dim() - 2)]
    return (input.to(kind) * scale.view(shape) + shift.view(shape)).to(input.dtype)
