"""Plain PyTorch, one process per host, joined by torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tpu_trainer.backends.base import move_model, to_device
from tpu_trainer.backends.group import Group


class TorchDistributed:
    """The CPU, with gloo between hosts. Eager: a step is done when its last line is."""

    local_rank = 0
    reads_free = True

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank = group.rank
        self.world = group.size
        self.device = torch.device("cpu")

    def seed(self, seed: int) -> None:
        """torch.manual_seed has done it: the CPU's generator is torch's own."""

    def place(self, model: nn.Module) -> None:
        move_model(model, self.device)
        self.broadcast([*model.parameters(), *model.buffers()])

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        self._group.broadcast(tensors)

    def to_device(self, batch: Any) -> Any:
        return to_device(batch, self.device)

    def reduce_bucket(self, flat: Tensor, tail: int) -> tuple[Tensor, Tensor]:
        self._group.all_reduce(flat)
        return flat, flat[-tail:]

    def sync(self) -> None:
        """Nothing is pending."""

    def barrier(self) -> None:
        self._group.barrier()

    def close(self) -> None:
        self._group.close()
