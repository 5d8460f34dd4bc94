"""Which training examples a process sees in which step: a function of seed and global batch, never of the slice.

Global batch j of an epoch is permutation(seed, epoch)[jB : (j+1)B], or examples jB .. (j+1)B of a stream; process r of
w takes its r-th w-th part. So the same run on another slice size sees the same batches in the same order and follows
the same trajectory.
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

# On v2 and v3 two replicas are threads of one process and share its generators: they take turns, or neither would draw
# the numbers of its own seed. One thread may take it twice: an order is drawn while a batch is read.
GENERATORS = RLock()

Indices = npt.NDArray[np.signedinteger[Any]]


@dataclass(frozen=True)
class Share:
    """A process's part of every global batch: part `rank` of `world` equal ones. `local_rank`: its place among the
    processes of its host."""

    rank: int
    world: int
    local_rank: int = 0


@dataclass(frozen=True)
class Position:
    """Where the training data stands: the whole job has taken `offset` examples of `epoch`.

    `dataset`: JSON state of the dataset itself at that point, if it has one (`stream_batches`).
    """

    epoch: int = 0
    offset: int = 0
    dataset: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Order:
    """What decides the order of the examples. A step of `global_batch` examples takes `passes` passes, equal parts of
    the process's share; `global_batch` is a multiple of world x passes."""

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

    def in_passes(self, own: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """The process's rows of a step, pass by pass."""
        rows = len(own) // self.passes
        for start in range(0, len(own), rows):
            yield own[start : start + rows]

    @contextmanager
    def drawing(self, batch: int, *, alike: bool = False) -> Iterator[None]:
        """Around the reading of batch `batch` of the run, counted over all passes. What is drawn there depends only on
        the seed, the batch and the process, so a resumed run draws what it would have drawn.

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
        """Calls `init` in a worker, as the loader's worker_init_fn."""
        if self.init is not None:
            # The loader may have another one, which reads the task's.
            vars(get_worker_info())["dataset"] = self.dataset
            self.init(number)


NO_WORKERS = Workers()
"""The process itself reads."""


def seed_generators(value: int) -> None:
    """Seeds every generator on the host that user code may draw from."""
    random.seed(value)
    # numpy's global generator takes 32 bits.
    np.random.seed(value % 2**32)
    torch.default_generator.manual_seed(value)


@contextmanager
def keep_generators() -> Iterator[None]:
    """Restores the host's generators after the block."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


def random_seed(seed: int, count: int, rank: int) -> int:
    """63 bits for one use of random numbers: the run's seed, the step or batch, the process."""
    mixed = np.random.SeedSequence((seed, count, rank)).generate_state(1, np.uint64)
    return int(mixed[0]) >> 1


def permutation(size: int, seed: int, epoch: int) -> Indices:
    """The order of `size` examples in an epoch.

    numpy's generator, because torch's keeps only the low 32 bits of a seed: seed and epoch would have to be mixed by
    hand.
    """
    order: Indices = np.arange(size, dtype=_index_type(size))
    # numpy lays the numbers out as 32-bit words; the one that may need several goes last, or (2**32, 0) is (0, 1).
    np.random.default_rng((epoch, seed)).shuffle(order)
    return order


def epoch_order(size: int, seed: int, epoch: int, own: Orders | None) -> Indices:
    """The examples of an epoch, in order: the task's own choice of `size` of them, or each once.

    The own order is drawn with generators that depend on seed and epoch only, and leaves no trace in them.

    Raises:
        UserCodeError: the task's order raised, or is not a list of indices of the dataset.
    """
    if own is None:
        return permutation(size, seed, epoch)
    with GENERATORS, keep_generators(), user_code("the task's order"):
        seed_generators(random_seed(seed, epoch, 0))
        given = np.asarray(own(epoch, seed, size))
    if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer):
        raise UserCodeError(
            f"the task's order of epoch {epoch} must be a list of whole numbers, got {given.dtype} of shape "
            f"{list(given.shape)}"
        )
    if given.size and not 0 <= given.min() <= given.max() < size:
        wrong = given.min() if given.min() < 0 else given.max()
        raise UserCodeError(f"the task's order of epoch {epoch} has the index {wrong}; the dataset has 0 to {size - 1}")
    return given.astype(_index_type(size))


def _index_type(size: int) -> type[np.signedinteger[Any]]:
    """Half the memory where it will do: every process of a host holds an order."""
    return np.int32 if size < 2**31 else np.int64


def global_batches(size: int, order: Order, own: Orders | None = None) -> Iterator[tuple[Indices, Position]]:
    """The example indices of every step of the whole job, each with the position after it; endless.

    It begins at `order.start`, wherever that is in its epoch, and drops what is left of an epoch and does not fill a
    batch. `own`: the task's order.

    Raises:
        UserCodeError: an epoch does not fill a batch; as `epoch_order`.
    """
    epoch, offset = order.start.epoch, order.start.offset
    while True:
        ordered = epoch_order(size, order.seed, epoch, own)
        if len(ordered) < order.global_batch:
            what = "the task's train dataset" if own is None else f"the task's order of epoch {epoch}"
            raise _too_short(what, len(ordered), order)
        while offset + order.global_batch <= len(ordered):
            offset += order.global_batch
            yield ordered[offset - order.global_batch : offset], Position(epoch, offset)
        epoch, offset = epoch + 1, 0


class PassSampler:
    """A batch sampler: the example indices of this process's rows for every pass; endless.

    positions: of each pass that it has given, the position after its whole step. Who takes a pass takes its position,
    so the order of an epoch is made once.
    """

    def __init__(self, size: int, order: Order, own: Orders | None = None) -> None:
        self._size, self._order, self._own = size, order, own
        self.positions: deque[Position] = deque()

    def __iter__(self) -> Iterator[epochs.Indices]:
        for whole, position in global_batches(self._size, self._order, self._own):
            for own in self._order.in_passes(whole[self._order.own_rows].tolist()):
                self.positions.append(position)
                yield epochs.Indices(own, position.epoch)


def train_batches(task: Task, order: Order, first_batch: int) -> Iterator[tuple[Batch, Position]]:
    """This process's part of every step of a map-style dataset, pass by pass, on the CPU; endless.

    Each comes with the position after its whole step. `first_batch`: passes done before `order.start`.

    Raises:
        UserCodeError: the dataset is shorter than one global batch, or raised.
    """
    sampler = PassSampler(length_of(task.train, "train"), order, task.order)
    drawn = random_seed(order.seed, first_batch, order.share.rank)
    dataset: Any = epochs.EpochDataset(task.train) if any(epochs.with_epochs(task.train)) else task.train
    batches = load(dataset, sampler, task.collate, training_workers(task), drawn)
    for number in count(first_batch):
        with order.drawing(number):
            batch = next(batches)
        yield batch, sampler.positions.popleft()


def stream_batches(
    task: Task,
    order: Order,
    first_batch: int,
    seen: Callable[[Sequence[Any]], None] | None = None,
) -> Iterator[tuple[Batch, Position]]:
    """`train_batches` for an iterable dataset, in the order in which its examples come.

    Every process reads the whole stream and collates only its own rows, so a stream should yield cheap records and
    decode them in `collate`. It is iterated again for every epoch, after `set_epoch(epoch)` if it has that. With
    `state_dict()` and `load_state_dict()` it continues inside an epoch; otherwise the epoch begins again (`repeated`).
    `seen` is given the examples of the first global batch, also if they do not fill it.

    Raises:
        UserCodeError: an epoch does not fill a batch, or the dataset raised.
    """
    collate = task.collate or default_collate
    start = _continued(task.train, order.start)
    epoch, offset, batch = start.epoch, start.offset, first_batch
    while True:
        # All processes must read the same stream: what shuffles it draws the same in each.
        with order.drawing(batch, alike=True), user_code("the task's dataset"):
            if hasattr(task.train, "set_epoch"):
                task.train.set_epoch(epoch)
            examples: Iterator[Any] = iter(task.train)  # type: ignore[arg-type]
        begun = offset
        while True:
            with order.drawing(batch, alike=True), user_code("the next examples of the task's dataset"):
                whole = list(islice(examples, order.global_batch))
            if seen is not None and batch == first_batch:
                seen(whole)
            if len(whole) < order.global_batch:
                break
            with user_code("state_dict() of the task's dataset"):
                position = Position(epoch, offset := offset + order.global_batch, state_of(task.train))
            for own in order.in_passes(whole[order.own_rows]):
                with order.drawing(batch), user_code("collating a batch"):
                    collated = collate(list(own))
                batch += 1
                yield collated, position
        if offset == begun == 0:
            raise _too_short(f"epoch {epoch} of the task's train dataset", len(whole), order)
        epoch, offset = epoch + 1, 0


def _continued(dataset: Any, start: Position) -> Position:
    """Puts the dataset where `start` is, or returns the beginning of its epoch if that cannot be done."""
    if describe_repeat(dataset, start) is not None:
        return Position(start.epoch, 0)
    if start.offset:
        with user_code("load_state_dict() of the task's dataset"):
            dataset.load_state_dict(start.dataset)
    return start


def describe_repeat(dataset: Any, start: Position) -> str | None:
    """Returns what to say of a stream that cannot continue inside the epoch; None if it can."""
    lacking = [f"no {name}()" for name in ("state_dict", "load_state_dict") if not hasattr(dataset, name)]
    if start.offset == 0 or not (lacking or start.dataset is None):
        return None
    why = "the checkpoint has no state of the train data"
    if lacking:
        why = f"the train dataset has {' and '.join(lacking)}"
    return (
        f"{why}: epoch {start.epoch} begins again, and the {start.offset} examples that the run had taken of it are "
        "trained on once more (docs/data.md)"
    )


def describe_resize(dataset: object, before: int | None, start: Position) -> str | None:
    """Returns what to say of map-style data that had `before` examples when the checkpoint was written; None if it
    still has, or if that is not known."""
    if before is None or not has_length(dataset) or (now := length_of(dataset, "train")) == before:
        return None
    rest = (
        f"the rest of epoch {start.epoch} follows another order, so that some of its examples are trained on twice and "
        "others not at all; from the next epoch on all are"
        if start.offset
        else f"from epoch {start.epoch} on, all of them are trained on"
    )
    return f"the task's train dataset has {now} examples, and had {before} when the checkpoint was written: {rest}"


def state_of(dataset: Any) -> Mapping[str, Any] | None:
    """A copy of the dataset's state: the next example may change it in place."""
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
    """The collated batches that `batches` (lists of indices) names, read ahead by `workers`. Their random numbers begin
    with `seed`.

    Raises:
        UserCodeError: the dataset raised, including StopIteration, which would pass for the loader's own end.
    """
    # A generator of its own: the loader draws a number when it begins, wherever in a run that is.
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
    """Raises UserCodeError for a loader whose class makes its batches by itself: it would never be iterated."""
    for method in ("__iter__", "_get_iterator"):
        owner = next(kind for kind in type(loader).__mro__ if method in vars(kind))
        if owner.__module__.partition(".")[0] not in ("torch", "torchdata"):
            raise UserCodeError(
                f"{name}: {owner.__name__} has an {method} of its own, which would never be called: the trainer orders "
                "and divides the examples, and takes only the dataset, the sampler, collate_fn, and the workers of a "
                "DataLoader. Do to the batches what it does in collate_fn, on_after_batch_transfer or the step itself"
            )


def has_length(dataset: object) -> bool:
    """Whether the dataset is map-style. An iterable one may know its length too, but has no indices."""
    indexed = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    return indexed and hasattr(dataset, "__len__")


def is_sharded(dataset: object) -> bool:
    """Whether the dataset is a stream in parts that can be read by themselves (`task.ShardedStream`)."""
    return not has_length(dataset) and callable(getattr(dataset, "shard", None))


def length_of(dataset: Any, name: str) -> int:
    """Examples of a map-style dataset; `name` is what the task calls it."""
    if not has_length(dataset):
        raise UserCodeError(f"the task's {name} dataset has no length; it must be map-style (len() and [i])")
    with user_code(f"len() of the task's {name} dataset"):
        return len(dataset)


def epochs_of(task: Task, steps: int, global_batch: int) -> int | None:
    """Counts the epochs that are begun in so many steps; None if it is unknown how many examples an epoch has."""
    sized = task.train if task.order is None else task.order
    if not has_length(task.train) or not hasattr(sized, "__len__"):
        return None
    size = len(sized)  # type: ignore[arg-type]
    return -(-steps // max(1, size // global_batch))


def evaluation_size(task: Task) -> int:
    """Examples to evaluate on, over all of the task's held-out datasets; 0 for a task without evaluation."""
    return sum(length_of(dataset, name_held_out(name)) for name, dataset in held_out(task).items())


def training_workers(task: Task) -> Workers:
    return Workers(task.workers, task.worker_init, task.train)


def evaluation_workers(task: Task, dataset: Dataset[Any]) -> Workers:
    """Returns the processes that read one of the held-out datasets ahead."""
    count = task.workers if task.evaluation_workers is None else task.evaluation_workers
    return Workers(count, task.evaluation_worker_init, dataset)


def held_out(task: Task) -> dict[str, Dataset[Any]]:
    """The task's held-out datasets by name; "" is the name of the only one."""
    if task.evaluation is None:
        return {}
    return dict(task.evaluation) if isinstance(task.evaluation, Mapping) else {"": task.evaluation}


def name_held_out(name: str) -> str:
    """What messages call a held-out dataset."""
    return f'evaluation["{name}"]' if name else "evaluation"


def size_difference(stated: int | None, dataset: object, steps: int, global_batch: int) -> str | None:
    """What to say if the dataset is not of the `stated` size, from which `steps` were derived; else None.

    Also None if no size is stated, and for data without a length.

    Raises:
        UserCodeError: the sizes differ by more than one percent.
    """
    if stated is None or not has_length(dataset):
        return None
    found = length_of(dataset, "train")
    if found == stated:
        return None
    said = (
        f"recipe.datasetSize is {stated}, and the task's train dataset has {found} examples: the {steps} steps of "
        f"{global_batch} are {steps * global_batch / max(found, 1):.4g} epochs of it, not the "
        f"{steps * global_batch / stated:.4g} that they would be of {stated}"
    )
    if abs(found - stated) * 100 > stated:
        raise UserCodeError(f"{said}. Set recipe.datasetSize to {found}, or correct the data")
    return said
