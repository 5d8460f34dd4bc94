"""Plain PyTorch, one process per host, joined by torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from tpu_trainer.backends.base import map_tensors, move_model
from tpu_trainer.backends.feed import feed_in_turn
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
        return map_tensors(lambda tensor: tensor.to(self.device), batch)

    def feed(self, batches: Iterator[Any]) -> AbstractContextManager[Iterator[Any]]:
        return feed_in_turn(batches, self.to_device)

    def reduce_bucket(self, gradients: Sequence[Tensor], signals: Tensor) -> tuple[list[Tensor], Tensor]:
        return self._group.sum_bucket(gradients, signals)

    def sync(self) -> None:
        """Nothing is pending."""

    def barrier(self) -> None:
        self._group.barrier()

    def close(self) -> None:
        self._group.close()
