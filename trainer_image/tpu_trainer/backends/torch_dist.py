"""Plain PyTorch on any device it knows, joined by torch.distributed: device and collectives are configuration.

The CPU with gloo is the default; ("cuda", "nccl") and TorchTPU's ("tpu", "tpu_dist") use the same class.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpu_trainer.backends.base import Counters, in_rows, map_tensors, move_model
from tpu_trainer.backends.feed import feed_in_turn
from tpu_trainer.backends.group import Group
from tpu_trainer.errors import BadSpecError
from tpu_trainer.spec import TorchSpec

_KINDS = ("cpu", "cuda", "xpu", "mps", "tpu")
"""Named in the message only: any device type that is registered with torch is accepted."""


class TorchDistributed:
    """Eager: on the CPU a step is done when its last line is; another device runs behind, and reading waits for it."""

    one_program = False

    def __init__(self, group: Group, device: torch.device, local_rank: int = 0) -> None:
        self._group = group
        self.rank = self.drawing_rank = group.rank
        self.world = self.terms = group.size
        self.local_rank = local_rank
        self.store = group.store
        self.device = device
        self.reads_free = device.type == "cpu"

    def seed(self, seed: int) -> None:
        """Seeds the host and every device, which eager operations draw from."""
        torch.manual_seed(seed)

    def place(self, model: nn.Module, source: int = 0) -> None:
        move_model(model, self.device)
        self.broadcast([*model.parameters(), *model.buffers()], source)

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        with torch.no_grad():
            for tensor in tensors:
                there = tensor.to(self.device)
                self._group.broadcast([there], source)
                if there is not tensor:
                    tensor.copy_(there)

    def to_device(self, batch: Any) -> Any:
        return map_tensors(lambda tensor: tensor.to(self.device), batch)

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.cpu() for tensor in tensors]

    def feed(self, batches: Iterator[tuple[Any, Any]]) -> AbstractContextManager[Iterator[tuple[Any, Any]]]:
        return feed_in_turn(batches, self.to_device)

    def reduce(self, gradients: Sequence[Tensor], signals: Tensor) -> tuple[list[Tensor], Tensor]:
        return self._group.sum(gradients, signals)

    def part(self, whole: Tensor) -> Tensor:
        return in_rows(whole, self.world)[self.rank].clone()

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return self._group.join(parts)

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        return self._group.gather(row)

    def flag(self, up: bool) -> Tensor:
        return torch.tensor([float(up)], device=self.device)

    def numbers(self, values: Sequence[float]) -> Tensor:
        return torch.tensor([values], dtype=torch.float32, device=self.device)

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


def find_device(chosen: TorchSpec, local_rank: int) -> torch.device:
    """The device of a host's process `local_rank`, made the process's current one.

    Raises:
        BadSpecError: this torch does not have such a device or such collectives, or this host has too few devices.
    """
    if chosen.device == "tpu":
        # TorchTPU registers the device and its collectives. If it is missing, the checks below say what is there.
        with suppress(ModuleNotFoundError):
            importlib.import_module("torch_tpu")
    module = _module(chosen.device)
    if module is None:
        found = ", ".join(kind for kind in _KINDS if _module(kind) is not None)
        raise BadSpecError(
            f'trainer.torch.device: torch {torch.__version__} finds no "{chosen.device}" on this host, but {found}'
        )
    _check_collectives(chosen)
    if chosen.device == "cpu":
        return torch.device("cpu")
    count = int(module.device_count())
    if count < chosen.processes_per_host:
        raise BadSpecError(
            f"trainer.torch.processesPerHost: {chosen.processes_per_host} processes need a device each, this host has "
            f"{count} of {chosen.device}"
        )
    if chosen.device == "tpu":
        # TorchTPU has given this process its one device already, and knows no other.
        return torch.device("tpu")
    module.set_device(local_rank)
    return torch.device(chosen.device, local_rank)


def _module(kind: str) -> Any:
    """torch's module for a device type (torch.cuda), or None if there is no such device."""
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:
        return None
    return module if module.is_available() else None


def _check_collectives(chosen: TorchSpec) -> None:
    known = {
        name: devices for name, devices in dist.Backend.backend_capability.items() if dist.is_backend_available(name)
    }
    if chosen.device not in known.get(chosen.collectives, ()):
        fitting = sorted(name for name, devices in known.items() if chosen.device in devices)
        raise BadSpecError(
            f'trainer.torch.collectives: torch {torch.__version__} has no "{chosen.collectives}" for device '
            f'"{chosen.device}", but {", ".join(fitting) or "none at all"}'
        )
