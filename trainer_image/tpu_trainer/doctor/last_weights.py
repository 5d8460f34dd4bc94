"""A checksum of all weights, to prove that those evaluated, saved and passed on are the same.

It is computed on the device, so that only a few numbers are read. Every element's bits are mixed with its index before
they are added up, so scaled, negated or exchanged values change the sum. Integer sums do not depend on the order of
the terms, so equal weights have equal checksums on every machine and slice.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tpu_trainer.contract.errors import user_code
from tpu_trainer.doctor.agreement import bits
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.gang.gather import gather_whole

_PIECE = 1 << 22
"""Elements that are mixed at once where every operation allocates a tensor."""


@dataclass
class Closing:
    """What a checkpoint keeps about the end of its training. ended: the hooks of the end have changed its weights, and
    must not do so again. weights: their checksum."""

    ended: bool = False
    weights: str = ""

    def state(self) -> dict[str, Any]:
        return {"ended": self.ended, "weights": self.weights}


def checksum_of(model: nn.Module, average: Mapping[str, Tensor], backend: Backend) -> str:
    """Returns the checksum of rank 0's weights, buffers and averaged weights, in every process; a collective."""
    with user_code("the model's state_dict()"):
        state: Mapping[str, Any] = model.state_dict(keep_vars=True)
    # A run without checkpoints may have a state that no checkpoint could hold.
    values = [value for named in (state, average) for value in named.values() if isinstance(value, Tensor)]
    tensors = [value.detach() for value in values if value.layout is torch.strided]
    if not tensors:
        return ""
    with torch.no_grad():
        # Lightning leaves a metric's state on the host.
        checksums = torch.stack([tensor_checksum(tensor).to(backend.device) for tensor in tensors])
    # Pending work belongs to no step and must not be compiled into one.
    backend.sync()
    (sums,) = backend.to_host([checksums])
    (first, *_) = gather_whole([zlib.crc32(sums.numpy().tobytes())], backend)
    return f"{first[0]:08x}"


def tensor_checksum(tensor: Tensor) -> Tensor:
    """Returns a checksum of one tensor: int32, shape [], on its device."""
    flat = bits(tensor.detach()).reshape(-1)
    piece = max(1, flat.numel()) if flat.device.type == "xla" else _PIECE
    sums = [_sum(flat[start : start + piece], start) for start in range(0, flat.numel(), piece)]
    return torch.stack(sums).sum(dtype=torch.int32) if sums else flat.new_zeros((), dtype=torch.int32)


def _sum(values: Tensor, start: int) -> Tensor:
    """Adds up the values, the elements from `start` on, after an invertible mixer (lowbias32, Wellons 2018)."""
    places = torch.arange(start, start + values.numel(), dtype=torch.int32, device=values.device)
    mixed = values + places * -0x61C88647
    for shift, factor in ((16, 0x7FEB352D), (15, -0x7B935975), (16, 1)):
        mixed = (mixed ^ (mixed >> shift & (1 << 32 - shift) - 1)) * factor
    return mixed.sum(dtype=torch.int32)
