"""Which training examples a process sees in which step: a function of seed and global batch, never of the slice.

Global batch j of an epoch is permutation(seed, epoch)[jB : (j+1)B], and process r of w takes its r-th w-th part. So the
same run on another slice size sees the same batches in the same order, and its trajectory is the same. Datasets without
a length are read by `stream`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tpu_trainer.errors import UserCodeError, user_code
from tpu_trainer.task import Batch, Task

# On v2 and v3 two replicas are threads of one process and share its generators: they take turns, or neither would draw
# the numbers that belong to its seed.
GENERATORS = Lock()


@dataclass(frozen=True)
class Share:
    """The part of every global batch that falls to one process: `rank` of `world`, equal parts. `local_rank`: its
    place among the processes of its host."""

    rank: int
    world: int
    local_rank: int = 0


@dataclass(frozen=True)
class Position:
    """Where the training data stands: `offset` examples of `epoch` have been taken by the whole job.

    `dataset` is the own state there of a dataset that has one (`stream`); JSON values.
    """

    epoch: int = 0
    offset: int = 0
    dataset: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Order:
    """What decides the order of the examples. A step of `global_batch` examples has `passes` passes, equal parts of the
    process's part; `global_batch` is a multiple of world x passes."""

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
        """Around the reading of batch `batch` of the run, counted over all passes: what is drawn there depends on the
        seed, the batch and the process alone, so that a run that continues draws what it would have drawn.

        `alike`: every process draws the same.
        """
        with GENERATORS:
            seed_generators(random_seed(self.seed, batch, 0 if alike else self.share.rank))
            yield


def seed_generators(value: int) -> None:
    """Every generator of the host that user code may draw from."""
    random.seed(value)
    # numpy's global generator takes 32 bits.
    np.random.seed(value % 2**32)
    torch.default_generator.manual_seed(value)


@contextmanager
def kept_generators() -> Iterator[None]:
    """What is drawn while the block runs is drawn again after it, by whoever draws next."""
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


def permutation(size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of `size` examples in an epoch.

    numpy's generator and not torch's: the latter keeps only the low 32 bits of a seed, so seed and epoch
    would have to be mixed by hand.
    """
    # numpy lays the numbers out as 32-bit words; the one that may need several goes last, or (2**32, 0) is (0, 1).
    return np.random.default_rng((epoch, seed)).permutation(size)


def global_batches(size: int, order: Order) -> Iterator[tuple[npt.NDArray[np.int64], Position]]:
    """The example indices of every step of the whole job, each with the position after it; endless.

    It begins at `order.start`, wherever that is in its epoch. What is left of an epoch and makes no whole batch is
    dropped. `size` is at least one global batch.
    """
    epoch, offset = order.start.epoch, order.start.offset
    while True:
        permuted = permutation(size, order.seed, epoch)
        while offset + order.global_batch <= size:
            offset += order.global_batch
            yield permuted[offset - order.global_batch : offset], Position(epoch, offset)
        epoch, offset = epoch + 1, 0


class PassSampler:
    """A batch sampler: for every pass the example indices of this process's rows; endless."""

    def __init__(self, size: int, order: Order) -> None:
        self._size, self._order = size, order

    def __iter__(self) -> Iterator[list[int]]:
        for whole, _ in global_batches(self._size, self._order):
            for own in self._order.in_passes(whole[self._order.own_rows].tolist()):
                yield list(own)


def train_batches(task: Task, order: Order, first_batch: int) -> Iterator[tuple[Batch, Position]]:
    """This process's part of every step of a map-style dataset, pass by pass, on the CPU, without end.

    Each comes with the position after its whole step. `first_batch`: passes done before `order.start`.

    Raises:
        UserCodeError: the dataset is shorter than one global batch, or raised.
    """
    size = length_of(task.train, "train")
    if size < order.global_batch:
        raise UserCodeError(
            f"the task's train dataset has {size} examples, fewer than one global batch of {order.global_batch}; "
            "more data, a smaller slice or a smaller recipe.globalBatchSize is needed"
        )
    drawn = random_seed(order.seed, first_batch, order.share.rank)
    batches = load(task, task.train, PassSampler(size, order), task.workers, drawn)
    for done, (_, position) in enumerate(global_batches(size, order)):
        for part in range(order.passes):
            with order.drawing(first_batch + done * order.passes + part):
                batch = next(batches)
            yield batch, position


def load(
    task: Task, dataset: Dataset[Any], batches: Sequence[list[int]] | PassSampler, workers: int = 0, seed: int = 0
) -> Iterator[Batch]:
    """The collated batches that `batches` (lists of indices) names.

    `workers` processes read them ahead; random numbers that they draw begin with `seed`.

    Raises:
        UserCodeError: the dataset raised. That includes StopIteration, which would pass for the loader's own end.
    """
    # A generator of its own: the loader draws a number when it begins, wherever in a run that is.
    generator = torch.Generator().manual_seed(seed)
    with user_code("the task's dataset"):
        loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=batches, collate_fn=task.collate, num_workers=workers, generator=generator
        )
        iterator = iter(loader)
    for _ in count() if isinstance(batches, PassSampler) else batches:
        with user_code("the next batch of the task's dataset"):
            batch = next(iterator)
        yield batch


def has_length(dataset: object) -> bool:
    """A map-style dataset has a length and indices. An iterable one may know its length, too, but has no indices."""
    indexed = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    return indexed and hasattr(dataset, "__len__")


def size_difference(stated: int | None, dataset: Dataset[Any], steps: int, global_batch: int) -> str | None:
    """What to say of a data set of another size than the `stated` one, by which `steps` were derived from epochs.

    None where they agree, where no size is stated, and for data without a length.

    Raises:
        UserCodeError: they differ by more than one in a hundred.
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


def length_of(dataset: Dataset[Any], name: str) -> int:
    """Examples of a map-style dataset; `name` is how the task calls it."""
    if not has_length(dataset):
        raise UserCodeError(f"the task's {name} dataset has no length; it must be map-style (len() and [i])")
    with user_code(f"len() of the task's {name} dataset"):
        return len(dataset)  # type: ignore[arg-type]
