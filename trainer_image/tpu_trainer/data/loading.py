"""What is known about the task's datasets, and how its workers read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)

from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.data.order import Position
from tpu_trainer.task.task import Batch, Collate, Task


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


def load(
    dataset: Any,
    batches: Iterable[list[int]],
    collate: Collate | None,
    workers: Workers = NO_WORKERS,
    seed: int = 0,
) -> Iterator[Batch]:
    """Yields the collated batches of `batches` (lists of indices), read ahead by `workers`, whose generators start with
    `seed`. The caller takes as many as there are.

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
    while True:
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


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Returns what decides a loader's batches: a batch sampler that is not torch's own, or the sampler."""
    batched = loader.batch_sampler
    if batched is None:
        return loader.sampler
    # The loader's own sampler is only a default if a BatchSampler was given.
    return batched.sampler if type(batched) is BatchSampler else batched


def takes_each_once(sampler: Any) -> bool:
    """Returns whether a loader's sampler gives every example once, so that the trainer's order can replace it."""
    if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(sampler.data_source)):
        return False
    return type(sampler) in (SequentialSampler, RandomSampler, DistributedSampler)


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
