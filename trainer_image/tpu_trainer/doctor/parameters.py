"""Do all replicas still hold the same parameters, to the last bit, and are they finite?

Replicas never send each other parameters: they stay equal because equal updates are made to equal values. A difference
of one bit therefore means that some update was not equal, and the difference only grows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor, nn

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """The running statistics of the model's norms, by name. One example can make them infinite with a finite loss,
    since a norm in training divides by what it sees, and they never recover."""
    return {
        f"{name}.{kind}": statistic
        for name, module in model.named_modules()
        for kind in ("running_mean", "running_var")
        if isinstance(statistic := getattr(module, kind, None), Tensor)
    }


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """int32, shape [len(tensors)]: per tensor the sum of its elements' bits, modulo 2**32, on the tensors' device.

    Integer sums do not depend on the order of the terms, so equal bits give equal sums on every machine; a change of
    one element always changes the sum.
    """
    with torch.no_grad():
        return torch.stack([_bits(tensor.detach()).sum(dtype=torch.int32) for tensor in tensors])


def finite(tensors: Sequence[Tensor]) -> Tensor:
    """bool, shape [len(tensors)]: per tensor whether all of its elements are finite, on the tensors' device."""
    with torch.no_grad():
        return torch.stack([torch.isfinite(_testable(tensor.detach())).all() for tensor in tensors])


def digest(sums: Tensor) -> tuple[int, int]:
    """One checksum of the tensors' checksums (in host memory), as two 16-bit halves: float32 holds those exactly."""
    whole = zlib.crc32(sums.numpy().tobytes())
    return whole >> 16, whole & 0xFFFF


def halves(sums: Tensor) -> list[int]:
    """The checksums themselves in 16-bit halves, two per tensor."""
    return [half for value in sums.tolist() for half in (value >> 16 & 0xFFFF, value & 0xFFFF)]


def first_difference(rows: Sequence[Sequence[float]]) -> int:
    """The index of the first tensor whose halves are not equal in all rows."""
    columns = list(zip(*rows, strict=True))
    return next(index for index, column in enumerate(columns) if len(set(column)) > 1) // 2


def _testable(tensor: Tensor) -> Tensor:
    # torch tells no float8 from an infinite one.
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def _bits(tensor: Tensor) -> Tensor:
    """The elements' bits as integers, two of them for one of 64 bits, four for a complex one of 128."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    size = values.element_size()
    if size == 1 and not values.is_floating_point():
        return values.to(torch.int32)
    flat = values.reshape(-1)
    bits = _xla_bitcast(size)(flat) if flat.device.type == "xla" else flat.view(_INTEGERS[size])
    return bits.to(torch.int32)


@cache
def _xla_bitcast(size: int) -> Callable[[Tensor], Tensor]:
    """XLA's own bitcast. torch_xla makes `Tensor.view(dtype)` on the CPU, after a transfer of all parameters."""
    from torch_xla.core import xla_builder, xla_op_registry

    types = xla_builder.Type
    kind = {1: types.U8, 2: types.S16, 4: types.S32, 8: types.S32}[size]
    bitcast: Callable[[Tensor], Tensor] = xla_op_registry.register(f"bits{8 * size}", lambda x: x.bitcast(kind))
    return bitcast
