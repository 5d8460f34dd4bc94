"""`python -m tpu_trainer` for the process-per-chip path, on XLA's CPU device in place of chips.

XLA:CPU pairs up replicas for a collective by the module's own id unless the operation has a channel id, and
xm.all_reduce gives it none; every replica compiles its own module, so they never meet and XLA aborts after ten
seconds. The binding used here emits the same HLO all-reduce with a channel id. Ten seconds are also little for
eight replicas that trace and compile at once on two cores: so they wait for each other at every sync, then take turns,
and all but the first find the program compiled. Nothing else is replaced: launch, ordinals, placement, broadcast, the
loop and the buckets are those of a TPU run. A host that was forked itself forks the process of its replicas.

The patches apply on import, because the started processes import this module again.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import threading

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor

from tests.trainer.fork_server import FORKS_REPLICAS
from tpu_trainer.gang.backends.base import sum_by_dtype
from tpu_trainer.worker.entry import main


def all_reduce_on_cpu(kind: str, tensors: list[Tensor]) -> None:
    """The one form in which the trainer calls xm.all_reduce: sums of several tensors over all replicas, in place.

    XLA's CPU device takes one flat tensor at a time.
    """

    def flat_sum(flat: Tensor) -> Tensor:
        return torch_xla._XLAC._xla_spmd_all_reduce(kind, flat, 1.0, [list(range(xr.world_size()))])

    with torch.no_grad():
        for tensor, total in zip(tensors, sum_by_dtype(tensors, flat_sum), strict=True):
            tensor.copy_(total)


def all_gather_on_cpu(row: Tensor, *, pin_layout: bool) -> Tensor:
    """The one form in which the trainer calls xm.all_gather: rows [n], one after the other. Made of sums."""
    assert not pin_layout
    # Sent as data: 0 and 1 would be constants, and the replicas' programs would differ.
    ranks, own = xm.send_cpu_data_to_device(
        [torch.arange(xr.world_size()), torch.tensor([xr.global_ordinal()])], row.device
    )
    table = torch.where((ranks == own).unsqueeze(1), row, torch.zeros_like(row))
    all_reduce_on_cpu(xm.REDUCE_SUM, [table])
    return table.reshape(-1)


class Turns:
    """torch_xla.sync once all replicas have come to theirs, one replica at a time.

    Every sync has a meeting and a lock of its own: a replica at its next one waits for the one before to be executed,
    which needs the others to come.
    """

    def __init__(self) -> None:
        self._sync = torch_xla.sync
        self._guard = threading.Lock()
        self._turns: dict[int, tuple[threading.Barrier, threading.Lock]] = {}
        self._replica = threading.local()

    def __call__(self) -> None:
        count = self._replica.__dict__.setdefault("count", itertools.count())
        with self._guard:
            everyone, turn = self._turns.setdefault(next(count), (threading.Barrier(xr.world_size()), threading.Lock()))
        everyone.wait()
        with turn:
            self._sync()


xm.all_reduce = all_reduce_on_cpu
xm.all_gather = all_gather_on_cpu
torch_xla.sync = Turns()
if FORKS_REPLICAS in os.environ:
    torch_xla.launch = functools.partial(torch_xla.launch, start_method="fork")

if __name__ == "__main__":
    sys.exit(main())
