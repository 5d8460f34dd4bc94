"""Streams in shards: which process reads what, in an order that does not depend on how many processes there are.

The shards are read in lanes, whose number depends only on the number of shards. The shards of one pass over the data
after another, each pass in an order of its own, form an endless list. Lane l of L reads entries l, l + L, l + 2L ... of
it completely. Example k of the run is the next one of lane k mod L, and process r of w trains on examples r,
r + w, r + 2w ... So the global batches are the same for any w, and if w divides L, a process reads whole lanes that no
other process reads.

No process has to know how long a shard is, or how far the others are: a lane that has read a shard continues with its
next one. So nothing is dropped, no process waits for another, and all shards are read equally often, however long they
are. An epoch is then a number of examples, where that number is known, and not an event in the data.
"""

from __future__ import annotations

import copyreg
import inspect
import io
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain, count, islice
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.data.loading import Workers
from tpu_trainer.data.order import (
    GENERATORS,
    Order,
    Position,
    TrainingData,
    permutation,
    random_seed,
    seed_generators,
)
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.gang.gather import gather_whole

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MOST_LANES = 256
"""The chips of the largest slices of v5e and v6e, so that each has its own lane. Not more, because a lane is an open
shard, and a single process has all lanes open."""


class LanePosition(NamedTuple):
    """How far a lane has read: `taken` examples of its shard number `visit`."""

    visit: int = 0
    taken: int = 0


@dataclass(frozen=True)
class ShardData(TrainingData):
    """A stream in shards, `workers.dataset`, after the job has taken `taken` examples.

    places: the lanes' positions, by lane; a missing lane is at its beginning. epoch_size: examples of an epoch, if
    known; otherwise the run is one epoch.
    """

    order: Order
    shards: int
    workers: Workers
    epoch_size: int | None = None
    taken: int = 0
    places: Mapping[int, LanePosition] = field(default_factory=dict)

    @property
    def lanes(self) -> int:
        """The number of lanes: a power of two, like most numbers of processes. At most one per shard: two lanes in the
        same shard would yield the same examples side by side."""
        return int(2 ** (min(self.shards, MOST_LANES).bit_length() - 1))

    @property
    def step(self) -> int:
        """The distance between the lanes that this process reads."""
        return math.gcd(self.order.share.world, self.lanes)

    @property
    def readers(self) -> int:
        """The number of processes that read each lane: 1 if the number of processes divides the number of lanes."""
        return self.order.share.world // self.step

    @property
    def own_lanes(self) -> range:
        """The lanes that this process reads."""
        return range(self.order.share.rank % self.step, self.lanes, self.step)

    def numbers(self) -> Iterator[int]:
        """Yields the numbers of the examples that this process reads; endless. Example k is the next of lane k mod
        lanes."""
        return count(self.taken + (self.order.share.rank - self.taken) % self.step, self.step)

    def trains_on(self, number: int) -> bool:
        """Returns whether this process trains on an example that it reads, instead of skipping it."""
        return number % self.order.share.world == self.order.share.rank

    @property
    def reads_per_pass(self) -> int:
        """The number of examples that the process reads for the rows of one pass."""
        return self.order.rows * self.readers

    def epoch(self, start: Position, number: int) -> Iterator[tuple[Any, Position]]:
        """Yields all passes of the run: an epoch does not end in the data.

        Only the position of a step's last pass is the position after the step; it has the positions of this process's
        lanes, and `merge` adds the others'.
        """
        places = {str(lane): list(place) for lane, place in self.places.items()}
        for done, (examples, moved) in enumerate(_read(self)):
            taken = self.taken + (done // self.order.passes + 1) * self.order.global_batch
            places |= {str(lane): list(place) for lane, place in moved.items()}
            epoch = 0 if self.epoch_size is None else (taken - 1) // self.epoch_size
            state = {"shards": self.shards, "taken": taken, "places": dict(places)}
            yield examples, Position(epoch, taken - epoch * (self.epoch_size or 0), state)

    def merge(self, position: Position, backend: Backend) -> Position:
        if position.dataset is None or self.step == 1:
            return position
        places = position.dataset["places"]
        rows = gather_whole(chain(*(places.get(str(lane), LanePosition()) for lane in self.own_lanes)), backend)
        merged = {
            str(lane): rows[rank][2 * nth : 2 * nth + 2]
            for rank in range(self.step)
            for nth, lane in enumerate(range(rank, self.lanes, self.step))
        }
        return Position(position.epoch, position.offset, {**position.dataset, "places": merged})

    def describe_sharing(self) -> str | None:
        if self.readers == 1:
            return None
        return (
            f"the train dataset has {self.shards} shards, which are read in {self.lanes} lanes; "
            f"{self.order.share.world} processes cannot share those equally, so each example is read by {self.readers} "
            "processes and used by one. There are as many lanes as the largest power of two up to the number of "
            f"shards, and up to {MOST_LANES}"
        )


def shard_data(workers: Workers, order: Order, epoch_size: int | None = None) -> ShardData:
    """Returns the stream `workers.dataset`, read from `order.start` on.

    Raises:
        UserCodeError: the stream has no number of shards, or another one than when the checkpoint was written.
    """
    shards, start = shards_of(workers.dataset), order.start.dataset or {}
    if order.start != Position() and start.get("shards") != shards:
        raise UserCodeError(
            f"the task's train dataset has {shards} shards; when the checkpoint was written it had "
            f"{start.get('shards', 'none')}, so the run's place in the data is lost. Give it the same shards, or start "
            "again under another checkpoint.uri"
        )
    places = {int(lane): LanePosition(*place) for lane, place in start.get("places", {}).items()}
    return ShardData(order, shards, workers, epoch_size, int(start.get("taken", 0)), places)


def shards_of(stream: Any) -> int:
    """Returns the stream's number of shards; raises UserCodeError if it has none."""
    count = getattr(stream, "num_shards", None)
    if count is None:
        # Its name in older versions of Hugging Face's datasets.
        count = getattr(stream, "n_shards", None)
    if isinstance(count, bool) or not isinstance(count, Integral) or int(count) < 1:
        raise UserCodeError(
            "the task's train dataset has shard(), so it must have num_shards too, the number of its shards (files): a "
            f"whole number above 0, not {count!r}"
        )
    return int(count)


def open_shard(stream: Any, index: int, epoch: int) -> Iterable[Any]:
    """Returns the examples of a shard. Raises what the user's code raises."""
    if hasattr(stream, "set_epoch"):
        stream.set_epoch(epoch)
    shards = shards_of(stream)
    # Hugging Face's datasets have this method with its arguments in the other order.
    by_name = "num_shards" in inspect.signature(stream.shard).parameters
    shard: Iterable[Any] = stream.shard(num_shards=shards, index=index) if by_name else stream.shard(index, shards)
    if hasattr(shard, "set_epoch"):
        shard.set_epoch(epoch)
    return shard


Pass = tuple[list[Any], dict[int, LanePosition]]
"""The examples of a pass, and the positions of the lanes that it has advanced."""


class Lane:
    """Reads one lane. The shards' random numbers depend only on the seed, the shard's index in the list and the
    example's index in the shard, so they are the same for any number of processes, and after a resume."""

    def __init__(self, data: ShardData, lane: int) -> None:
        self._data, self._lane = data, lane
        self.place = data.places.get(lane, LanePosition())
        self._open: Iterator[Any] | None = None

    def next(self) -> Any:
        """Returns the next example.

        Raises:
            UserCodeError: a shard is empty.
            Exception: what the user's code raises.
        """
        while True:
            if self._open is None:
                self._open = self._open_shard()
            visit, taken = self.place
            self._seed(taken)
            try:
                example = next(self._open)
            except StopIteration:
                if taken == 0:
                    raise UserCodeError(
                        f"shard {self._shard[1]} of {self._data.shards} of the task's train dataset is empty: every "
                        "shard must have examples. If num_shards is larger than the number of files, lower it"
                    ) from None
                self._open, self.place = None, LanePosition(visit + 1)
                continue
            self.place = LanePosition(visit, taken + 1)
            return example

    @property
    def _entry(self) -> int:
        """The lane's current entry in the endless list of shards."""
        return self._lane + self.place.visit * self._data.lanes

    @property
    def _shard(self) -> tuple[int, int]:
        """The current pass over the data, and the shard."""
        shards = self._data.shards
        epoch, index = divmod(self._entry, shards)
        return epoch, int(permutation(shards, self._data.order.seed, epoch)[index])

    def _open_shard(self) -> Iterator[Any]:
        """Returns the shard's examples from the lane's position on. Does not use the shard's own state: Hugging Face's
        datasets, for example, lose their shuffle buffer."""
        epoch, index = self._shard
        taken = self.place.taken
        self._seed(0)
        shard: Any = open_shard(self._data.workers.dataset, index, epoch)
        if taken and callable(getattr(shard, "skip", None)):
            shard, taken = shard.skip(taken), 0
        examples: Iterator[Any] = iter(shard)
        for number in range(taken):
            self._seed(number)
            next(examples, None)
        return examples

    def _seed(self, number: int) -> None:
        seed_generators(random_seed(self._data.order.seed, self._entry, number))


def _read_pass(lanes: Mapping[int, Lane], data: ShardData, numbers: Iterator[int]) -> Pass:
    """Reads the next pass from `lanes`: all lanes of the process, or those of one of its workers."""
    examples, moved = [], {}
    for number in islice(numbers, data.reads_per_pass):
        if (lane := lanes.get(number % data.lanes)) is None:
            continue
        example = lane.next()
        moved[number % data.lanes] = lane.place
        if data.trains_on(number):
            examples.append(example)
    return examples, moved


def _read(data: ShardData) -> Iterator[Pass]:
    """Yields pass by pass, read in this process or by its workers, which share the lanes."""
    workers = min(data.workers.count, len(data.own_lanes))
    reader, readers = _Reader(data), max(workers, 1)
    with user_code("the task's dataset"):
        # A separate generator, because the loader draws a number when it begins.
        loader: DataLoader[Any] = DataLoader(
            reader,
            batch_size=None,
            num_workers=workers,
            worker_init_fn=data.workers.begin,
            generator=torch.Generator(),
        )
        # The loader takes from its workers in turn.
        read = iter(loader if workers else reader)
    numbers = data.numbers()
    while True:
        parts: list[Iterator[Any]] = []
        moved: dict[int, LanePosition] = {}
        for _ in range(readers):
            with nullcontext() if workers else GENERATORS, user_code("the next examples of the task's dataset"):
                part = _unpack(next(read)) if workers else next(read)
            if isinstance(part, str):
                raise UserCodeError(part)
            parts.append(iter(part[0]))
            moved |= part[1]
        used = filter(data.trains_on, islice(numbers, data.reads_per_pass))
        # The worker of a lane is the one with its place among this process's lanes.
        yield [next(parts[number % data.lanes // data.step % readers]) for number in used], moved


def forget_worker() -> None:
    """Hides from datasets that they are in a worker: they would read only a part of a shard, which is a part
    already."""
    torch_worker._worker_info = None


class _Reader(IterableDataset[Any]):
    """Yields a worker's part of every pass, packed, or the text of an error in the user's code; or all of it, as it is,
    in a process without workers."""

    def __init__(self, data: ShardData) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        data, info = self._data, get_worker_info()
        forget_worker()
        own = data.own_lanes if info is None else data.own_lanes[info.id :: info.num_workers]
        lanes = {lane: Lane(data, lane) for lane in own}
        numbers = data.numbers()
        while True:
            try:
                part: Pass | str = _read_pass(lanes, data, numbers)
            except UserCodeError as error:
                part = str(error)
            yield part if info is None else _pack(part)


class _Pickler(pickle.Pickler):
    """Pickles tensors as bytes: torch's own way writes a file for each."""

    dispatch_table = copyreg.dispatch_table.copy()


def _pack(part: Pass | str) -> Tensor:
    """Packs a part into one tensor for shared memory: a tensor for every example would take a file each."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(part)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _unpack(packed: Tensor) -> Any:
    # Safe, since this process's own workers packed it.
    return pickle.loads(packed.numpy().data)  # noqa: S301


def _reduce_tensor(tensor: Tensor) -> Any:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return _rebuild_tensor, (flat.numpy(), tensor.dtype, tuple(tensor.shape))


def _rebuild_tensor(flat: npt.NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(flat).view(dtype).reshape(shape)


_Pickler.dispatch_table[Tensor] = _reduce_tensor
