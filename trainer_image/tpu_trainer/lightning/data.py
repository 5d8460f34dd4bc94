"""The data of a LightningModule or LightningDataModule: its datasets, without their order.

A dataloader says which dataset, how examples become a batch, and how many processes read. The order and the size of
batches are the trainer's: they follow from the recipe, and the trajectory must not depend on the slice.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from tpu_trainer.errors import UserCodeError, user_code
from tpu_trainer.lightning.session import Session
from tpu_trainer.task import Hyperparameters

_REPLACED = (SequentialSampler, RandomSampler, DistributedSampler)


@dataclass(frozen=True)
class Source:
    """What is taken of a dataloader. `batch_size`: examples per process and batch, as the loader had it."""

    dataset: Dataset[Any]
    collate: Callable[[list[Any]], Any]
    workers: int
    batch_size: int


@dataclass(frozen=True)
class Collate:
    """`on_before_batch_transfer` after collating; a class so that the processes that read data can be sent it."""

    collate: Callable[[list[Any]], Any]
    before_transfer: Callable[[Any, int], Any]

    def __call__(self, examples: list[Any]) -> Any:
        return self.before_transfer(self.collate(examples), 0)


def prepare(session: Session) -> None:
    """`prepare_data` and `setup`. Processes of one host prepare in turn: the second finds what the first has fetched.

    Every host prepares, since hosts share no disk.
    """
    if session.of_data("prepare_data") is not None:
        with _one_at_a_time():
            session.call_both("prepare_data")
    session.call_both("setup", "fit")


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    # A lock on the directory itself leaves no file behind, and ends with the process that holds it.
    directory = os.open(tempfile.gettempdir(), os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def training_source(session: Session) -> Source:
    """Raises UserCodeError where there is no such dataloader, or one that cannot be replaced."""
    loader = _loader(session, "train_dataloader")
    if loader is None:
        raise UserCodeError(
            "neither the LightningModule nor a LightningDataModule gives a train_dataloader(); return the pair "
            "(LightningModule, LightningDataModule) if the data is apart"
        )
    return _source(session, loader, "train_dataloader")


def validation_source(session: Session) -> Source | None:
    """None where nothing is to be validated. Raises UserCodeError as `training_source` does."""
    if not session.has("validation_step"):
        return None
    loader = _loader(session, "val_dataloader")
    if loader is None:
        return None
    source = _source(session, loader, "val_dataloader")
    if isinstance(source.dataset, IterableDataset):
        raise UserCodeError(
            "val_dataloader: its dataset is iterable; to evaluate every example exactly once on any number of "
            "processes it must be map-style (len() and [i])"
        )
    return source


def note_batch_size(source: Source, hp: Hyperparameters) -> str | None:
    """What to say when the loader's batch size is not the one that will be trained with."""
    if source.batch_size == hp.per_replica_batch_size:
        return None
    return (
        f"train_dataloader: batch_size {source.batch_size} is not used; by the recipe a step has "
        f"{hp.global_batch_size} examples, {hp.per_replica_batch_size} per replica"
    )


def _loader(session: Session, name: str) -> DataLoader[Any] | None:
    method = session.of_data(name)
    if method is None:
        return None
    with user_code(name):
        given = method()
    if isinstance(given, Sequence) and len(given) <= 1:
        given = given[0] if given else None
    if given is None or isinstance(given, DataLoader):
        return given
    many = f" of {len(given)}" if isinstance(given, Sequence) else ""
    raise UserCodeError(
        f"{name}: it gives a {type(given).__name__}{many}; it must give one torch.utils.data.DataLoader"
    )


def _source(session: Session, loader: DataLoader[Any], name: str) -> Source:
    if loader.batch_size is None and loader.batch_sampler is None:
        raise UserCodeError(f"{name}: batch_size is None; the dataset must give examples, the recipe makes the batches")
    if not isinstance(loader.dataset, IterableDataset):
        _check_order(loader, name)
    collate: Callable[[list[Any]], Any] = loader.collate_fn
    if (before := session.of_data("on_before_batch_transfer")) is not None:
        collate = Collate(collate, before)
    # A batch sampler of torch's own, made by hand, leaves the loader without a batch size.
    size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", 1)
    return Source(loader.dataset, collate, loader.num_workers, size)


def _check_order(loader: DataLoader[Any], name: str) -> None:
    """Only an order that means "all examples, each once" may be replaced; any other was meant."""
    why = "the trainer orders the examples itself, as a permutation of the dataset for every epoch"
    if type(loader.batch_sampler) is not BatchSampler:
        raise UserCodeError(f"{name}: batch_sampler {type(loader.batch_sampler).__name__} is not served; {why}")
    # The loader's own attribute is a default one where a BatchSampler was given.
    sampler = loader.batch_sampler.sampler
    if type(sampler) not in _REPLACED:
        raise UserCodeError(f"{name}: sampler {type(sampler).__name__} is not served; {why}")
    if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(sampler.data_source)):
        raise UserCodeError(f"{name}: a RandomSampler with replacement or num_samples is not served; {why}")
