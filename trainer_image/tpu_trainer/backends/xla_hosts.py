"""XLA devices whose processes meet in host memory, over a group: what the CPU rehearsal and SPMD have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch_xla
from torch import Tensor, nn

from tpu_trainer.backends.base import move_model
from tpu_trainer.backends.group import Group
from tpu_trainer.backends.xla_device import XlaDevice


class XlaHosts(XlaDevice):
    """One process per host; `group` joins them."""

    local_rank = 0

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group
        self.rank = group.rank
        self.world = group.size
        self.store = group.store

    def place(self, model: nn.Module) -> None:
        # While the model is still in host memory, where gloo works.
        self._group.broadcast([*model.parameters(), *model.buffers()])
        move_model(model, self.device)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        if self.world == 1:
            return
        hosts = self.to_host(tensors)
        self._group.broadcast(hosts)
        with torch.no_grad():
            for tensor, host in zip(tensors, hosts, strict=True):
                tensor.copy_(host)

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        return self._group.gather(row)

    def barrier(self) -> None:
        torch_xla.sync(wait=True)
        self._group.barrier()

    def close(self) -> None:
        self._group.close()
