"""The protocol between loop and backend, and what all backends do alike to tensors and models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


GROUP_BYTES = 256 << 20
"""How much is sent at once of what may be as large as the model: it takes as much memory a few times over."""


@dataclass(frozen=True)
class Counters:
    """What the device's runtime has counted since this process started; all zero if nothing is compiled.

    compilations, compile_seconds: graphs compiled, and the time it took.
    executions: graphs that the device has executed; the newest ones may not be counted yet.
    host_reads: transfers from the device that the backend did not make itself.
    fallbacks: operations that ran on the CPU because the device has none, by name ("aten::nonzero"); reading a
        number off the device is not one of them.
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
        """The batch with every tensor in it moved to the device."""

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies in host memory, fetched together; waits until the device has made the values."""

    def marks(self, tensors: Sequence[Tensor]) -> list[object]:
        """Returns a mark of each tensor, equal as long as nothing has been written to it; where that is not known,
        equal to nothing else. No tensor may be on its way out of a program that was sent off last."""

    def feed(self, batches: Iterator[tuple[Any, Any]]) -> AbstractContextManager[Iterator[tuple[Any, Any]]]:
        """The batches on the device, prepared ahead where that helps, while the context lasts; each with what comes
        with it."""

    def reduce(self, gradients: Sequence[Tensor], signals: Tensor) -> tuple[list[Tensor], Tensor]:
        """Sums real tensors over all processes; what comes in may be overwritten.

        Returns the summed gradients on the device, and the summed signals (shape [n]) where reading them is cheapest.

        Raises:
            PeerLostError: a peer went away.
        """

    def part(self, whole: Tensor) -> Tensor:
        """This process's part of a tensor, shape [n]: of its elements in `world` equal rows, filled up with zeros, the
        row with the number of the rank. The process's own copy, where `whole` is."""

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """All processes' parts of each tensor on the device, one after the other: shape [world x n] each.

        Raises:
            PeerLostError: a peer went away.
        """

    def flag(self, up: bool) -> Tensor:
        """A flag of this process as data on the device, shape [k].

        The sum of its elements, among the signals of a reduction, is above 0 where any process's flag was up.
        """

    def numbers(self, values: Sequence[float]) -> Tensor:
        """Numbers of this process as data on the device, shape [k, n].

        The mean of its k rows, among the signals of a reduced bucket, becomes the sum over all processes; or their
        mean, where one program serves all (`terms` is 1).
        """

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        """Every process's row, in rank order; a collective. Rows are equally long, values are float32."""

    def quiet(self) -> AbstractContextManager[None]:
        """While the context lasts, no replica of this process does anything that `counters` counts. All of them enter
        it at the same places."""

    def compilations(self) -> int:
        """`counters().compilations` in less than a microsecond: asked after every step."""

    def counters(self) -> Counters:
        """The counts up to now. Costs some 60 microseconds."""

    def graph_hash(self, tensors: Sequence[Tensor]) -> str | None:
        """A hash of the operations that are pending for `tensors`, equal where processes run the same program.

        None if processes may run different ones.
        """

    def sync(self) -> None:
        """Ends a step: sends to the device what has been put off so far. All processes call it at the same places."""

    def barrier(self) -> None:
        """Returns once every process has come here and its device has finished its work."""

    def close(self) -> None:
        """Leaves the gang."""


def map_tensors(move: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Applies `move` to the tensors in nested lists, tuples (named ones too), mappings, dataclasses, and objects that
    have a method `to`, as batches of libraries do. Each keeps its type and is copied; the rest stays as it is."""
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
        # Not by its constructor, which may take other arguments. Fields may be frozen.
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


def _map_mapping(move: Callable[[Tensor], Tensor], batch: Mapping[Any, Any]) -> Any:
    moved = {key: map_tensors(move, value) for key, value in batch.items()}
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return moved
    copied = copy.copy(batch)
    for key, value in moved.items():
        copied[key] = value
    return copied


def move_model(model: nn.Module, device: torch.device) -> None:
    """`model.to(device)` that keeps shared weights shared.

    Moving to XLA replaces Parameter objects module by module, so a weight used in two places becomes two
    weights that drift apart.
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
    """A broadcast made of sums over all processes, `total`: all but rank `source` add zeros.

    `rank` is data on the device: a number would be compiled in, and the processes would run different programs. Zeros
    are chosen, not multiplied in, since -inf times 0 is NaN; they are negative, since -0.0 plus 0.0 would be 0.0.
    Booleans travel as integers, complex numbers as pairs of real ones.
    """

    def own(flat: Tensor) -> Tensor:
        return torch.where(rank == source, flat, torch.full_like(flat, -0.0 if flat.is_floating_point() else 0))

    with torch.no_grad():
        carried = [tensor.to(torch.int32) if tensor.dtype == torch.bool else as_real(tensor) for tensor in tensors]
        theirs = total([own(tensor) for tensor in carried])
        for tensor, value in zip(tensors, theirs, strict=True):
            tensor.copy_(as_complex(value, tensor).to(tensor.dtype))


def in_groups(tensors: Iterable[Tensor], limit: int = GROUP_BYTES) -> Iterator[list[Tensor]]:
    """The tensors in order, in groups of at most `limit` bytes, or of one tensor that is larger."""
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
    """A complex tensor as pairs of real numbers, any other as it is: devices do not sum complex numbers.

    Stacked, not viewed: torch_xla gives the view a layout that its all-reduce refuses.
    """
    return torch.stack([tensor.real, tensor.imag], dim=-1) if tensor.is_complex() else tensor


def as_complex(real: Tensor, like: Tensor) -> Tensor:
    """The inverse of `as_real` for a tensor like `like`."""
    return torch.view_as_complex(real) if like.is_complex() else real


def sum_by_dtype(tensors: Sequence[Tensor], all_reduce: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The sums of the tensors by one collective per dtype on one flat tensor, for collectives that take no more."""
    sums = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        same = [tensors[place] for place in places]
        for place, piece in zip(places, unflatten(all_reduce(flatten(same)), same), strict=True):
            sums[place] = piece
    return sums


def to_rows(whole: Tensor, count: int) -> Tensor:
    """The elements in `count` equal rows, filled up with zeros at the end; shape [count, n]."""
    flat = whole.reshape(-1)
    missing = -flat.numel() % count
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(count, -1)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor with all elements, in order; all of one dtype."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `flatten`: pieces of `flat` in the shapes of `like`."""
    pieces = torch.split(flat, [tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
