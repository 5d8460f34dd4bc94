"""Divides a module's dataloaders among the processes: who reads which examples in which batch.

A plain loader gets the trainer's own order, in which global batch j of an epoch is the same on any slice. Every process
draws from a user's sampler alike, seeded by the run and the epoch, and its examples are divided in the order drawn.
Ready-made batches, from a batch sampler or from a dataset behind a loader without a batch size, cannot be divided: the
processes take them in turn.

In validation every example counts once, and all processes have equally many batches, so that collectives in
`validation_step` match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from tpu_contract.protocol import Phase
from tpu_trainer.contract.clock import Clock
from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.data.epochs import enter_epoch, with_epochs
from tpu_trainer.data.loading import (
    GENERATORS,
    Order,
    Position,
    Share,
    describe_resize,
    keep_generators,
    permutation,
    random_seed,
    refuse_own_iterator,
    seed_generators,
)
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.gang.gather import is_shared

_PLAIN = (SequentialSampler, RandomSampler, DistributedSampler)

Notify = Callable[[str], None]
Unit = Any
"""What one process gets undivided: an example's index, or a batch sampler's list of indices."""


def shares(size: int, world: int, rank: int, rows: int) -> list[range]:
    """Returns process `rank`'s part of `size` examples, as equal batches of at most `rows`; all have as many batches.

    Every example is in one process's part. If there are fewer examples than batches, the last example is repeated.
    """
    if size == 0:
        return []
    own = range(rank * size // world, (rank + 1) * size // world)
    largest = -(-size // world)
    count = -(-largest // rows)
    if len(own) < count:
        alone = [range(at, at + 1) for at in own]
        return [*alone, *[range(size - 1, size)] * (count - len(own))]
    return [own[len(own) * at // count : len(own) * (at + 1) // count] for at in range(count)]


@dataclass(frozen=True)
class Place:
    """A place in the training data: each process has used `batches` batches of epoch `epoch`."""

    epoch: int = 0
    batches: int = 0


class Division:
    """Makes this process's loader from one of the user's. `start`: where the run resumes; `before`: the size of the
    first training dataset at that time; `examples`: its size now.

    `warn` takes warnings about a loader whose order is not the trainer's own, `note` takes notes.
    """

    def __init__(
        self,
        order: Order,
        rows: int,
        start: Place,
        backend: Backend,
        clock: Clock,
        warn: Notify,
        note: Notify,
        before: int | None = None,
    ) -> None:
        """`order`: has the passes of a step; `rows`: examples of a pass in this process."""
        self.examples: int | None = None
        self._before = before
        self._order, self._rows, self._start = order, rows, start
        self._backend, self._clock, self._warn, self._note = backend, clock, warn, note
        self._first: int | None = None

    def divide(self, loader: object, *, training: bool) -> object:
        """Returns a loader for this process.

        Raises:
            UserCodeError: the loader cannot be divided.
        """
        name = "train_dataloader" if training else "val_dataloader"
        if not isinstance(loader, DataLoader):
            return self._undivided(loader, name)
        refuse_own_iterator(loader, name)
        with user_code(name):
            if isinstance(loader.dataset, IterableDataset):
                return self._stream(loader, name, training)
            return self._training(loader, name) if training else self._held_out(loader)

    def _undivided(self, loader: object, name: str) -> object:
        if self._order.share.world > 1:
            raise UserCodeError(
                f"{name}: a {type(loader).__name__} cannot be divided among {self._order.share.world} processes; "
                f"{name} must return a torch.utils.data.DataLoader"
            )
        return loader

    def _training(self, loader: DataLoader[Any], name: str) -> DataLoader[Any]:
        size = len(loader.dataset)  # type: ignore[arg-type]
        if self.examples is None:
            self.examples = size
            if (
                text := describe_resize(loader.dataset, self._before, Position(self._start.epoch, self._start.batches))
            ) is not None:
                self._warn(text)
        batched = loader.batch_sampler
        sampler = loader.sampler if batched is None else getattr(batched, "sampler", None)
        if batched is None or type(batched) is not BatchSampler:
            # A loader with batch_size None: its dataset's items are batches.
            units = loader.sampler if batched is None else batched
            self._warn(
                f"{name}: {type(units).__name__} decides which examples make a batch, so a step has {self._passes} of "
                f"its batches, one for every process and pass, not the recipe's {self._order.global_batch} examples"
            )
            order = replace(self._order, global_batch=self._passes)
            batches = ProcessBatches(self._draw_units(units), order, self._start, ready=True)
            return self._build(loader, batches, ready=batched is None)
        rows = self._size(batched.batch_size, name)
        order = replace(self._order, global_batch=rows * self._passes)
        if type(sampler) in _PLAIN and not _draws(sampler):
            return self._build(loader, ProcessBatches(partial(_permute, size, order.seed), order, self._start))
        self._warn(f"{name}: its {type(sampler).__name__} decides the order of the examples")
        return self._build(loader, ProcessBatches(self._draw_units(sampler), order, self._start))

    @property
    def _passes(self) -> int:
        """The passes of a step in all processes together."""
        return self._order.share.world * self._order.passes

    def _size(self, batch_size: int, name: str) -> int:
        """Returns the examples of a pass: the recipe's for the first loader, in proportion for the others."""
        if self._first is None:
            self._first = batch_size
        if batch_size == self._first:
            if batch_size != self._rows:
                self._note(
                    f"note: {name}: batch_size {batch_size} is not used; the recipe gives a step "
                    f"{self._order.global_batch} examples, {self._rows} per process and pass"
                )
            return self._rows
        rows = max(1, round(batch_size * self._rows / self._first))
        self._warn(
            f"{name}: a loader with batch_size {batch_size} beside the first one's {self._first} gets {rows} examples "
            "per process and pass"
        )
        return rows

    def _held_out(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        share, batched = self._order.share, loader.batch_sampler
        if batched is None or type(batched) is not BatchSampler:
            units = list(loader.sampler if batched is None else batched)
            batches = [units[at] for (at,) in shares(len(units), share.world, share.rank, 1)]
            return self._build(loader, batches, ready=batched is None)
        indices = list(range(len(loader.dataset)))  # type: ignore[arg-type]
        if type(batched.sampler) not in _PLAIN or _draws(batched.sampler):
            indices = list(self._draw_units(batched.sampler)(0))
        parts = shares(len(indices), share.world, share.rank, self._rows)
        return self._build(loader, [[indices[at] for at in part] for part in parts])

    def _stream(self, loader: DataLoader[Any], name: str, training: bool) -> DataLoader[Any]:
        share, items = self._order.share, loader.batch_size is None
        rows = 1 if items else self._rows
        dataset = ProcessStream(loader.dataset, share, rows, training)
        if training and self._start.batches:
            self._warn(f"{name}: its dataset is iterable, so epoch {self._start.epoch} begins again")
        if loader.num_workers:
            self._warn(f"{name}: its {loader.num_workers} workers are not used: each would read the whole stream")
        return TimedLoader(
            self._clock, dataset=dataset, batch_size=None if items else rows, collate_fn=loader.collate_fn
        )

    def _build(self, loader: DataLoader[Any], batches: Any, ready: bool = False) -> DataLoader[Any]:
        """Returns a loader like `loader` that yields `batches`. `ready`: the dataset's items are batches already."""
        options: dict[str, Any] = {"sampler": batches, "batch_size": None} if ready else {"batch_sampler": batches}
        if loader.num_workers:
            options |= {
                "prefetch_factor": loader.prefetch_factor,
                # Persistent workers would not see the next epoch.
                "persistent_workers": loader.persistent_workers and not any(with_epochs(loader.dataset)),
                "multiprocessing_context": loader.multiprocessing_context,
            }
        return TimedLoader(
            self._clock,
            dataset=loader.dataset,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            generator=torch.Generator().manual_seed(self._order.seed + self._order.share.rank),
            **options,
        )

    def _draw_units(self, sampler: Any) -> Callable[[int], Sequence[Unit]]:
        """Returns a function that draws an epoch's units from the sampler, the same in every process."""

        def draw(epoch: int) -> Sequence[Unit]:
            with GENERATORS, keep_generators():
                seed_generators(random_seed(self._order.seed, epoch, 0))
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)
                with user_code(f"the sampler {type(sampler).__name__}"):
                    units = list(sampler)
            if not is_shared(repr(units), self._backend):
                raise UserCodeError(
                    f"the sampler {type(sampler).__name__} does not give the same examples in all processes; the "
                    "trainer divides them, so it must not depend on the rank or on a generator that it seeds itself"
                )
            return units

        return draw


class ProcessBatches(Sampler[Any]):
    """A batch sampler: this process's units of every pass, epoch by epoch. The first iteration begins at `start`."""

    def __init__(
        self, units: Callable[[int], Sequence[Unit]], order: Order, start: Place, *, ready: bool = False
    ) -> None:
        """`ready`: a unit is a batch, not an example.

        Raises:
            UserCodeError: an epoch has less than one global batch.
        """
        self._units, self._order, self._start, self._ready = units, order, start, ready
        self._epoch = start.epoch
        self._drawn = (start.epoch, units(start.epoch))
        # Lightning looks for set_epoch here.
        self.sampler = self
        if len(self) == 0:
            what = "batches" if ready else "examples"
            raise UserCodeError(
                f"the train dataset has {len(self._epoch_units())} {what}, fewer than one global batch of "
                f"{order.global_batch}; more data, a smaller slice or a smaller recipe.globalBatchSize is needed"
            )

    @property
    def epoch(self) -> int:
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        # Lightning sets 0 before it knows where the run resumes.
        self._epoch = max(epoch, self._start.epoch)

    def __len__(self) -> int:
        """Returns the number of batches in a full epoch, also if the first iteration begins inside one."""
        return len(self._epoch_units()) // self._order.global_batch * self._order.passes

    def __iter__(self) -> Iterator[Any]:
        order, epoch, units = self._order, self._epoch, self._epoch_units()
        steps = len(units) // order.global_batch
        skipped = self._start.batches % (steps * order.passes) if epoch == self._start.epoch else 0
        self._start = Place(self._start.epoch)
        for number in range(skipped, steps * order.passes):
            step, part = divmod(number, order.passes)
            batch = units[step * order.global_batch : (step + 1) * order.global_batch]
            selected = list(order.split_passes(batch[order.own_rows]))[part]
            # Random numbers that the dataset draws in this process depend on the batch alone.
            with GENERATORS:
                seed_generators(random_seed(order.seed, epoch * steps * order.passes + number, order.share.rank))
            yield selected[0] if self._ready else list(selected)

    def _epoch_units(self) -> Sequence[Unit]:
        if self._drawn[0] != self._epoch:
            self._drawn = (self._epoch, self._units(self._epoch))
        return self._drawn[1]


class ProcessStream(IterableDataset[Any]):
    """A process's part of a stream that every process reads in full: `rows` of every world x rows examples.

    An incomplete last group is dropped in training and divided in validation.
    """

    def __init__(self, dataset: Any, share: Share, rows: int, training: bool) -> None:
        self._dataset, self._share, self._rows, self._training = dataset, share, rows, training
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        share, rows = self._share, self._rows
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._epoch)
        with user_code("the dataset"):
            examples = iter(self._dataset)
        while True:
            with user_code("the next examples of the dataset"):
                group = list(islice(examples, share.world * rows))
            if len(group) == share.world * rows:
                yield from group[share.rank * rows : (share.rank + 1) * rows]
                continue
            if not self._training:
                for part in shares(len(group), share.world, share.rank, rows):
                    yield from (group[at] for at in part)
            return


class TimedLoader(DataLoader[Any]):
    """A loader that counts the time until the next batch as waiting for input."""

    def __init__(self, clock: Clock, **options: Any) -> None:
        super().__init__(**options)
        self._clock = clock

    def __iter__(self) -> Any:
        for sampler in (self.batch_sampler, self.sampler):
            if isinstance(sampler, ProcessBatches):
                enter_epoch(self.dataset, sampler.epoch)
        batches = super().__iter__()
        while True:
            with self._clock.during(Phase.INPUT):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch


def _permute(size: int, seed: int, epoch: int) -> list[int]:
    indices: list[int] = permutation(size, seed, epoch).tolist()
    return indices


def _draws(sampler: Any) -> bool:
    """Returns whether a RandomSampler draws anything but every example once."""
    if not isinstance(sampler, RandomSampler):
        return False
    return sampler.replacement or sampler.num_samples != len(sampler.data_source)
