"""Which training examples a process takes in which step: a function of seed and global batch, never of the slice.

Every kind of data is a `TrainingData`: it says which examples this process takes next, where the job then stands, and
how it continues on any slice. Global batch j of an epoch is permutation(seed, epoch)[jB : (j+1)B], or examples
jB .. (j+1)B of a stream; process r of w takes part r of its w equal parts. So the same run on another slice size sees
the same batches in the same order and follows the same trajectory.
"""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, islice
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.task.task import Orders

# On v2 and v3 two replicas are threads of one process and share its generators, so they take turns: each draws the
# numbers of its own seed. Reentrant, because a thread may draw an order while it reads a batch.
GENERATORS = RLock()

Indices = npt.NDArray[np.signedinteger[Any]]


@dataclass(frozen=True)
class Share:
    """A process's part of every global batch: part `rank` of `world` equal ones. `local_rank`: its index among the
    processes of its host."""

    rank: int
    world: int
    local_rank: int = 0


@dataclass(frozen=True)
class Position:
    """The job's place in the training data: it has taken `offset` examples of `epoch`.

    `dataset`: the dataset's own state at that point, as JSON, if it has one (`StreamData`).
    """

    epoch: int = 0
    offset: int = 0
    dataset: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Order:
    """Everything that determines the order of the examples. A step of `global_batch` examples takes `passes` passes,
    equal parts of the process's share; `global_batch` is a multiple of world x passes."""

    global_batch: int
    seed: int
    share: Share
    passes: int = 1
    start: Position = field(default_factory=Position)

    @property
    def rows(self) -> int:
        """The number of this process's rows in a pass."""
        return self.global_batch // self.share.world // self.passes

    def divide(self, batch: Any) -> Iterator[Any]:
        """Yields this process's rows of a global batch, pass by pass."""
        first = self.share.rank * self.passes * self.rows
        for start in range(first, first + self.passes * self.rows, self.rows):
            yield batch[start : start + self.rows]

    @contextmanager
    def seeded(self, batch: int, *, alike: bool = False) -> Iterator[None]:
        """Seeds the generators for reading batch `batch` of the run, counted over all passes. Random numbers depend
        only on the seed, the batch and the process, so a resumed run draws the same ones.

        `alike`: every process draws the same.
        """
        with GENERATORS:
            seed_generators(random_seed(self.seed, batch, 0 if alike else self.share.rank))
            yield


class TrainingData(ABC):
    """Training data of any kind, as one process takes it from `order.start` on."""

    order: Order

    @abstractmethod
    def epoch(self, start: Position, number: int) -> Iterator[tuple[Any, Position]]:
        """Yields this process's examples, or their indices, from `start` to the end of its epoch, pass by pass, each
        with the position after its step. `number`: passes of the run before `start`.

        Raises:
            UserCodeError: the epoch does not fill a global batch, or the user's code raised.
        """

    def passes(self, first: int) -> Iterator[tuple[int, Any, Position]]:
        """Yields what `epoch` does, epoch after epoch, each with its number in the run; endless. `first`: passes done
        before `order.start`."""
        start, number = self.order.start, first
        while True:
            for rows, position in self.epoch(start, number):
                yield number, rows, position
                number += 1
            start = Position(start.epoch + 1)

    def merge(self, position: Position, backend: Backend) -> Position:
        """Returns the job's position, from which any number of processes continues; a collective. `position`: this
        process's."""
        return position

    def describe_sharing(self) -> str | None:
        """Returns a warning about examples that several processes read; None if each reads its own."""
        return None

    def describe_repeat(self) -> str | None:
        """Returns a warning about data that cannot continue at `order.start`; None if it can."""
        return None


@dataclass(frozen=True)
class MapStyleData(TrainingData):
    """Data that an order divides: `units` returns an epoch's indices, or what else is taken undivided."""

    order: Order
    units: Callable[[int], Any]
    name: str = "train dataset"
    kind: str = "examples"

    @classmethod
    def of(cls, size: int, order: Order, custom: Orders | None = None) -> MapStyleData:
        """Returns `size` examples in the `custom` order, or each once in every epoch."""
        name = "train dataset" if custom is None else "order"
        return cls(order, lambda epoch: epoch_order(size, order.seed, epoch, custom), name)

    def epoch(self, start: Position, number: int) -> Iterator[tuple[Any, Position]]:
        units, batch = self.units(start.epoch), self.order.global_batch
        if len(units) < batch:
            raise _too_short(self.order, start.epoch, len(units), self.name, self.kind)
        for end in range(start.offset + batch, len(units) + 1, batch):
            for rows in self.order.divide(units[end - batch : end]):
                yield rows, Position(start.epoch, end)


@dataclass(frozen=True)
class StreamData(TrainingData):
    """An iterable dataset in its own order.

    Every process reads the whole stream and collates only its own rows, so a stream should yield cheap records and
    decode them in `collate`. It is iterated again for every epoch, after `set_epoch(epoch)` if it has that. With
    `state_dict()` and `load_state_dict()` it continues inside an epoch; otherwise the epoch begins again
    (`describe_repeat`). `workers`: those of the task, which a stream does not use. `seen`: gets every global batch, and
    what is left at an epoch's end.
    """

    order: Order
    dataset: Any
    workers: int = 0
    seen: Callable[[Sequence[Any]], object] = len

    def epoch(self, start: Position, number: int) -> Iterator[tuple[Any, Position]]:
        position = self._restore(start)
        for batch in self.global_batches(start.epoch, number):
            self.seen(batch)
            if len(batch) == self.order.global_batch:
                with user_code("state_dict() of the task's dataset"):
                    position = Position(start.epoch, position.offset + len(batch), _state_of(self.dataset))
                for rows in self.order.divide(batch):
                    yield rows, position
            elif position.offset == 0:
                raise _too_short(self.order, start.epoch, len(batch))

    def global_batches(self, epoch: int, number: int) -> Iterator[list[Any]]:
        """Yields an epoch's global batches, and last what is left, which may be empty."""
        # All processes must read the same stream, so a shuffle must draw the same numbers in each.
        with self.order.seeded(number, alike=True), user_code("the task's dataset"):
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            examples: Iterator[Any] = iter(self.dataset)
        for first in count(number, self.order.passes):
            with self.order.seeded(first, alike=True), user_code("the next examples of the task's dataset"):
                batch = list(islice(examples, self.order.global_batch))
            yield batch
            if len(batch) < self.order.global_batch:
                return

    def _restore(self, start: Position) -> Position:
        """Puts the dataset at `start`, or returns the beginning of its epoch if that is impossible."""
        if start.offset == 0:
            return start
        if self.describe_repeat() is not None:
            return Position(start.epoch)
        with user_code("load_state_dict() of the task's dataset"):
            self.dataset.load_state_dict(start.dataset)
        return start

    def describe_sharing(self) -> str | None:
        remarks, world = [], self.order.share.world
        if world > 1:
            remarks.append(
                f"each of the {world} processes reads all of it and uses 1/{world}: it is read {world} times"
            )
        if self.workers:
            remarks.append(f"the task's {self.workers} workers are not used for it: the process itself reads")
        if not remarks:
            return None
        return (
            f"the train dataset is one stream; {', and '.join(remarks)}. With num_shards and shard(index, count) each "
            "process reads its own shards, with workers (docs/data.md)"
        )

    def describe_repeat(self) -> str | None:
        start = self.order.start
        lacking = [f"no {name}()" for name in ("state_dict", "load_state_dict") if not hasattr(self.dataset, name)]
        if start.offset == 0 or not (lacking or start.dataset is None):
            return None
        why = "the checkpoint has no state of the train data"
        if lacking:
            why = f"the train dataset has {' and '.join(lacking)}"
        return (
            f"{why}: epoch {start.epoch} begins again, and the {start.offset} examples that the run has used of it are "
            "trained on once more (docs/data.md)"
        )


def seed_generators(value: int) -> None:
    """Seeds every generator on the host that user code may draw from."""
    random.seed(value)
    # numpy's global generator takes 32 bits.
    np.random.seed(value % 2**32)
    torch.default_generator.manual_seed(value)


@contextmanager
def keep_generators() -> Iterator[None]:
    """Restores the states of the host's generators after the block."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


@contextmanager
def seeded_for_epoch(seed: int, epoch: int) -> Iterator[None]:
    """Seeds the generators for drawing the order of an epoch, the same in every process, and restores them after it."""
    with GENERATORS, keep_generators():
        seed_generators(random_seed(seed, epoch, 0))
        yield


def random_seed(seed: int, count: int, rank: int) -> int:
    """Derives a seed of 63 bits from the run's seed, the step or batch, and the process."""
    mixed = np.random.SeedSequence((seed, count, rank)).generate_state(1, np.uint64)
    return int(mixed[0]) >> 1


def permutation(size: int, seed: int, epoch: int) -> Indices:
    """Returns the order of `size` examples in an epoch.

    Drawn by numpy, because torch's generator keeps only the low 32 bits of a seed, so seed and epoch would have to be
    mixed by hand.
    """
    order: Indices = np.arange(size, dtype=_index_type(size))
    # numpy splits the numbers into 32-bit words, so the larger number comes last: (2**32, 0) would equal (0, 1).
    np.random.default_rng((epoch, seed)).shuffle(order)
    return order


def epoch_order(size: int, seed: int, epoch: int, custom: Orders | None) -> Indices:
    """Returns the indices of an epoch's examples in order: those of the `custom` order, or each of `size` once.

    A custom order is drawn with generators that depend on seed and epoch only; their states are restored.

    Raises:
        UserCodeError: the task's order raised, or is not a list of indices of the dataset.
    """
    if custom is None:
        return permutation(size, seed, epoch)
    with seeded_for_epoch(seed, epoch), user_code("the task's order"):
        order = np.asarray(custom(epoch, seed, size))
    if order.ndim != 1 or not np.issubdtype(order.dtype, np.integer):
        raise UserCodeError(
            f"the task's order of epoch {epoch} must be a list of whole numbers, got {order.dtype} of shape "
            f"{list(order.shape)}"
        )
    if order.size and not 0 <= order.min() <= order.max() < size:
        wrong = order.min() if order.min() < 0 else order.max()
        raise UserCodeError(f"the task's order of epoch {epoch} has the index {wrong}; the dataset has 0 to {size - 1}")
    return order.astype(_index_type(size))


def _index_type(size: int) -> type[np.signedinteger[Any]]:
    """Returns the smallest type that suffices: every process of a host holds an order."""
    return np.int32 if size < 2**31 else np.int64


def _state_of(dataset: Any) -> Mapping[str, Any] | None:
    """Returns a copy of the dataset's state, which the next example may change in place."""
    if not hasattr(dataset, "state_dict"):
        return None
    state = dataset.state_dict()
    try:
        copied: Mapping[str, Any] = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise UserCodeError(f"state_dict() of the task's train dataset must hold JSON values only: {error}") from error
    return copied


def _too_short(
    order: Order, epoch: int, size: int, name: str = "train dataset", kind: str = "examples"
) -> UserCodeError:
    return UserCodeError(
        f"epoch {epoch} of the task's {name} has {size} {kind}, fewer than one global batch of {order.global_batch}; "
        "more data, a smaller slice or a smaller recipe.globalBatchSize is needed"
    )
