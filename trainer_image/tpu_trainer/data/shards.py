"""Streams in shards: which process reads what, in an order that does not depend on how many processes there are.

The shards are read in lanes, whose number depends only on the number of shards. The shards of one pass over the data
after another, each pass in an order of its own, form an endless list. Lane l of L reads entries l, l + L, l + 2L ... of
it from end to end. Example k of the run is the next one of lane k mod L, and process r of w trains on examples r,
r + w, r + 2w ... So the global batches are the same for any w, and if w divides L, a process reads whole lanes that no
other process reads.

No process has to know how long a shard is, or what the others have left: a lane that has read one goes on with its next
one. So nothing is dropped, nobody waits for anybody, and all shards are read equally often, however long they are. An
epoch is then a number of examples, where that number is known, and not an event in the data.
"""

from __future__ import annotations

import copyreg
import inspect
import io
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, islice
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.data.loading import (
    GENERATORS,
    Order,
    Position,
    Workers,
    permutation,
    random_seed,
    seed_generators,
    training_workers,
)
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.task.task import Batch, Task

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MOST_LANES = 256
"""As many as the largest slices of v5e and v6e have chips, so that each has a lane of its own. Not more: a lane is an
open shard, and a process alone has all lanes open."""

_HALF = 2**24
"""float32, which a gather carries, holds all whole numbers up to here."""


class LanePosition(NamedTuple):
    """Where a lane stands: it has taken `taken` examples of shard number `visit` of its own."""

    visit: int = 0
    taken: int = 0


@dataclass(frozen=True)
class LanePlan:
    """What this process reads of a stream of `shards` shards, after the job has taken `start` examples of it.

    places: of the lanes, by lane; a lane that is not there is at its beginning.
    """

    shards: int
    order: Order
    start: int = 0
    places: Mapping[int, LanePosition] = field(default_factory=dict)

    @property
    def lanes(self) -> int:
        """A power of two, like most numbers of processes. Not more than there are shards: two lanes in the same shard
        would give the same examples side by side."""
        return int(2 ** (min(self.shards, MOST_LANES).bit_length() - 1))

    @property
    def step(self) -> int:
        """The process reads every `step`-th lane."""
        return math.gcd(self.order.share.world, self.lanes)

    @property
    def readers(self) -> int:
        """Processes that read each lane: 1, unless the number of processes does not divide the number of lanes."""
        return self.order.share.world // self.step

    @property
    def own_lanes(self) -> range:
        """The lanes that this process reads."""
        return range(self.order.share.rank % self.step, self.lanes, self.step)

    def numbers(self) -> Iterator[int]:
        """The examples that this process reads, by number; endless. Example k is the next one of lane k mod lanes."""
        return count(self.start + (self.order.share.rank - self.start) % self.step, self.step)

    def trains_on(self, number: int) -> bool:
        """Whether an example that this process reads is its own, not only on the way to one."""
        return number % self.order.share.world == self.order.share.rank

    @property
    def reads_per_pass(self) -> int:
        """Examples that the process reads for the rows of one pass."""
        order = self.order
        return order.global_batch // order.share.world // order.passes * self.readers


def plan_lanes(stream: Any, order: Order) -> LanePlan:
    """The plan from `order.start` on.

    Raises:
        UserCodeError: the stream does not say how many shards it has, or not as many as when the checkpoint was made.
    """
    shards, start = shards_of(stream), order.start.dataset or {}
    if order.start == Position():
        return LanePlan(shards, order)
    if start.get("shards") != shards:
        raise UserCodeError(
            f"the task's train dataset has {shards} shards; when the checkpoint was written it had "
            f"{start.get('shards', 'none')}, so the run's place in the data is lost. Give it the same shards, or start "
            "again under another checkpoint.uri"
        )
    places = {int(lane): LanePosition(*place) for lane, place in start["places"].items()}
    return LanePlan(shards, order, int(start["taken"]), places)


def shards_of(stream: Any) -> int:
    """Raises UserCodeError unless the stream says how many shards it has."""
    given = getattr(stream, "num_shards", None)
    if given is None:
        # Its name in older versions of Hugging Face's datasets.
        given = getattr(stream, "n_shards", None)
    if isinstance(given, bool) or not isinstance(given, Integral) or int(given) < 1:
        raise UserCodeError(
            "the task's train dataset has shard(), so it must have num_shards too, the number of its shards (files): a "
            f"whole number above 0, not {given!r}"
        )
    return int(given)


def open_shard(stream: Any, index: int, epoch: int) -> Iterable[Any]:
    """The examples of a shard. Raises what the user's code raises."""
    if hasattr(stream, "set_epoch"):
        stream.set_epoch(epoch)
    shards = shards_of(stream)
    # Hugging Face's datasets have this method with the arguments the other way round.
    named = "num_shards" in inspect.signature(stream.shard).parameters
    shard: Iterable[Any] = stream.shard(num_shards=shards, index=index) if named else stream.shard(index, shards)
    if hasattr(shard, "set_epoch"):
        shard.set_epoch(epoch)
    return shard


Pass = tuple[list[Any], dict[int, LanePosition]]
"""The examples of a pass, and the places of the lanes that it has moved."""


class Lane:
    """Reads one lane. Random numbers that the shards draw depend only on the seed, the shard's place in the list and
    the example's place in the shard, so they are the same for any number of processes, and after a resume."""

    def __init__(self, stream: Any, plan: LanePlan, lane: int) -> None:
        self._stream, self._plan, self._lane = stream, plan, lane
        self.place = plan.places.get(lane, LanePosition())
        self._open: Iterator[Any] | None = None

    def next(self) -> Any:
        """The next example.

        Raises:
            UserCodeError: a shard is empty.
            Exception: what the user's code raises.
        """
        while True:
            if self._open is None:
                self._open = self._opened()
            visit, taken = self.place
            self._seed(taken)
            try:
                example = next(self._open)
            except StopIteration:
                if taken == 0:
                    raise UserCodeError(
                        f"shard {self._shard[1]} of {self._plan.shards} of the task's train dataset is empty: every "
                        "shard must have examples. If num_shards is larger than the number of files, lower it"
                    ) from None
                self._open, self.place = None, LanePosition(visit + 1)
                continue
            self.place = LanePosition(visit, taken + 1)
            return example

    @property
    def _entry(self) -> int:
        """In the endless list of shards."""
        return self._lane + self.place.visit * self._plan.lanes

    @property
    def _shard(self) -> tuple[int, int]:
        """The pass over the data, and the shard."""
        shards = self._plan.shards
        epoch, at = divmod(self._entry, shards)
        return epoch, int(permutation(shards, self._plan.order.seed, epoch)[at])

    def _opened(self) -> Iterator[Any]:
        """The shard's examples from where the lane stands. Not by a state that the shard may have of its own: Hugging
        Face's, for one, loses what is in a shuffle buffer."""
        epoch, index = self._shard
        taken = self.place.taken
        self._seed(0)
        shard: Any = open_shard(self._stream, index, epoch)
        if taken and callable(getattr(shard, "skip", None)):
            shard, taken = shard.skip(taken), 0
        examples: Iterator[Any] = iter(shard)
        for number in range(taken):
            self._seed(number)
            next(examples, None)
        return examples

    def _seed(self, number: int) -> None:
        seed_generators(random_seed(self._plan.order.seed, self._entry, number))


def shard_batches(
    task: Task, plan: LanePlan, first_batch: int, epoch_size: int | None = None
) -> Iterator[tuple[Batch, Position]]:
    """`data.train_batches` for a stream in shards. `epoch_size`: examples of an epoch, if known; otherwise the whole
    run is one.

    Only with the last pass of a step is the position the one after the step; it has the places of this process's lanes,
    and `whole_position` adds the others'.

    Raises:
        UserCodeError: a shard is empty, or the dataset raised.
    """
    order, collate = plan.order, task.collate or default_collate
    places = {str(lane): list(place) for lane, place in plan.places.items()}
    passes = _read_ahead(training_workers(task), plan) if task.workers else _read(task.train, plan)
    for number, (examples, moved) in enumerate(passes):
        taken = plan.start + (number // order.passes + 1) * order.global_batch
        with order.drawing(first_batch + number), user_code("collating a batch"):
            batch = collate(examples)
        places |= {str(lane): list(place) for lane, place in moved.items()}
        epoch = 0 if epoch_size is None else (taken - 1) // epoch_size
        kept = {"shards": plan.shards, "taken": taken, "places": dict(places)}
        yield batch, Position(epoch, taken - epoch * (epoch_size or 0), kept)


def merge_positions(position: Position, backend: Backend, plan: LanePlan) -> Position:
    """The position with the places of all lanes: each process knows those that it reads. A collective."""
    if position.dataset is None or plan.step == 1:
        return position
    places, own = position.dataset["places"], plan.own_lanes
    row = [number for lane in own for part in places.get(str(lane), LanePosition()) for number in divmod(part, _HALF)]
    rows = backend.gather([float(number) for number in row])
    whole: dict[str, list[int]] = {}
    for rank in range(plan.step):
        numbers = [int(number) for number in rows[rank]]
        parts = [high * _HALF + low for high, low in zip(numbers[::2], numbers[1::2], strict=True)]
        for nth, lane in enumerate(range(rank, plan.lanes, plan.step)):
            whole[str(lane)] = parts[2 * nth : 2 * nth + 2]
    return Position(position.epoch, position.offset, {**position.dataset, "places": whole})


def _read(stream: Any, plan: LanePlan) -> Iterator[Pass]:
    """Pass by pass, in this process."""
    lanes = {lane: Lane(stream, plan, lane) for lane in plan.own_lanes}
    numbers = plan.numbers()
    while True:
        with GENERATORS, user_code("the next examples of the task's dataset"):
            made = _one_pass(lanes, plan, numbers)
        yield made


def _one_pass(lanes: Mapping[int, Lane], plan: LanePlan, numbers: Iterator[int]) -> Pass:
    """What `lanes`, all of the process's or those of one of its workers, have for the next pass."""
    examples, moved = [], {}
    for number in islice(numbers, plan.reads_per_pass):
        if (lane := lanes.get(number % plan.lanes)) is None:
            continue
        example = lane.next()
        moved[number % plan.lanes] = lane.place
        if plan.trains_on(number):
            examples.append(example)
    return examples, moved


def _read_ahead(ahead: Workers, plan: LanePlan) -> Iterator[Pass]:
    """The same passes as `_read`, by processes that deal out the lanes among themselves."""
    workers = min(ahead.count, len(plan.own_lanes))
    with user_code("the task's dataset"):
        # A generator of its own: the loader draws a number when it begins.
        loader: DataLoader[Tensor] = DataLoader(
            _Reader(ahead.dataset, plan, workers),
            batch_size=None,
            num_workers=workers,
            worker_init_fn=ahead.begin,
            generator=torch.Generator(),
        )
        # It takes turns among the workers.
        given = iter(loader)
    reader = {lane: nth % workers for nth, lane in enumerate(plan.own_lanes)}
    numbers = plan.numbers()
    while True:
        parts: list[Iterator[Any]] = []
        moved: dict[int, LanePosition] = {}
        for _ in range(workers):
            with user_code("the next examples of the task's dataset"):
                made: Pass | str = _unpacked(next(given))
            if isinstance(made, str):
                raise UserCodeError(made)
            parts.append(iter(made[0]))
            moved |= made[1]
        own = filter(plan.trains_on, islice(numbers, plan.reads_per_pass))
        yield [next(parts[reader[number % plan.lanes]]) for number in own], moved


def forget_worker() -> None:
    """Datasets that find themselves in a worker take a part of what they have, and a shard is such a part already."""
    torch_worker._worker_info = None


class _Reader(IterableDataset[Tensor]):
    """A worker's part of every pass, packed, or the text of an error that the user can mend."""

    def __init__(self, stream: Any, plan: LanePlan, workers: int) -> None:
        self._stream, self._plan, self._workers = stream, plan, workers

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        assert info is not None
        forget_worker()
        plan = self._plan
        lanes = {lane: Lane(self._stream, plan, lane) for lane in plan.own_lanes[info.id :: self._workers]}
        numbers = plan.numbers()
        while True:
            try:
                made: Pass | str = _one_pass(lanes, plan, numbers)
            except UserCodeError as error:
                made = str(error)
            yield _packed(made)


class _Pickler(pickle.Pickler):
    """Tensors as their bytes: torch's own way writes a file for each."""

    dispatch_table = copyreg.dispatch_table.copy()


def _packed(made: Pass | str) -> Tensor:
    """As one tensor, which goes through shared memory: a tensor for every example would take a file of it each."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(made)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> Any:
    # Of this process's own workers.
    return pickle.loads(packed.numpy().data)  # noqa: S301


def _reduced(tensor: Tensor) -> Any:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return _tensor, (flat.numpy(), tensor.dtype, tuple(tensor.shape))


def _tensor(flat: npt.NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(flat).view(dtype).reshape(shape)


_Pickler.dispatch_table[Tensor] = _reduced
