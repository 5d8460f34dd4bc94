"""Collectives between host processes, over torch.distributed; shared by the torch backend and the CPU rehearsal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpu_trainer.bucket import flatten, unflatten
from tpu_trainer.errors import PeerLostError


class Group:
    """The hosts of the job, or this host alone (size 1, no process group). Tensors are the group's device's."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def sum_bucket(self, gradients: Sequence[Tensor], signals: Tensor) -> tuple[list[Tensor], Tensor]:
        """Sums over all hosts, as one flat tensor."""
        if self.size == 1:
            return list(gradients), signals
        flat = flatten([*gradients, signals])
        self._together(dist.all_reduce, flat)
        *sums, total = unflatten(flat, [*gradients, signals])
        return sums, total

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrites the tensors with rank 0's."""
        if self.size > 1:
            with torch.no_grad():
                for tensor in tensors:
                    # A collective needs the values in a row; a parameter may be a transposed view.
                    row = tensor.detach().contiguous()
                    self._together(dist.broadcast, row, src=0)
                    tensor.copy_(row)

    def barrier(self) -> None:
        if self.size > 1:
            self._together(dist.all_reduce, torch.zeros(1))

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()

    def _together(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        # gloo has no error type of its own for a peer that closed its connection.
        try:
            collective(*args, **kwargs)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise PeerLostError(f"a peer went away during a collective: {reason}") from error
