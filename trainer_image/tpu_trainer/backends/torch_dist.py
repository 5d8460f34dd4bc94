"""Plain PyTorch on any device that it knows, joined by torch.distributed: the pair is configuration, the code is one.

The CPU with gloo is the default; ("cuda", "nccl") and TorchTPU's ("tpu", "tpu_dist") are the same class. Opened by
`open_backend`, once per process; `processes` starts one process per device where a host has several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from tpu_trainer.backends.base import Counters, map_tensors, move_model
from tpu_trainer.backends.feed import feed_in_turn
from tpu_trainer.backends.group import Group


class TorchDistributed:
    """Eager: on the CPU a step is done when its last line is; another device runs behind, and reading waits for it."""

    one_program = False

    def __init__(self, group: Group, device: torch.device, local_rank: int = 0) -> None:
        self._group = group
        self.rank = self.drawing_rank = group.rank
        self.world = group.size
        self.local_rank = local_rank
        self.terms = group.size
        self.store = group.store
        self.device = device
        self.reads_free = device.type == "cpu"

    def seed(self, seed: int) -> None:
        """Those of the host and of every device, which eager operations draw from."""
        torch.manual_seed(seed)

    def place(self, model: nn.Module) -> None:
        move_model(model, self.device)
        self.broadcast([*model.parameters(), *model.buffers()])

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        self._group.broadcast(tensors)

    def to_device(self, batch: Any) -> Any:
        return map_tensors(lambda tensor: tensor.to(self.device), batch)

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.cpu() for tensor in tensors]

    def feed(self, batches: Iterator[Any]) -> AbstractContextManager[Iterator[Any]]:
        return feed_in_turn(batches, self.to_device)

    def reduce_bucket(self, gradients: Sequence[Tensor], signals: Tensor) -> tuple[list[Tensor], Tensor]:
        return self._group.sum_bucket(gradients, signals)

    def flag(self, up: bool) -> Tensor:
        return torch.tensor([float(up)], device=self.device)

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        return self._group.gather(row)

    def compilations(self) -> int:
        return 0

    def counters(self) -> Counters:
        return Counters()

    def graph_hash(self, tensors: Sequence[Tensor]) -> str | None:
        return None

    def sync(self) -> None:
        """Nothing is pending."""

    def barrier(self) -> None:
        self._group.barrier()

    def close(self) -> None:
        self._group.close()
