"""Collectives between processes, over torch.distributed; shared by the torch backend and the XLA host backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpu_trainer.contract.errors import PeerLostError
from tpu_trainer.gang.backends.base import as_complex, as_real, flatten, sum_by_dtype

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


class ProcessGroup:
    """The processes of the gang, or this one alone (size 1, no process group, no store).

    Its collectives take tensors on `device`.
    """

    def __init__(self, rank: int, size: int, store: Store | None = None, device: str = "cpu") -> None:
        self.rank = rank
        self.size = size
        self.store = store
        self._device = torch.device(device)

    def sum(self, gradients: Sequence[Tensor], signals: Tensor) -> tuple[list[Tensor], Tensor]:
        """Sums over all processes, as one flat tensor for each dtype."""
        if self.size == 1:
            return list(gradients), signals
        *sums, total = sum_by_dtype([*gradients, signals], self._all_reduce)
        return sums, total

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Overwrites the tensors with rank `source`'s."""
        if self.size > 1:
            with torch.no_grad():
                for tensor in tensors:
                    # A collective needs contiguous values; a parameter may be a transposed view.
                    row = as_real(tensor.detach()).contiguous()
                    self._together(dist.broadcast, row, src=source)
                    tensor.copy_(as_complex(row, tensor))

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Returns all processes' tensors at each index, flat, one after the other in the order of ranks."""
        if self.size == 1:
            return list(parts)
        joined = list(parts)
        for dtype in dict.fromkeys(part.dtype for part in parts):
            indices = [index for index, part in enumerate(parts) if part.dtype == dtype]
            flat = flatten([parts[index] for index in indices])
            rows = torch.empty([self.size, flat.numel()], dtype=dtype, device=flat.device)
            self._together(dist.all_gather_into_tensor, rows.view(-1), flat)
            pieces = torch.split(rows, [parts[index].numel() for index in indices], dim=1)
            for index, piece in zip(indices, pieces, strict=True):
                joined[index] = piece.reshape(-1)
        return joined

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        """Returns every process's row of float32 values, in rank order."""
        if self.size == 1:
            return [list(row)]
        values = torch.tensor(row, dtype=torch.float32, device=self._device)
        rows = [torch.empty_like(values) for _ in range(self.size)]
        self._together(dist.all_gather, rows, values)
        # Read together, because each reading waits for the device.
        table: list[list[float]] = torch.stack(rows).tolist()
        return table

    def barrier(self) -> None:
        if self.size > 1:
            # Read, because a device's collective is only queued when the call returns.
            zero = torch.zeros(1, device=self._device)
            self._together(dist.all_reduce, zero)
            zero.tolist()

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()

    def _all_reduce(self, flat: Tensor) -> Tensor:
        self._together(dist.all_reduce, flat)
        return flat

    def _together(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        # gloo has no error type for a peer that closed its connection.
        try:
            collective(*args, **kwargs)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise PeerLostError(f"a peer went away during a collective: {reason}") from error
