"""torch_xla: a process per chip on TPU, and the rehearsal of the same loop on CPU hosts.

Both run the one loop with traced graphs and a sync per step. They differ in how the bucket is summed: chips
by the compiled all-reduce; CPU hosts through host memory and gloo, because XLA's CPU client has no
collectives between processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor, nn

from tpu_trainer.backends.base import fill_from_rank_zero, map_tensors, move_model
from tpu_trainer.backends.feed import feed_ahead
from tpu_trainer.backends.group import Group
from tpu_trainer.bucket import flatten, unflatten
from tpu_trainer.errors import BadSpecError


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a host tensor on the device, there at once.

    Not `tensor.to(device)`: with a thread that prepares batches ahead, the number of compilations then varied from run
    to run, as if a sync caught copies not yet made. Replicas whose graphs differ would wait for each other for ever.
    """
    (sent,) = xm.send_cpu_data_to_device([tensor], device)
    result: Tensor = sent
    return result


class XlaHost:
    """One process per host on XLA's CPU device; the hosts sum their buckets over `group`."""

    local_rank = 0

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank = group.rank
        self.world = group.size
        self.device: torch.device = torch_xla.device()
        # With peers the sums pass through host memory anyway; alone they stay on the device.
        self.reads_free = group.size > 1

    def seed(self, seed: int) -> None:
        torch_xla.manual_seed(seed, self.device)

    def place(self, model: nn.Module) -> None:
        # While the model is still in host memory, where gloo works.
        self._group.broadcast([*model.parameters(), *model.buffers()])
        move_model(model, self.device)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        if self.world == 1:
            return
        hosts = [tensor.cpu() for tensor in tensors]
        self._group.broadcast(hosts)
        with torch.no_grad():
            for tensor, host in zip(tensors, hosts, strict=True):
                tensor.copy_(host)

    def to_device(self, batch: Any) -> Any:
        return map_tensors(lambda tensor: _send(tensor, self.device), batch)

    def feed(self, batches: Iterator[Any]) -> AbstractContextManager[Iterator[Any]]:
        return feed_ahead(batches, self.to_device)

    def reduce_bucket(self, gradients: Sequence[Tensor], signals: Tensor) -> tuple[list[Tensor], Tensor]:
        if self.world == 1:
            return list(gradients), signals
        # Everything pending, not only the bucket: batch statistics left behind would run the forward pass again.
        torch_xla.sync()
        # Made flat on the host, where gloo needs it.
        sums, total = self._group.sum_bucket([gradient.cpu() for gradient in gradients], signals.cpu())
        return [_send(piece, self.device) for piece in sums], total

    def sync(self) -> None:
        torch_xla.sync()

    def barrier(self) -> None:
        torch_xla.sync(wait=True)
        self._group.barrier()

    def close(self) -> None:
        self._group.close()


class XlaChip:
    """One replica per TPU device, in a process that `chips` has started."""

    reads_free = False

    def __init__(self, expected_replicas: int) -> None:
        self.rank: int = xr.global_ordinal()
        self.world: int = xr.world_size()
        self.local_rank: int = xr.local_ordinal()
        if self.world != expected_replicas:
            raise BadSpecError(
                f"slice.replicas: the run spec says {expected_replicas} replicas, PJRT sees {self.world}: accelerator "
                "type and topology of the job do not match the slice that the pods run on"
            )
        self.device: torch.device = torch_xla.device()
        self._rank_on_device = torch.tensor(self.rank).to(self.device)

    def seed(self, seed: int) -> None:
        torch_xla.manual_seed(seed, self.device)

    def place(self, model: nn.Module) -> None:
        move_model(model, self.device)
        self.broadcast([*model.parameters(), *model.buffers()])

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        # Not xm.broadcast_master_param: it multiplies by 0 or 1, which turns a buffer's -inf into NaN.
        fill_from_rank_zero(tensors, self._rank_on_device, self._all_reduce)
        torch_xla.sync()

    def to_device(self, batch: Any) -> Any:
        return map_tensors(lambda tensor: _send(tensor, self.device), batch)

    def feed(self, batches: Iterator[Any]) -> AbstractContextManager[Iterator[Any]]:
        return feed_ahead(batches, self.to_device)

    def reduce_bucket(self, gradients: Sequence[Tensor], signals: Tensor) -> tuple[list[Tensor], Tensor]:
        if self.world == 1:
            return list(gradients), signals
        *sums, total = unflatten(self._all_reduce(flatten([*gradients, signals])), [*gradients, signals])
        return sums, total

    def sync(self) -> None:
        torch_xla.sync()

    def barrier(self) -> None:
        self._all_reduce(torch.zeros(1).to(self.device)).cpu()

    def close(self) -> None:
        """The runtime ends with the process."""

    def _all_reduce(self, flat: Tensor) -> Tensor:
        total: Tensor = xm.all_reduce(xm.REDUCE_SUM, flat)
        return total
