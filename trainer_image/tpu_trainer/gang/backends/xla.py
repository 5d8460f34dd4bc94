"""torch_xla's three ways to run: a process per TPU chip, one process per host with SPMD, and a rehearsal on CPU hosts.

They differ in how gradients are summed. Chips use the compiled all-reduce. CPU hosts go through host memory and gloo,
because XLA's CPU client has no collectives between processes. In SPMD mode one program runs over all devices: the model
is replicated and the batch is cut along its first dimension, so XLA's partitioner inserts the all-reduce, and loss,
gradients and batch statistics are the global batch's already.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import Tensor, nn

from tpu_trainer.contract.errors import BadSpecError, UserCodeError
from tpu_trainer.gang.backends.base import fill_from, in_groups, move_model
from tpu_trainer.gang.backends.group import ProcessGroup
from tpu_trainer.gang.backends.xla_device import XlaDevice

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


BUCKET_BYTES = 64 << 20
"""The least that chips sum in one all-reduce: large enough that its latency does not count, small enough that the first
one starts long before the backward pass ends."""


class _XlaHosts(XlaDevice):
    """One process per host; the hosts meet in host memory, over `group`."""

    local_rank = 0

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self._group = group
        self.rank = group.rank
        self.world = group.size
        self.store = group.store

    def place(self, model: nn.Module, source: int = 0) -> None:
        # While the model is still in host memory, where gloo works.
        self._group.broadcast([*model.parameters(), *model.buffers()], source)
        move_model(model, self.device)

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        if self.world == 1:
            return
        for group in in_groups(tensors):
            hosts = self.to_host(group)
            self._group.broadcast(hosts, source)
            with torch.no_grad():
                for tensor, host in zip(group, hosts, strict=True):
                    tensor.copy_(host)

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        return self._group.gather(row)

    def barrier(self) -> None:
        torch_xla.sync()
        # sync(wait=True) only waits until the device has been given its work.
        xm.wait_device_ops()
        self._group.barrier()

    def close(self) -> None:
        self._group.close()


class XlaHost(_XlaHosts):
    """A host on XLA's CPU device."""

    one_program = False

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group)
        self.drawing_rank = group.rank
        self.terms = group.size
        self._rank_on_device = self.send(torch.tensor(group.rank))
        # With peers the sums pass through host memory anyway; alone they stay on the device.
        self.reads_free = group.size > 1

    def reduce(self, gradients: Sequence[Tensor], signals: Tensor) -> tuple[list[Tensor], Tensor]:
        if self.world == 1:
            return list(gradients), signals
        # Everything pending, not only the gradients: batch statistics left behind would run the forward pass again.
        torch_xla.sync()
        *hosts, host_signals = self.to_host([*gradients, signals])
        sums, total = self._group.sum(hosts, host_signals)
        return [self.send(piece) for piece in sums], total

    def part(self, tensor: Tensor) -> Tensor:
        return self.row(tensor, self.world, self._rank_on_device)

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        # Everything pending, as in `reduce`.
        torch_xla.sync()
        return [self.send(joined) for joined in self._group.join(self.to_host(parts))]


class XlaSpmd(_XlaHosts):
    """A host of an SPMD program; each holds an equal part of the batch and of the devices."""

    reads_free = False
    terms = 1
    one_program = True

    def __init__(self, group: ProcessGroup, expected_replicas: int) -> None:
        super().__init__(group)
        # One program draws the numbers of the whole batch, and a device takes its part.
        self.drawing_rank = 0
        devices = xr.global_runtime_device_count()
        _check_replicas(expected_replicas, devices)
        self._local_devices = devices // group.size
        self._mesh = xs.Mesh(np.arange(devices), (devices,), ("data",))

    @staticmethod
    def start(virtual_devices: int | None) -> None:
        """Configures torch_xla; call it before torch_xla starts its client, which reads both settings once.
        `virtual_devices`: their number on hardware CPU."""
        if virtual_devices is not None:
            os.environ["CPU_NUM_DEVICES"] = str(virtual_devices)
        xr.use_spmd()

    def send(self, tensor: Tensor) -> Tensor:
        """Divides rows among the devices; a tensor without rows, or with too few, goes to all of them.

        Raises:
            UserCodeError: with several hosts, rows that cannot be divided: each host has different ones.
        """
        rows = tensor.shape[0] if tensor.dim() else 0
        shared = rows > 0 and rows % self._local_devices == 0
        if rows and not shared and self.world > 1:
            raise UserCodeError(
                f"a batch has a tensor of shape {list(tensor.shape)}; with backend xla-spmd on {self.world} hosts "
                f"its first dimension must be a multiple of the host's {self._local_devices} devices"
            )
        split = ("data" if shared else None, *[None] * (tensor.dim() - 1)) if tensor.dim() else ()
        sharding = xs.ShardingSpec(self._mesh, split, minibatch=shared) if split else None
        (sent,) = xm.send_cpu_data_to_device([tensor], self.device, sharding)
        result: Tensor = sent
        return result

    def numbers(self, values: Sequence[float]) -> Tensor:
        """Returns one row per device, so that each host contributes its own."""
        return self.send(torch.tensor([values] * self._local_devices, dtype=torch.float32))

    def reduce(self, gradients: Sequence[Tensor], signals: Tensor) -> tuple[list[Tensor], Tensor]:
        """Returns its arguments: they already cover the global batch."""
        return list(gradients), signals

    def part(self, tensor: Tensor) -> Tensor:
        raise NotImplementedError("recipe.sharding is refused before the first step")

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        raise NotImplementedError("recipe.sharding is refused before the first step")


class XlaChip(XlaDevice):
    """One replica per TPU device, in its own process (`host`)."""

    reads_free = False
    one_program = True

    store: Store | None = None
    """Set by `open_backend`, which can meet the others only once this process knows its rank."""

    def __init__(self, expected_replicas: int) -> None:
        super().__init__(replicas=xr.addressable_device_count())
        self.rank: int = xr.global_ordinal()
        self.drawing_rank = self.rank
        self.world: int = xr.world_size()
        self.local_rank: int = xr.local_ordinal()
        self.terms = self.world
        _check_replicas(expected_replicas, self.world)
        self._rank_on_device = self.send(torch.tensor(self.rank))

    def place(self, model: nn.Module, source: int = 0) -> None:
        move_model(model, self.device)
        self.broadcast([*model.parameters(), *model.buffers()], source)

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        # Not xm.broadcast_master_param: it multiplies by 0 or 1, which turns a buffer's -inf into NaN.
        for group in in_groups(tensors):
            there = [tensor if tensor.device.type == "xla" else self.send(tensor) for tensor in group]
            fill_from(source, there, self._rank_on_device, self._sum)
            torch_xla.sync()
            hosts = [(tensor, sent) for tensor, sent in zip(group, there, strict=True) if sent is not tensor]
            with torch.no_grad():
                for (tensor, _), value in zip(hosts, self.to_host([sent for _, sent in hosts]), strict=True):
                    tensor.copy_(value)

    def reduce(self, gradients: Sequence[Tensor], signals: Tensor) -> tuple[list[Tensor], Tensor]:
        # In reverse, because the backward pass computes the last layer's gradients first; the signals need all of them.
        total, *sums = reversed(self._sum([*reversed(gradients), signals]))
        return sums, total

    def part(self, tensor: Tensor) -> Tensor:
        return self.row(tensor, self.world, self._rank_on_device)

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        # With a pinned layout torch_xla sums whole tensors that are zero but for one part, which sends twice as much.
        return [xm.all_gather(part, pin_layout=False) for part in parts] if self.world > 1 else list(parts)

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        if self.world == 1:
            return [list(row)]
        # By sums, like the broadcast: every process adds a table that is zero except for its own row.
        ranks = self.send(torch.arange(self.world)).unsqueeze(1)
        values = self.send(torch.tensor(row, dtype=torch.float32))
        table = self._sum([torch.where(ranks == self._rank_on_device, values, 0.0)])
        rows: list[list[float]] = self.to_host(table)[0].tolist()
        return rows

    def barrier(self) -> None:
        self.to_host(self._sum([self.send(torch.zeros(1))]))

    def close(self) -> None:
        """Does nothing: the runtime ends with the process."""

    def _sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums the tensors in place over all replicas.

        Bucket by bucket, so that the compiler can sum the first ones while the backward pass computes the others; and
        as lists, since one flat tensor would be a second copy of all gradients.
        """
        if self.world > 1:
            for bucket in buckets(tensors):
                xm.all_reduce(xm.REDUCE_SUM, bucket)
        return list(tensors)


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups the tensors in order, in lists of BUCKET_BYTES or a little more; the rest joins the last list."""
    bucket: list[Tensor] = []
    size, left = 0, sum(tensor.nbytes for tensor in tensors)
    for tensor in tensors:
        bucket.append(tensor)
        size += tensor.nbytes
        if BUCKET_BYTES <= size <= left - BUCKET_BYTES:
            yield bucket
            bucket, size, left = [], 0, left - size
    if bucket:
        yield bucket


def _check_replicas(expected: int, actual: int) -> None:
    if actual != expected:
        raise BadSpecError(
            f"slice.replicas: the run spec says {expected} replicas, PJRT sees {actual}: accelerator type and topology "
            "of the job do not match the slice that the pods run on"
        )
