"""One process in the place of a whole gang, in which every other process does exactly what this one does.

So a single process on a CPU runs replica 0 of any slice: with its part of every global batch, and with sums and means
over all replicas, which are its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpu_trainer.contract.environment import WorkerEnvironment
from tpu_trainer.contract.spec import RunSpec
from tpu_trainer.contract.stop import StopFlag
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.gang.backends.group import ProcessGroup


class SoloGroup(ProcessGroup):
    """Collectives whose other members have the values of this one."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)

    def sum(self, gradients: Sequence[Tensor], signals: Tensor) -> tuple[list[Tensor], Tensor]:
        return [gradient * self.size for gradient in gradients], signals * self.size

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """All have the same values."""

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [part.repeat(self.size) for part in parts]

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        return [[float(value) for value in row] for _ in range(self.size)]

    def barrier(self) -> None:
        """All have come."""

    def close(self) -> None:
        """Nothing was opened."""


def open_solo(spec: RunSpec, _: WorkerEnvironment, __: StopFlag) -> Backend:
    """Replica 0 of the run spec's slice, on this machine's CPU."""
    group = SoloGroup(spec.slice.replicas)
    if spec.backend == "torch":
        from tpu_trainer.gang.backends.torch_dist import TorchDistributed

        return TorchDistributed(group, torch.device("cpu"))
    from tpu_trainer.gang.backends.xla import XlaHost

    return XlaHost(group)
