"""Plain PyTorch on any device it knows, joined by torch.distributed: device and collectives are configuration.

The CPU with gloo is the default; ("cuda", "nccl") and TorchTPU's ("tpu", "tpu_dist") use the same class.
"""

from __future__ import annotations

import importlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpu_contract.protocol import ProgramMatch
from tpu_contract.run_spec import TorchSpec
from tpu_trainer.contract.errors import BadSpecError
from tpu_trainer.gang.backends.base import Counters, map_tensors, move_model, to_rows
from tpu_trainer.gang.backends.feed import feed_in_turn
from tpu_trainer.gang.backends.group import ProcessGroup
from tpu_trainer.gang.compiled import Compilations, check_compiler

_KINDS = ("cpu", "cuda", "xpu", "mps", "tpu")
"""Device types for the message only: any type that is registered with torch is accepted."""


class TorchDistributed:
    """On the CPU a step is done when its last line is; any other device lags behind the host, and a read waits for it.

    TorchTPU may defer operations and compile them together (trainer.torch.execution: Fuse), collectives among them, and
    a read makes them run. So on a TPU all processes read the same values at the same points, whatever the mode:
    TorchTPU's guide makes no exceptions. Where programs are compiled, every step also ends with a `sync`.
    """

    def __init__(
        self, group: ProcessGroup, device: torch.device, local_rank: int = 0, execution: str = "Eager"
    ) -> None:
        self._group = group
        self.rank = self.drawing_rank = group.rank
        self.world = self.terms = group.size
        self.local_rank = local_rank
        self.store = group.store
        self.device = device
        self.reads_free = device.type == "cpu"
        self.reads_together = self.one_program = device.type == "tpu"
        self._defers = device.type == "tpu" and execution != "Eager"
        self._compiled = Compilations() if execution == "Compile" else None

    def seed(self, seed: int) -> None:
        """Seeds the host and every device, which eager operations draw from."""
        if self.device.type == "cpu":
            # torch.manual_seed also keeps a stack for every kind of device, which takes longer than a small step.
            torch.default_generator.manual_seed(seed)
        else:
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

    def marks(self, tensors: Sequence[Tensor]) -> list[object]:
        # Batch norm writes to its statistics without increasing torch's count of writes.
        return [object() for _ in tensors]

    def feed(
        self, batches: Iterator[tuple[Any, Any]], busy: Callable[[], AbstractContextManager[None]] | None = None
    ) -> AbstractContextManager[Iterator[tuple[Any, Any]]]:
        return feed_in_turn(batches, self.to_device)

    def reduce(self, gradients: Sequence[Tensor], signals: Tensor) -> tuple[list[Tensor], Tensor]:
        return self._group.sum(gradients, signals)

    def part(self, tensor: Tensor) -> Tensor:
        return to_rows(tensor, self.world)[self.rank].clone()

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return self._group.join(parts)

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        return self._group.gather(row)

    def numbers(self, values: Sequence[float]) -> Tensor:
        return torch.tensor([values], dtype=torch.float32, device=self.device)

    def quiet(self) -> AbstractContextManager[None]:
        return nullcontext()

    def compilations(self) -> int:
        return 0 if self._compiled is None else self._compiled.count

    def counters(self) -> Counters:
        return Counters() if self._compiled is None else Counters(self._compiled.count, self._compiled.seconds)

    def compare_program(self, checked: str) -> ProgramMatch | None:
        return None

    def graph_hash(self, tensors: Sequence[Tensor]) -> str | None:
        # How they were computed is not known here, but equal shapes fit into one collective.
        if not self.one_program:
            return None
        described = [[str(tensor.dtype), list(tensor.shape)] for tensor in tensors]
        return f"{zlib.crc32(json.dumps(described).encode()):08x}"

    def sync(self) -> None:
        if self._defers:
            # Not torch.tpu.synchronize, which is internal to torch.
            torch.accelerator.synchronize()

    def barrier(self) -> None:
        self._group.barrier()

    def close(self) -> None:
        self._group.close()


def find_device(settings: TorchSpec, local_rank: int) -> torch.device:
    """Returns the device of a host's process `local_rank` and makes it the process's current one.

    Raises:
        BadSpecError: this torch does not have such a device or such collectives, or this host has too few devices.
    """
    if settings.device == "tpu":
        # TorchTPU registers the device and its collectives. If it is missing, the checks below report what exists.
        with suppress(ModuleNotFoundError):
            importlib.import_module("torch_tpu")
    if not _is_there(settings.device):
        existing = ", ".join(kind for kind in _KINDS if _is_there(kind))
        raise BadSpecError(
            f'trainer.torch.device: torch {torch.__version__} finds no "{settings.device}" on this host, but {existing}'
        )
    _check_collectives(settings)
    if settings.execution == "Compile":
        check_compiler(settings.device)
    if settings.device == "cpu":
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if count < settings.processes_per_host:
        raise BadSpecError(
            f"trainer.torch.processesPerHost: {settings.processes_per_host} processes need a device each, this host "
            f"has {count} of {settings.device}"
        )
    if settings.device == "tpu":
        _set_eager_mode(settings.execution)
        # TorchTPU has already given this process its one device, and knows no other.
        return torch.device("tpu")
    torch.accelerator.set_device_index(local_rank)
    return torch.device(settings.device, local_rank)


def _is_there(kind: str) -> bool:
    """Returns whether this host has such a device, by torch.accelerator: torch.tpu's functions are internal to
    torch."""
    if kind == "cpu":
        return True
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == kind


def _set_eager_mode(execution: str) -> None:
    """Sets how TorchTPU runs operations outside of compiled programs. By its property, because an unknown property is
    an error: the environment variable had another name in earlier releases, and an unknown variable would be ignored.

    Raises:
        BadSpecError: this TorchTPU has no such mode.
    """
    tpu: Any = torch.get_device_module("tpu")
    mode = "DEFER_AND_FUSE" if execution == "Fuse" else "DEFER_NEVER"
    try:
        tpu.eager_mode = getattr(tpu.EagerMode, mode)
    except AttributeError as error:
        raise BadSpecError(
            f'trainer.torch.execution: "{execution}" needs torch.tpu.eager_mode and EagerMode.{mode}, which this '
            f"torch_tpu does not have: {error}"
        ) from error


def _check_collectives(settings: TorchSpec) -> None:
    known = {
        name: devices for name, devices in dist.Backend.backend_capability.items() if dist.is_backend_available(name)
    }
    if settings.device not in known.get(settings.collectives, ()):
        fitting = sorted(name for name, devices in known.items() if settings.device in devices)
        raise BadSpecError(
            f'trainer.torch.collectives: torch {torch.__version__} has no "{settings.collectives}" for device '
            f'"{settings.device}", but {", ".join(fitting) or "none at all"}'
        )
