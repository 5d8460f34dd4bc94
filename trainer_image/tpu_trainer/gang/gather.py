"""What every process has: whether it is the same, and the tensors of all in the order of ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tpu_trainer.gang.backends.base import Backend, as_complex, as_real

EXACT = 2**24
"""Whole numbers below it are exact in float32, which a gather carries."""


def checksum(data: bytes) -> float:
    """Returns a checksum of the data, which a gather carries exactly."""
    return float(zlib.crc32(data) % EXACT)


def gather_whole(numbers: Iterable[int], backend: Backend) -> list[list[int]]:
    """Returns every process's whole numbers, exactly, in rank order; a collective."""
    rows = backend.gather([float(part) for number in numbers for part in divmod(number, EXACT)])
    return [[int(high) * EXACT + int(low) for high, low in zip(row[::2], row[1::2], strict=True)] for row in rows]


def is_shared(text: str, backend: Backend) -> bool:
    """Returns whether all processes have this text; a collective."""
    return len({row[0] for row in backend.gather([checksum(text.encode())])}) == 1


def total(tensor: Tensor, backend: Backend) -> Tensor:
    """Returns the sum over all replicas; a collective."""
    if backend.terms == 1:
        return tensor
    real = as_real(tensor.detach())
    if real.dtype in (torch.float16, torch.bfloat16):
        real = real.float()
    # A copy, since a chip sums in place and the tensor is the module's.
    (summed,), _ = backend.reduce([real.clone()], backend.to_device(torch.zeros(1)))
    return as_complex(summed, tensor).to(tensor.dtype)


def table(tensor: Tensor, backend: Backend) -> Tensor:
    """Returns every replica's tensor in rank order, of shape [replicas, *shape]; all shapes are equal. A collective."""
    if backend.terms == 1:
        return tensor.unsqueeze(0)
    real = as_real(tensor.detach())
    if not real.numel():
        return tensor.new_zeros((backend.terms, *tensor.shape))
    (joined,) = backend.join([real.reshape(-1)])
    return as_complex(joined.reshape(backend.terms, *real.shape), tensor)


def pieces(tensor: Tensor, backend: Backend) -> list[Tensor]:
    """Returns every replica's tensor in rank order; the first dimensions may differ. Two collectives."""
    if backend.terms == 1:
        return [tensor]
    # By way of the host: a tensor that was just reset is a constant, and the replicas' programs would differ.
    tensor = backend.to_device(backend.to_host([tensor])[0])
    if tensor.dim() == 0:
        return list(table(tensor, backend).unbind())
    # The tensor of a replica that has seen nothing has no rows, and its other dimensions may be missing.
    shapes = [[int(size) for size in row] for row in backend.gather(_shape_row(tensor))]
    rows = max(shape[1] for shape in shapes)
    full = next((shape for shape in shapes if shape[1]), shapes[0])
    rest = full[2 : 1 + full[0]]
    padded = tensor.new_zeros((rows, *rest))
    if tensor.numel():
        padded[: tensor.shape[0]] = tensor
    return [row[: shape[1]] for row, shape in zip(table(padded, backend).unbind(), shapes, strict=True)]


class DifferentiableTable(torch.autograd.Function):
    """`table` with gradients: the gradient of a replica's tensor is the sum of all replicas' gradients for it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, backend: Backend) -> Tensor:
        ctx.backend = backend
        return table(tensor, backend)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        backend: Backend = ctx.backend
        summed = total(gradient, backend)
        # Data on the device: as a number it would be compiled in, and the replicas would run different programs.
        row = backend.to_device(torch.tensor([backend.rank if backend.terms > 1 else 0]))
        return summed.index_select(0, row).squeeze(0), None


_DIMENSIONS = 8


def _shape_row(tensor: Tensor) -> list[float]:
    """Returns the number of dimensions and the sizes, as a row of fixed length."""
    sizes = [float(size) for size in tensor.shape]
    return [float(tensor.dim()), *sizes, *[0.0] * (_DIMENSIONS - len(sizes))]
