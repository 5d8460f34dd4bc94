"""Collectives on tensors that Lightning and torchmetrics need, made of the one that every backend has: a sum.

A replica adds a table that is zero but for its own row. What a row holds is data on the device, and so is the rank: a
number would be compiled in, and the replicas would run different programs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpu_trainer.gang.backends.base import Backend, as_complex, as_real


def total(tensor: Tensor, backend: Backend) -> Tensor:
    """The sum over all replicas; a collective."""
    if backend.terms == 1:
        return tensor
    # A copy: a chip sums in place, and the tensor is the module's.
    carried = _carried(tensor).clone()
    (summed,), _ = backend.reduce([carried], backend.to_device(torch.zeros(1)))
    return _as(summed, tensor)


def table(tensor: Tensor, backend: Backend) -> Tensor:
    """Every replica's tensor, in rank order; all are of the same shape. Shape [replicas, *shape]; a collective."""
    if backend.terms == 1:
        return tensor.unsqueeze(0)
    carried = _carried(tensor)
    ranks, own = backend.to_device(torch.arange(backend.terms)), backend.to_device(torch.tensor(backend.rank))
    here = (ranks == own).reshape(-1, *[1] * carried.dim())
    rows = torch.where(here, carried.unsqueeze(0), torch.zeros_like(carried).unsqueeze(0))
    (summed,), _ = backend.reduce([rows], backend.to_device(torch.zeros(1)))
    return _as(summed, tensor)


def pieces(tensor: Tensor, backend: Backend) -> list[Tensor]:
    """Every replica's tensor, in rank order; the first dimensions may differ. Two collectives."""
    if backend.terms == 1:
        return [tensor]
    if tensor.dim() == 0:
        return list(table(tensor, backend).unbind())
    # A replica that has seen nothing has a tensor without rows, and without the others' shape behind them.
    shapes = [[int(size) for size in row] for row in backend.gather(_described(tensor))]
    rows = max(shape[1] for shape in shapes)
    behind = next((shape for shape in shapes if shape[1]), shapes[0])
    rest = behind[2 : 1 + behind[0]]
    padded = tensor.new_zeros((rows, *rest))
    if tensor.numel():
        padded[: tensor.shape[0]] = tensor
    return [row[: shape[1]] for row, shape in zip(table(padded, backend).unbind(), shapes, strict=True)]


class Gathered(torch.autograd.Function):
    """`table` with gradients: a replica's tensor gets the sum of the gradients that all replicas have for it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, backend: Backend) -> Tensor:
        ctx.backend = backend
        return table(tensor, backend)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        backend: Backend = ctx.backend
        summed = total(gradient, backend)
        own = backend.to_device(torch.tensor([backend.rank if backend.terms > 1 else 0]))
        return summed.index_select(0, own).squeeze(0), None


_DIMENSIONS = 8


def _described(tensor: Tensor) -> list[float]:
    sizes = [float(size) for size in tensor.shape]
    return [float(tensor.dim()), *sizes, *[0.0] * (_DIMENSIONS - len(sizes))]


def _carried(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.bool:
        return tensor.to(torch.int32)
    real = as_real(tensor.detach())
    return real.float() if real.dtype in (torch.float16, torch.bfloat16) else real


def _as(real: Tensor, like: Tensor) -> Tensor:
    return as_complex(real, like).to(like.dtype)
