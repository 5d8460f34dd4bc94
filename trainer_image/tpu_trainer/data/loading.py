"""Which training examples a process sees in which step: a function of seed and global batch, never of the slice.

Global batch j of an epoch is permutation(seed, epoch)[jB : (j+1)B], or examples jB .. (j+1)B of a stream; process r of
w takes part r of its w equal parts. So the same run on another slice size sees the same batches in the same order and
follows the same trajectory.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, islice
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.data import epochs
from tpu_trainer.task.task import Batch, Collate, Orders, Task

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

    `dataset`: the dataset's own state at that point, as JSON, if it has one (`stream_batches`).
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
    def own_rows(self) -> slice:
        """This process's rows of a global batch."""
        rows = self.global_batch // self.share.world
        return slice(self.share.rank * rows, (self.share.rank + 1) * rows)

    def split_passes(self, examples: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Yields the process's rows of a step, pass by pass."""
        rows = len(examples) // self.passes
        for start in range(0, len(examples), rows):
            yield examples[start : start + rows]

    @contextmanager
    def seeded(self, batch: int, *, alike: bool = False) -> Iterator[None]:
        """Seeds the generators for reading batch `batch` of the run, counted over all passes. Random numbers depend
        only on the seed, the batch and the process, so a resumed run draws the same ones.

        `alike`: every process draws the same.
        """
        with GENERATORS:
            seed_generators(random_seed(self.seed, batch, 0 if alike else self.share.rank))
            yield


@dataclass(frozen=True)
class Workers:
    """Processes that read `dataset` ahead. `init`: called in each with its number, before it reads."""

    count: int = 0
    init: Callable[[int], object] | None = None
    dataset: Any = None

    def begin(self, number: int) -> None:
        """Calls `init` in a worker; the loader's worker_init_fn."""
        if self.init is not None:
            # The loader may have a wrapper around the task's dataset.
            vars(get_worker_info())["dataset"] = self.dataset
            self.init(number)


NO_WORKERS = Workers()
"""The process itself reads the data."""


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
    with GENERATORS, keep_generators(), user_code("the task's order"):
        seed_generators(random_seed(seed, epoch, 0))
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


def global_batches(size: int, order: Order, custom: Orders | None = None) -> Iterator[tuple[Indices, Position]]:
    """Yields the example indices of every step of the job, each with the position after it; endless.

    Begins at `order.start`, wherever that is in its epoch, and drops the rest of an epoch that does not fill a batch.
    `custom`: the task's order.

    Raises:
        UserCodeError: an epoch does not fill a batch; as `epoch_order`.
    """
    epoch, offset = order.start.epoch, order.start.offset
    while True:
        ordered = epoch_order(size, order.seed, epoch, custom)
        if len(ordered) < order.global_batch:
            what = "the task's train dataset" if custom is None else f"the task's order of epoch {epoch}"
            raise _too_short(what, len(ordered), order)
        while offset + order.global_batch <= len(ordered):
            offset += order.global_batch
            yield ordered[offset - order.global_batch : offset], Position(epoch, offset)
        epoch, offset = epoch + 1, 0


class PassSampler:
    """A batch sampler that yields the example indices of this process's rows for every pass; endless.

    positions: for each pass that was yielded, the position after its step; the consumer removes them.
    """

    def __init__(self, size: int, order: Order, custom: Orders | None = None) -> None:
        self._size, self._order, self._custom = size, order, custom
        self.positions: deque[Position] = deque()

    def __iter__(self) -> Iterator[epochs.Indices]:
        for batch, position in global_batches(self._size, self._order, self._custom):
            for indices in self._order.split_passes(batch[self._order.own_rows].tolist()):
                self.positions.append(position)
                yield epochs.Indices(indices, position.epoch)


def train_batches(task: Task, order: Order, first_batch: int) -> Iterator[tuple[Batch, Position]]:
    """Yields this process's part of every step of a map-style dataset, pass by pass, on the CPU; endless.

    Each comes with the position after its step. `first_batch`: passes done before `order.start`.

    Raises:
        UserCodeError: the dataset is shorter than one global batch, or raised.
    """
    sampler = PassSampler(length_of(task.train, "train"), order, task.order)
    drawn = random_seed(order.seed, first_batch, order.share.rank)
    dataset: Any = epochs.EpochDataset(task.train) if any(epochs.with_epochs(task.train)) else task.train
    batches = load(dataset, sampler, task.collate, training_workers(task), drawn)
    for number in count(first_batch):
        with order.seeded(number):
            batch = next(batches)
        yield batch, sampler.positions.popleft()


def stream_batches(
    task: Task,
    order: Order,
    first_batch: int,
    seen: Callable[[Sequence[Any]], None] | None = None,
) -> Iterator[tuple[Batch, Position]]:
    """Does what `train_batches` does for an iterable dataset, in the dataset's own order.

    Every process reads the whole stream and collates only its own rows, so a stream should yield cheap records and
    decode them in `collate`. It is iterated again for every epoch, after `set_epoch(epoch)` if it has that. With
    `state_dict()` and `load_state_dict()` it continues inside an epoch; otherwise the epoch begins again
    (`describe_repeat`). `seen` gets the examples of the first global batch, even if they do not fill it.

    Raises:
        UserCodeError: an epoch does not fill a batch, or the dataset raised.
    """
    collate = task.collate or default_collate
    start = _restore(task.train, order.start)
    epoch, offset, batch = start.epoch, start.offset, first_batch
    while True:
        # All processes must read the same stream, so a shuffle must draw the same numbers in each.
        with order.seeded(batch, alike=True), user_code("the task's dataset"):
            if hasattr(task.train, "set_epoch"):
                task.train.set_epoch(epoch)
            examples: Iterator[Any] = iter(task.train)  # type: ignore[arg-type]
        epoch_start = offset
        while True:
            with order.seeded(batch, alike=True), user_code("the next examples of the task's dataset"):
                global_batch = list(islice(examples, order.global_batch))
            if seen is not None and batch == first_batch:
                seen(global_batch)
            if len(global_batch) < order.global_batch:
                break
            with user_code("state_dict() of the task's dataset"):
                position = Position(epoch, offset := offset + order.global_batch, state_of(task.train))
            for rows in order.split_passes(global_batch[order.own_rows]):
                with order.seeded(batch), user_code("collating a batch"):
                    collated = collate(list(rows))
                batch += 1
                yield collated, position
        if offset == epoch_start == 0:
            raise _too_short(f"epoch {epoch} of the task's train dataset", len(global_batch), order)
        epoch, offset = epoch + 1, 0


def _restore(dataset: Any, start: Position) -> Position:
    """Puts the dataset at `start`, or returns the beginning of its epoch if that is impossible."""
    if describe_repeat(dataset, start) is not None:
        return Position(start.epoch, 0)
    if start.offset:
        with user_code("load_state_dict() of the task's dataset"):
            dataset.load_state_dict(start.dataset)
    return start


def describe_repeat(dataset: Any, start: Position) -> str | None:
    """Returns a warning about a stream that cannot continue inside the epoch; None if it can."""
    lacking = [f"no {name}()" for name in ("state_dict", "load_state_dict") if not hasattr(dataset, name)]
    if start.offset == 0 or not (lacking or start.dataset is None):
        return None
    why = "the checkpoint has no state of the train data"
    if lacking:
        why = f"the train dataset has {' and '.join(lacking)}"
    return (
        f"{why}: epoch {start.epoch} begins again, and the {start.offset} examples that the run has used of it are "
        "trained on once more (docs/data.md)"
    )


def describe_resize(dataset: object, before: int | None, start: Position) -> str | None:
    """Returns a warning if map-style data no longer has the `before` examples of the checkpoint; None if it has, or if
    that is unknown."""
    if before is None or not has_length(dataset) or (now := length_of(dataset, "train")) == before:
        return None
    rest = (
        f"the rest of epoch {start.epoch} follows another order, so that some of its examples are trained on twice and "
        "others not at all; from the next epoch on, all of them are used"
        if start.offset
        else f"from epoch {start.epoch} on, all of them are used"
    )
    return f"the task's train dataset has {now} examples, and had {before} when the checkpoint was written: {rest}"


def state_of(dataset: Any) -> Mapping[str, Any] | None:
    """Returns a copy of the dataset's state, which the next example may change in place."""
    if not hasattr(dataset, "state_dict"):
        return None
    state = dataset.state_dict()
    try:
        copied: Mapping[str, Any] = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise UserCodeError(f"state_dict() of the task's train dataset must hold JSON values only: {error}") from error
    return copied


def _too_short(what: str, size: int, order: Order) -> UserCodeError:
    return UserCodeError(
        f"{what} has {size} examples, fewer than one global batch of {order.global_batch}; "
        "more data, a smaller slice or a smaller recipe.globalBatchSize is needed"
    )


def load(
    dataset: Any,
    batches: Sequence[list[int]] | PassSampler,
    collate: Collate | None,
    workers: Workers = NO_WORKERS,
    seed: int = 0,
) -> Iterator[Batch]:
    """Yields the collated batches of `batches` (lists of indices), read ahead by `workers`, whose generators start with
    `seed`.

    Raises:
        UserCodeError: the dataset raised. That includes StopIteration, which would look like the loader's own end.
    """
    # A separate generator, because the loader draws a number whenever it begins.
    generator = torch.Generator().manual_seed(seed)
    with user_code("the task's dataset"):
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=batches,
            collate_fn=collate,
            num_workers=workers.count,
            worker_init_fn=workers.begin,
            generator=generator,
        )
        iterator = iter(loader)
    for _ in count() if isinstance(batches, PassSampler) else batches:
        with user_code("the next batch of the task's dataset"):
            batch = next(iterator)
        yield batch


def refuse_own_iterator(loader: DataLoader[Any], name: str) -> None:
    """Raises UserCodeError for a loader whose class makes its batches itself: it would never be iterated."""
    for method in ("__iter__", "_get_iterator"):
        owner = next(kind for kind in type(loader).__mro__ if method in vars(kind))
        if owner.__module__.partition(".")[0] not in ("torch", "torchdata"):
            raise UserCodeError(
                f"{name}: {owner.__name__} has its own {method}, which would never be called: the trainer orders and "
                "divides the examples, and takes only the dataset, the sampler, collate_fn, and the workers from a "
                "DataLoader. Change the batches in collate_fn, on_after_batch_transfer or the step instead"
            )


def has_length(dataset: object) -> bool:
    """Returns whether the dataset is map-style. An iterable one may know its length, too, but has no indices."""
    indexed = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    return indexed and hasattr(dataset, "__len__")


def is_sharded(dataset: object) -> bool:
    """Returns whether the dataset is a stream in parts that can be read separately (`task.ShardedStream`)."""
    return not has_length(dataset) and callable(getattr(dataset, "shard", None))


def length_of(dataset: Any, name: str) -> int:
    """Returns the number of examples of a map-style dataset; `name` is what the task calls it."""
    if not has_length(dataset):
        raise UserCodeError(f"the task's {name} dataset has no length; it must be map-style (len() and [i])")
    with user_code(f"len() of the task's {name} dataset"):
        return len(dataset)


def epochs_of(task: Task, steps: int, global_batch: int) -> int | None:
    """Counts the epochs begun in `steps` steps; None if the number of examples of an epoch is unknown."""
    sized = task.train if task.order is None else task.order
    if not has_length(task.train) or not hasattr(sized, "__len__"):
        return None
    size = len(sized)  # type: ignore[arg-type]
    return -(-steps // max(1, size // global_batch))


def evaluation_size(task: Task) -> int:
    """Returns the number of examples in all of the task's held-out datasets; 0 for a task without evaluation."""
    return sum(length_of(dataset, name_held_out(name)) for name, dataset in held_out(task).items())


def training_workers(task: Task) -> Workers:
    return Workers(task.workers, task.worker_init, task.train)


def evaluation_workers(task: Task, dataset: Dataset[Any]) -> Workers:
    """Returns the processes that read one of the held-out datasets ahead."""
    count = task.workers if task.evaluation_workers is None else task.evaluation_workers
    return Workers(count, task.evaluation_worker_init, dataset)


def held_out(task: Task) -> dict[str, Dataset[Any]]:
    """Returns the task's held-out datasets by name; a single dataset has the name ""."""
    if task.evaluation is None:
        return {}
    return dict(task.evaluation) if isinstance(task.evaluation, Mapping) else {"": task.evaluation}


def name_held_out(name: str) -> str:
    """Returns the name of a held-out dataset in messages."""
    return f'evaluation["{name}"]' if name else "evaluation"


def size_difference(stated: int | None, dataset: object, steps: int, global_batch: int) -> str | None:
    """Returns a warning if the dataset does not have the `stated` size, from which `steps` were derived.

    None if it does, if no size is stated, and for data without a length.

    Raises:
        UserCodeError: the sizes differ by more than one percent.
    """
    if stated is None or not has_length(dataset):
        return None
    size = length_of(dataset, "train")
    if size == stated:
        return None
    text = (
        f"recipe.datasetSize is {stated}, but the task's train dataset has {size} examples: the {steps} steps of "
        f"{global_batch} are {steps * global_batch / max(size, 1):.4g} epochs of it, not the "
        f"{steps * global_batch / stated:.4g} that they would be of {stated}"
    )
    if abs(size - stated) * 100 > stated:
        raise UserCodeError(f"{text}. Set recipe.datasetSize to {size}, or correct the data")
    return text
