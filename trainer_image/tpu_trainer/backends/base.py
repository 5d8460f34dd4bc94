"""What the loop needs from the machinery below it, and the two helpers all backends share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Backend(Protocol):
    """One process's place in the gang. All collectives are called by every process, in the same order.

    rank, world: this process among all; each holds an equal part of the global batch.
    local_rank: this process among those of its host.
    device: where the model lives.
    reads_free: reading the tail of a reduced bucket costs no wait for the device.
    """

    rank: int
    world: int
    local_rank: int
    device: torch.device
    reads_free: bool

    def seed(self, seed: int) -> None:
        """Seeds the device's own random generator, where it has one."""

    def place(self, model: nn.Module) -> None:
        """Moves the model to the device, in place, with rank 0's parameters and buffers in every process."""

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrites tensors on the device with rank 0's values."""

    def to_device(self, batch: Any) -> Any:
        """The batch with every tensor in it moved to the device."""

    def reduce_bucket(self, flat: Tensor, tail: int) -> tuple[Tensor, Tensor]:
        """Sums a flat tensor over all processes.

        Returns the sum on the device, and its last `tail` elements where reading them is cheapest.

        Raises:
            PeerLostError: a peer went away.
        """

    def sync(self) -> None:
        """The end of a step: what has been traced so far is sent to the device."""

    def barrier(self) -> None:
        """Returns when every process has come here, its device's work done."""

    def close(self) -> None:
        """Leaves the gang."""


def to_device(batch: Any, device: torch.device) -> Any:
    """Moves the tensors in nested lists, tuples (named ones too) and mappings; the rest stays as it is."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


def move_model(model: nn.Module, device: torch.device) -> None:
    """`model.to(device)` that keeps shared weights shared.

    Moving to XLA replaces Parameter objects module by module, so a weight used in two places becomes two
    weights that drift apart.
    """
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(id(parameter), []).append((module, name))
    model.to(device)
    for (first, first_name), *others in holders.values():
        for module, name in others:
            setattr(module, name, getattr(first, first_name))


def fill_from_rank_zero(tensors: Sequence[Tensor], rank: Tensor, all_reduce: Callable[[Tensor], Tensor]) -> None:
    """A broadcast made of sums, for devices whose one collective is the all-reduce: all but rank 0 add zeros.

    `rank` is data on the device, not a number: a number would be compiled in, and the processes would run
    different programs. Zeros are chosen and not multiplied in, since a mask of -inf times 0 is NaN. One sum
    per dtype; booleans travel as integers.
    """
    with torch.no_grad():
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            carrier = torch.int32 if dtype == torch.bool else dtype
            flat = torch.cat([tensor.reshape(-1).to(carrier) for tensor in same])
            total = all_reduce(torch.where(rank == 0, flat, torch.zeros_like(flat)))
            for tensor, piece in zip(same, torch.split(total, [tensor.numel() for tensor in same]), strict=True):
                tensor.copy_(piece.view_as(tensor).to(dtype))
