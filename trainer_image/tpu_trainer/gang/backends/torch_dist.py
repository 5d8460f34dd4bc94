"""Plain PyTorch on any device it knows, joined by torch.distributed: device and collectives are configuration.

The CPU with gloo is the default; ("cuda", "nccl") and TorchTPU's ("tpu", "tpu_dist") use the same class.
"""

from __future__ import annotations

import importlib
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpu_trainer.contract.errors import BadSpecError
from tpu_trainer.contract.spec import TorchSpec
from tpu_trainer.gang.backends.base import Counters, map_tensors, move_model, to_rows
from tpu_trainer.gang.backends.feed import feed_in_turn
from tpu_trainer.gang.backends.group import ProcessGroup
from tpu_trainer.gang.compiled import Compilations, check_compiler

_KINDS = ("cpu", "cuda", "xpu", "mps", "tpu")
"""Named in the message only: any device type that is registered with torch is accepted."""


class TorchDistributed:
    """On the CPU a step is done when its last line is; any other device runs behind the host, and a read waits for it.

    TorchTPU may put operations off and compile them together (trainer.torch.execution: Fuse), collectives among them,
    and a read makes them run. So on a TPU all processes read the same values at the same places, whatever the mode:
    TorchTPU's guide makes no exceptions. Where programs are compiled, every step also ends with a cut (`sync`).
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
        self._puts_off = device.type == "tpu" and execution != "Eager"
        self._compiled = Compilations() if execution == "Compile" else None

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

    def marks(self, tensors: Sequence[Tensor]) -> list[object]:
        # Batch norm writes to its statistics without torch's count of writes.
        return [object() for _ in tensors]

    def feed(self, batches: Iterator[tuple[Any, Any]]) -> AbstractContextManager[Iterator[tuple[Any, Any]]]:
        return feed_in_turn(batches, self.to_device)

    def reduce(self, gradients: Sequence[Tensor], signals: Tensor) -> tuple[list[Tensor], Tensor]:
        return self._group.sum(gradients, signals)

    def part(self, whole: Tensor) -> Tensor:
        return to_rows(whole, self.world)[self.rank].clone()

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return self._group.join(parts)

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        return self._group.gather(row)

    def flag(self, up: bool) -> Tensor:
        return torch.tensor([float(up)], device=self.device)

    def numbers(self, values: Sequence[float]) -> Tensor:
        return torch.tensor([values], dtype=torch.float32, device=self.device)

    def quiet(self) -> AbstractContextManager[None]:
        return nullcontext()

    def compilations(self) -> int:
        return 0 if self._compiled is None else self._compiled.count

    def counters(self) -> Counters:
        return Counters() if self._compiled is None else Counters(self._compiled.count, self._compiled.seconds)

    def graph_hash(self, tensors: Sequence[Tensor]) -> str | None:
        # What has led to them is not known here; that they fit into one collective is.
        if not self.one_program:
            return None
        described = [[str(tensor.dtype), list(tensor.shape)] for tensor in tensors]
        return f"{zlib.crc32(json.dumps(described).encode()):08x}"

    def sync(self) -> None:
        if self._puts_off:
            # Not torch.tpu's own: that one is for torch alone.
            torch.accelerator.synchronize()

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
    if not _is_there(chosen.device):
        found = ", ".join(kind for kind in _KINDS if _is_there(kind))
        raise BadSpecError(
            f'trainer.torch.device: torch {torch.__version__} finds no "{chosen.device}" on this host, but {found}'
        )
    _check_collectives(chosen)
    if chosen.execution == "Compile":
        check_compiler(chosen.device)
    if chosen.device == "cpu":
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if count < chosen.processes_per_host:
        raise BadSpecError(
            f"trainer.torch.processesPerHost: {chosen.processes_per_host} processes need a device each, this host has "
            f"{count} of {chosen.device}"
        )
    if chosen.device == "tpu":
        _set_eager_mode(chosen.execution)
        # TorchTPU has given this process its one device already, and knows no other.
        return torch.device("tpu")
    torch.accelerator.set_device_index(local_rank)
    return torch.device(chosen.device, local_rank)


def _is_there(kind: str) -> bool:
    """Whether this host has such a device. Asked by torch.accelerator: torch.tpu's own answers are for torch alone."""
    if kind == "cpu":
        return True
    found = torch.accelerator.current_accelerator(check_available=True)
    return found is not None and found.type == kind


def _set_eager_mode(execution: str) -> None:
    """Sets how TorchTPU runs what is in no compiled program. By its property, not by its environment variable: that had
    another name in earlier releases, and an unknown variable would be overlooked. An unknown property is an error.

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
