"""Which examples a process sees in which step: a function of the seed and the global batch, never of the slice.

Global batch j of an epoch is permutation(seed, epoch)[jB : (j+1)B], and process r of w takes its r-th w-th
part. So the same run on another slice size sees the same batches in the same order, and its trajectory is the
same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, Dataset

from tpu_trainer.errors import UserCodeError, user_code
from tpu_trainer.task import Batch, Task


def permutation(size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of `size` examples in an epoch.

    numpy's generator and not torch's: the latter keeps only the low 32 bits of a seed, so seed and epoch
    would have to be mixed by hand.
    """
    # numpy lays the numbers out as 32-bit words; the one that may need several goes last, or (2**32, 0) is (0, 1).
    return np.random.default_rng((epoch, seed)).permutation(size)


@dataclass(frozen=True)
class Share:
    """The part of every global batch that falls to one process: `rank` of `world`, equal parts."""

    rank: int
    world: int


class TrainSampler:
    """Yields for every pass the example indices of this process's rows; endless, remainders of epochs dropped.

    A step has `passes` passes, equal parts of the process's part. `global_batch` is a multiple of world x passes, and
    at most `size`.
    """

    def __init__(self, size: int, global_batch: int, seed: int, share: Share, passes: int = 1) -> None:
        self._size, self._global_batch, self._seed = size, global_batch, seed
        rows = global_batch // share.world
        self._own = slice(share.rank * rows, (share.rank + 1) * rows)
        self._at_once = rows // passes

    def __iter__(self) -> Iterator[list[int]]:
        epoch = 0
        while True:
            order = permutation(self._size, self._seed, epoch)
            for batch in range(self._size // self._global_batch):
                whole = order[batch * self._global_batch : (batch + 1) * self._global_batch]
                own = whole[self._own].tolist()
                for start in range(0, len(own), self._at_once):
                    yield own[start : start + self._at_once]
            epoch += 1


def train_batches(task: Task, global_batch: int, seed: int, share: Share, passes: int = 1) -> Iterator[Batch]:
    """This process's part of every global batch, in `passes` equal parts, on the CPU, without end.

    Raises:
        UserCodeError: the dataset is shorter than one global batch, or raised.
    """
    size = length_of(task.train, "train")
    if size < global_batch:
        raise UserCodeError(
            f"the task's train dataset has {size} examples, fewer than one global batch of {global_batch}; "
            "more data, a smaller slice or a smaller recipe.globalBatchSize is needed"
        )
    return load(task, task.train, TrainSampler(size, global_batch, seed, share, passes))


def load(task: Task, dataset: Dataset[Any], batches: Any) -> Iterator[Batch]:
    with user_code("the task's dataset"):
        loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=batches, collate_fn=task.collate)
        iterator = iter(loader)
    while True:
        with user_code("the next batch of the task's dataset"):
            try:
                batch = next(iterator)
            except StopIteration:
                return
        yield batch


def length_of(dataset: Dataset[Any], name: str) -> int:
    """A map-style dataset has a length; an iterable one has not."""
    length = getattr(dataset, "__len__", None)
    if length is None:
        raise UserCodeError(f"the task's {name} dataset has no length; it must be map-style (len() and [i])")
    with user_code(f"len() of the task's {name} dataset"):
        return int(length())
