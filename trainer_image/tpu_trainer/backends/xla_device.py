"""What every XLA backend does alike: tensors to and from the device, traced graphs, a sync per step, counters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor

from tpu_trainer.backends.base import Counters, map_tensors
from tpu_trainer.backends.feed import feed_ahead
from tpu_trainer.backends.xla_counters import XlaCounters


class XlaDevice:
    """The device of this process, or of this thread where torch_xla runs a thread per device."""

    def __init__(self, replicas: int = 1) -> None:
        """`replicas`: those of this process, a thread each."""
        self.device: torch.device = torch_xla.device()
        self._counters = XlaCounters(replicas)

    def seed(self, seed: int) -> None:
        torch_xla.manual_seed(seed, self.device)

    def to_device(self, batch: Any) -> Any:
        return map_tensors(self.send, batch)

    def feed(self, batches: Iterator[Any]) -> AbstractContextManager[Iterator[Any]]:
        return feed_ahead(batches, self.to_device)

    def flag(self, up: bool) -> Tensor:
        return self.send(torch.tensor([float(up)]))

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """In one transfer; fetched one by one, each would wait for a graph of its own. Those on the host stay there."""
        away = [tensor for tensor in tensors if tensor.device.type == "xla"]
        if away:
            self._counters.own_read()
        fetched = iter(torch_xla._XLAC._xla_get_cpu_tensors(away) if away else ())
        return [next(fetched) if tensor.device.type == "xla" else tensor for tensor in tensors]

    def compilations(self) -> int:
        return self._counters.compilations()

    def counters(self) -> Counters:
        return self._counters.read()

    def graph_hash(self, tensors: Sequence[Tensor]) -> str | None:
        # The binding waits for the device's earlier work without letting go of the interpreter's lock. Where replicas
        # are threads, that work may be a collective for which the others need the lock: so it is waited for before.
        xm.wait_device_ops(xm.xla_real_devices([self.device]))
        return bytes(torch_xla._XLAC._get_graph_hash(list(tensors))).hex()

    def sync(self) -> None:
        torch_xla.sync()

    def send(self, tensor: Tensor) -> Tensor:
        """A copy of a host tensor on the device, there at once.

        Not `tensor.to(device)`: with a thread that prepares batches ahead, the number of compilations then varied from
        run to run, as if a sync caught copies not yet made. Replicas whose graphs differ would wait for each other for
        ever.
        """
        (sent,) = xm.send_cpu_data_to_device([tensor], self.device)
        result: Tensor = sent
        return result
