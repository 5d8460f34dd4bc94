"""One process that stands for a whole gang, as if every other process did exactly what this one does.

So a single process on a CPU runs replica 0 of any slice, with its part of every global batch; sums and means over all
replicas are computed from its own values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpu_contract.run_spec import RunSpec
from tpu_trainer.contract.environment import WorkerEnvironment
from tpu_trainer.contract.stop import StopFlag
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.gang.backends.group import ProcessGroup


class SoloGroup(ProcessGroup):
    """Collectives whose other members have the values of this process."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)

    def sum(self, gradients: Sequence[Tensor], signals: Tensor) -> tuple[list[Tensor], Tensor]:
        return [gradient * self.size for gradient in gradients], signals * self.size

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Does nothing: all have the same values."""

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [part.repeat(self.size) for part in parts]

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        return [[float(value) for value in row] for _ in range(self.size)]

    def barrier(self) -> None:
        """Does nothing: there is no peer to wait for."""

    def close(self) -> None:
        """Does nothing: nothing was opened."""


def open_solo(spec: RunSpec, _: WorkerEnvironment, __: StopFlag) -> Backend:
    """Returns the backend of replica 0 of the run spec's slice, on this machine's CPU."""
    group = SoloGroup(spec.slice.replicas)
    if spec.backend == "torch":
        from tpu_trainer.gang.backends.torch_dist import TorchDistributed

        return TorchDistributed(group, torch.device("cpu"))
    from tpu_trainer.gang.backends.xla import XlaHost

    return XlaHost(group)
