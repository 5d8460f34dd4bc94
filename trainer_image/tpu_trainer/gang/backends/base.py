"""The protocol between loop and backend, and what all backends do alike to tensors and models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from tpu_contract.protocol import ProgramMatch

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


GROUP_BYTES = 256 << 20
"""How much is sent at once of tensors that may be as large as the model: the transfer takes a few times that memory."""


@dataclass(frozen=True)
class Counters:
    """What the device's runtime has counted since this process started; all zero if nothing is compiled.

    compilations, compile_seconds: graphs compiled, and the time it took.
    executions: graphs that the device has executed; the newest may not be counted yet.
    host_reads: transfers from the device that the backend did not make itself.
    fallbacks: operations that ran on the CPU because the device has none, by name ("aten::nonzero"); reading a
        number from the device is not one of them.
    """

    compilations: int = 0
    compile_seconds: float = 0.0
    executions: int = 0
    host_reads: int = 0
    fallbacks: Mapping[str, int] = field(default_factory=dict)


class Backend(Protocol):
    """One process's place in the gang. Every process calls all collectives, in the same order.

    rank, world: this process among all; each holds an equal part of the global batch.
    local_rank: this process among its host's processes.
    drawing_rank: what random numbers on the device depend on besides the seed: the rank, or 0 in all processes if one
        program draws for the whole global batch.
    device: where the model lives.
    reads_free: reading the signals of a reduction costs no wait for the device.
    terms: how many processes' values a reduction adds up; the mean is the sum over `terms`.
    reads_together: all processes must read the same values from their devices, at the same places and in the same
        order: a device may have put work off, and a collective in it would run on one process alone.
    one_program: all processes run the same program, so that a parameter has a gradient in all of them or in none.
    store: a key-value store that all processes reach without their devices; None for a process alone.
    """

    rank: int
    world: int
    local_rank: int
    drawing_rank: int
    device: torch.device
    reads_free: bool
    terms: int
    reads_together: bool
    one_program: bool
    store: Store | None

    def seed(self, seed: int) -> None:
        """Seeds the device's own random generator, where it has one."""

    def place(self, model: nn.Module, source: int = 0) -> None:
        """Moves the model to the device, in place, with rank `source`'s parameters and buffers in every process."""

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Overwrites tensors, on the device or in host memory, with rank `source`'s values."""

    def to_device(self, batch: Any) -> Any:
        """Returns the batch with every tensor in it moved to the device."""

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns copies in host memory, fetched together; waits until the device has computed the values."""

    def marks(self, tensors: Sequence[Tensor]) -> list[object]:
        """Returns a mark of each tensor, equal as long as nothing has been written to it; where that is not known,
        equal to nothing else. No tensor may be a pending result of the program sent last."""

    def feed(
        self, batches: Iterator[tuple[Any, Any]], busy: Callable[[], AbstractContextManager[None]] | None = None
    ) -> AbstractContextManager[Iterator[tuple[Any, Any]]]:
        """Yields the batches on the device, prepared ahead where that helps, while the context lasts; each with its
        companion. Where a batch is late and the device still works on what it was sent, waits for the device first, in
        a context of `busy`: until then nothing is lost."""

    def reduce(self, gradients: Sequence[Tensor], signals: Tensor) -> tuple[list[Tensor], Tensor]:
        """Sums real tensors over all processes; may overwrite its arguments.

        Returns the summed gradients on the device, and the summed signals (shape [n]) where reading them is cheapest.

        Raises:
            PeerLostError: a peer went away.
        """

    def part(self, tensor: Tensor) -> Tensor:
        """Returns a copy of this process's part of a tensor, shape [n], on the same device: row `rank` of its elements
        in `world` equal rows, padded with zeros."""

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Returns all processes' parts of each tensor on the device, one after the other: shape [world x n] each.

        Raises:
            PeerLostError: a peer went away.
        """

    def numbers(self, values: Sequence[float]) -> Tensor:
        """Returns numbers of this process as data on the device, shape [k, n].

        The mean of its k rows, among the signals of a reduced bucket, becomes the sum over all processes; or their
        mean, where one program serves all (`terms` is 1).
        """

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        """Returns every process's row, in rank order; a collective. Rows are equally long, values are float32."""

    def quiet(self) -> AbstractContextManager[None]:
        """Keeps all replicas of this process from doing anything that `counters` counts while the context lasts. All of
        them enter it at the same points."""

    def compilations(self) -> int:
        """Returns `counters().compilations` in less than a microsecond; called after every step."""

    def counters(self) -> Counters:
        """Returns the counts up to now; takes some 60 microseconds."""

    def graph_hash(self, tensors: Sequence[Tensor]) -> str | None:
        """Returns a hash of the operations pending for `tensors`, equal where processes run the same program.

        None if processes may run different programs.
        """

    def compare_program(self, checked: str) -> ProgramMatch | None:
        """Compares the program that `sync` would send to the device with one that has the digest `checked`; None where
        it sends none."""

    def sync(self) -> None:
        """Ends a step: sends all deferred work to the device. All processes call it at the same points."""

    def barrier(self) -> None:
        """Returns once every process has come here and its device has finished its work."""

    def close(self) -> None:
        """Leaves the gang."""


def map_tensors(move: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Applies `move` to the tensors in nested lists, tuples (named ones too), mappings, dataclasses, and objects that
    have a method `to`, as the batches of some libraries do. Containers are copied and keep their types; everything else
    stays as it is."""
    if isinstance(batch, Tensor):
        return move(batch)
    if isinstance(batch, Mapping):
        return _map_mapping(move, batch)
    if isinstance(batch, tuple | list):
        moved = [map_tensors(move, value) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    if isinstance(batch, type):
        return batch
    if is_dataclass(batch):
        # Not with its constructor, which may take other arguments. Fields may be frozen.
        copied = copy.copy(batch)
        for part in fields(batch):
            if hasattr(batch, part.name):
                object.__setattr__(copied, part.name, map_tensors(move, getattr(batch, part.name)))
        return copied
    if callable(getattr(batch, "to", None)):
        if callable(apply := getattr(batch, "apply", None)):
            # The graphs of PyTorch Geometric and TensorDict: `to` would not send as the backend does.
            return apply(move)
        copied = copy.copy(batch)
        for name, value in vars(batch).items() if hasattr(batch, "__dict__") else ():
            vars(copied)[name] = map_tensors(move, value)
        return copied
    return batch


def tensors_of(batch: Any) -> list[Tensor]:
    """Returns the tensors that `map_tensors` finds in a batch."""
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(collect, batch)
    return tensors


def _map_mapping(move: Callable[[Tensor], Tensor], batch: Mapping[Any, Any]) -> Any:
    moved = {key: map_tensors(move, value) for key, value in batch.items()}
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return moved
    copied = copy.copy(batch)
    for key, value in moved.items():
        copied[key] = value
    return copied


def move_model(model: nn.Module, device: torch.device) -> None:
    """Does `model.to(device)` and keeps shared weights shared.

    Moving to XLA replaces Parameter objects module by module, so a weight used in two places would become two weights
    that drift apart.
    """
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(id(parameter), []).append((module, name))
    model.to(device)
    for (first, first_name), *others in holders.values():
        for module, name in others:
            setattr(module, name, getattr(first, first_name))


def fill_from(
    source: int, tensors: Sequence[Tensor], rank: Tensor, total: Callable[[Sequence[Tensor]], Sequence[Tensor]]
) -> None:
    """Broadcasts rank `source`'s values by `total`, a sum over all processes to which the other ranks add zeros.

    `rank` is data on the device: a number would be compiled in, and the processes would run different programs. Zeros
    are selected, not multiplied in, since -inf times 0 is NaN; they are negative, since -0.0 plus 0.0 would be 0.0.
    Booleans are sent as integers, complex numbers as pairs of real ones.
    """

    def zero_unless_source(flat: Tensor) -> Tensor:
        return torch.where(rank == source, flat, torch.full_like(flat, -0.0 if flat.is_floating_point() else 0))

    with torch.no_grad():
        carried = [tensor.to(torch.int32) if tensor.dtype == torch.bool else as_real(tensor) for tensor in tensors]
        values = total([zero_unless_source(tensor) for tensor in carried])
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(as_complex(value, tensor).to(tensor.dtype))


def in_groups(tensors: Iterable[Tensor], limit: int = GROUP_BYTES) -> Iterator[list[Tensor]]:
    """Groups the tensors in order, at most `limit` bytes each; a larger tensor is a group by itself."""
    group: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if group and size + tensor.nbytes > limit:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += tensor.nbytes
    if group:
        yield group


def as_real(tensor: Tensor) -> Tensor:
    """Returns a complex tensor as pairs of real numbers, any other as it is: devices do not sum complex numbers.

    Stacked, not viewed: torch_xla gives the view a layout that its all-reduce refuses.
    """
    return torch.stack([tensor.real, tensor.imag], dim=-1) if tensor.is_complex() else tensor


def as_complex(real: Tensor, like: Tensor) -> Tensor:
    """Inverts `as_real` for a tensor like `like`."""
    return torch.view_as_complex(real) if like.is_complex() else real


def sum_by_dtype(tensors: Sequence[Tensor], all_reduce: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Sums the tensors with one collective per dtype on one flat tensor, for collectives that take a single tensor."""
    sums = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        same = [tensors[place] for place in places]
        for place, piece in zip(places, unflatten(all_reduce(flatten(same)), same), strict=True):
            sums[place] = piece
    return sums


def to_rows(tensor: Tensor, count: int) -> Tensor:
    """Returns the elements in `count` equal rows, padded with zeros at the end; shape [count, n]."""
    flat = tensor.reshape(-1)
    missing = -flat.numel() % count
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(count, -1)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Returns one tensor with all elements, in order; all are of one dtype."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Inverts `flatten`: returns pieces of `flat` in the shapes of `like`."""
    pieces = torch.split(flat, [tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
