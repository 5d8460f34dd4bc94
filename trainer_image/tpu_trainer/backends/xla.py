"""torch_xla: a process per chip on TPU, and the rehearsal of the same loop on CPU hosts.

They differ in how the bucket is summed: chips by the compiled all-reduce; CPU hosts through host memory and gloo,
because XLA's CPU client has no collectives between processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor, nn

from tpu_trainer.backends.base import fill_from_rank_zero, move_model, summed
from tpu_trainer.backends.group import Group
from tpu_trainer.backends.xla_device import XlaDevice
from tpu_trainer.backends.xla_hosts import XlaHosts
from tpu_trainer.errors import BadSpecError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


class XlaHost(XlaHosts):
    """One process per host on XLA's CPU device; the hosts sum their buckets over `group`."""

    one_program = False

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.drawing_rank = group.rank
        self.terms = group.size
        # With peers the sums pass through host memory anyway; alone they stay on the device.
        self.reads_free = group.size > 1

    def reduce_bucket(self, gradients: Sequence[Tensor], signals: Tensor) -> tuple[list[Tensor], Tensor]:
        if self.world == 1:
            return list(gradients), signals
        # Everything pending, not only the bucket: batch statistics left behind would run the forward pass again.
        torch_xla.sync()
        # Made flat on the host, where gloo needs it.
        *hosts, host_signals = self.to_host([*gradients, signals])
        sums, total = self._group.sum_bucket(hosts, host_signals)
        return [self.send(piece) for piece in sums], total


class XlaChip(XlaDevice):
    """One replica per TPU device, in a process that `chips` has started."""

    reads_free = False
    one_program = True

    store: Store | None = None
    """Set by `open_backend`, which can meet the others only when this process knows its place among them."""

    def __init__(self, expected_replicas: int) -> None:
        super().__init__(replicas=xr.addressable_device_count())
        self.rank: int = xr.global_ordinal()
        self.drawing_rank = self.rank
        self.world: int = xr.world_size()
        self.local_rank: int = xr.local_ordinal()
        self.terms = self.world
        if self.world != expected_replicas:
            raise BadSpecError(
                f"slice.replicas: the run spec says {expected_replicas} replicas, PJRT sees {self.world}: accelerator "
                "type and topology of the job do not match the slice that the pods run on"
            )
        self._rank_on_device = self.send(torch.tensor(self.rank))

    def place(self, model: nn.Module) -> None:
        move_model(model, self.device)
        self.broadcast([*model.parameters(), *model.buffers()])

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        # Not xm.broadcast_master_param: it multiplies by 0 or 1, which turns a buffer's -inf into NaN.
        fill_from_rank_zero(tensors, self._rank_on_device, self._all_reduce)
        torch_xla.sync()

    def reduce_bucket(self, gradients: Sequence[Tensor], signals: Tensor) -> tuple[list[Tensor], Tensor]:
        if self.world == 1:
            return list(gradients), signals
        *sums, total = summed([*gradients, signals], self._all_reduce)
        return sums, total

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        if self.world == 1:
            return [list(row)]
        # Made of sums like the broadcast: every process adds a table that is zero but for its own row.
        ranks = self.send(torch.arange(self.world)).unsqueeze(1)
        own = self.send(torch.tensor(row, dtype=torch.float32))
        table = self._all_reduce(torch.where(ranks == self._rank_on_device, own, 0.0).reshape(-1))
        rows: list[list[float]] = self.to_host([table])[0].reshape(self.world, -1).tolist()
        return rows

    def barrier(self) -> None:
        self.to_host([self._all_reduce(self.send(torch.zeros(1)))])

    def close(self) -> None:
        """The runtime ends with the process."""

    def _all_reduce(self, flat: Tensor) -> Tensor:
        total: Tensor = xm.all_reduce(xm.REDUCE_SUM, flat)
        return total
