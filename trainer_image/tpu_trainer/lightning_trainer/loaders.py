"""Divides a module's dataloaders among the processes: who reads which examples in which batch.

A plain loader gets the trainer's own order, in which global batch j of an epoch is the same on any slice. Every process
draws from a user's sampler alike, seeded by the run and the epoch, and its examples are divided in the order drawn.
Ready-made batches, from a batch sampler or from a dataset behind a loader without a batch size, cannot be divided: the
processes take them in turn.

In validation every example counts once, also those of a batch sampler, which are divided in its order. All processes
have equally many batches, so that collectives in `validation_step` match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from tpu_contract.protocol import Phase
from tpu_trainer.contract.clock import Clock
from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.data.epochs import enter_epoch, with_epochs
from tpu_trainer.data.loading import describe_resize, refuse_own_iterator, sampler_of, takes_each_once
from tpu_trainer.data.order import MapStyleData, Order, Position, Share, StreamData, permutation, seeded_for_epoch
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.gang.gather import is_shared

Notify = Callable[[str], None]


def shares(size: int, share: Share, rows: int, *, ready: bool = False) -> list[range]:
    """Returns this process's part of `size` held-out examples, as equal batches of about `rows`; all processes have as
    many batches. `ready`: the examples are batches, which cannot be joined.

    Raises:
        UserCodeError: they cannot be divided so that each counts once.
    """
    world, rank = share.world, share.rank
    if size % world if ready else 0 < size < world:
        raise UserCodeError(
            f"val_dataloader: its {size} {'ready batches' if ready else 'examples'} cannot be divided among {world} "
            f"processes so that each counts once; return {'a multiple of' if ready else 'at least'} {world}"
        )
    own = range(rank * size // world, (rank + 1) * size // world)
    # A process may have one example less than another.
    count = min(-(-size // (world * rows)), size // world)
    return [own[len(own) * at // count : len(own) * (at + 1) // count] for at in range(count)]


@dataclass
class Division:
    """Makes this process's loader from one of the user's. `order.start`: where the run resumes; `before`: the size of
    the first training dataset at that time; `examples`: its size now.

    `warn` takes warnings about a loader whose order is not the trainer's own, `note` takes notes.
    """

    order: Order
    backend: Backend
    clock: Clock
    warn: Notify
    note: Notify
    before: int | None = None
    examples: int | None = field(default=None, init=False)
    _first: int | None = field(default=None, init=False)

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
        if self.order.share.world > 1:
            raise UserCodeError(
                f"{name}: a {type(loader).__name__} cannot be divided among {self.order.share.world} processes; "
                f"{name} must return a torch.utils.data.DataLoader"
            )
        return loader

    def _training(self, loader: DataLoader[Any], name: str) -> DataLoader[Any]:
        size = len(loader.dataset)  # type: ignore[arg-type]
        if self.examples is None:
            self.examples = size
            if (text := describe_resize(loader.dataset, self.before, self.order.start)) is not None:
                self.warn(text)
        sampler = sampler_of(loader)
        batched: Any = loader.batch_sampler
        if batched is None or sampler is batched:
            self.warn(
                f"{name}: {type(sampler).__name__} decides which examples make a batch, so a step has {self._passes} "
                f"of its batches, one for every process and pass, not the recipe's {self.order.global_batch} examples"
            )
            return self._build(loader, self._batches(self._draw_units(sampler), 1, ready=True))
        rows = self._size(batched.batch_size, name)
        if takes_each_once(sampler):
            seed = self.order.seed
            return self._build(loader, self._batches(lambda epoch: permutation(size, seed, epoch).tolist(), rows))
        self.warn(f"{name}: its {type(sampler).__name__} decides the order of the examples")
        return self._build(loader, self._batches(self._draw_units(sampler), rows))

    def _batches(self, units: Callable[[int], Any], rows: int, *, ready: bool = False) -> ProcessBatches:
        """Returns the batches of a loader that gets `rows` units in each pass. `ready`: a unit is a batch."""
        start, batch = self.order.start, rows * self._passes
        taken = start.offset // self.order.global_batch * batch
        order = replace(self.order, global_batch=batch, start=Position(start.epoch, taken))
        # Drawn once an epoch, although length and batches both need it.
        drawn = lru_cache(1)(units)
        return ProcessBatches(MapStyleData(order, drawn, kind="batches" if ready else "examples"), ready)

    @property
    def _passes(self) -> int:
        """The passes of a step in all processes together."""
        return self.order.share.world * self.order.passes

    def _size(self, batch_size: int, name: str) -> int:
        """Returns the examples of a pass: the recipe's for the first loader, in proportion for the others."""
        if self._first is None:
            self._first = batch_size
        if batch_size == self._first:
            if batch_size != self.order.rows:
                self.note(
                    f"note: {name}: batch_size {batch_size} is not used; the recipe gives a step "
                    f"{self.order.global_batch} examples, {self.order.rows} per process and pass"
                )
            return self.order.rows
        rows = max(1, round(batch_size * self.order.rows / self._first))
        self.warn(
            f"{name}: a loader with batch_size {batch_size} beside the first one's {self._first} gets {rows} examples "
            "per process and pass"
        )
        return rows

    def _held_out(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        sampler, ready = sampler_of(loader), loader.batch_sampler is None
        indices = list(range(len(loader.dataset)))  # type: ignore[arg-type]
        if not takes_each_once(sampler):
            units = self._draw_units(sampler)(0)
            indices = list(chain(*units) if sampler is loader.batch_sampler else units)
        parts = shares(len(indices), self.order.share, 1 if ready else self.order.rows, ready=ready)
        batches = [[indices[at] for at in part] for part in parts]
        return self._build(loader, list(chain(*batches)) if ready else batches)

    def _stream(self, loader: DataLoader[Any], name: str, training: bool) -> DataLoader[Any]:
        ready = loader.batch_size is None
        rows = 1 if ready else self.order.rows
        order = replace(self.order, global_batch=rows * self.order.share.world, passes=1)
        dataset = ProcessStream(StreamData(order, loader.dataset), training, ready)
        if training and self.order.start.offset:
            self.warn(f"{name}: its dataset is iterable, so epoch {self.order.start.epoch} begins again")
        if loader.num_workers:
            self.warn(f"{name}: its {loader.num_workers} workers are not used: each would read the whole stream")
        # The dataset's items are the batches.
        return TimedLoader(self.clock, dataset=dataset, batch_size=None, collate_fn=loader.collate_fn)

    def _build(self, loader: DataLoader[Any], batches: Any) -> DataLoader[Any]:
        """Returns a loader like `loader` that yields `batches`."""
        options: dict[str, Any] = {"batch_sampler": batches}
        if loader.batch_sampler is None:
            # The dataset's items are batches already.
            options = {"sampler": batches, "batch_size": None}
        if loader.num_workers:
            options |= {
                "prefetch_factor": loader.prefetch_factor,
                # Persistent workers would not see the next epoch.
                "persistent_workers": loader.persistent_workers and not any(with_epochs(loader.dataset)),
                "multiprocessing_context": loader.multiprocessing_context,
            }
        return TimedLoader(
            self.clock,
            dataset=loader.dataset,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            generator=torch.Generator().manual_seed(self.order.seed + self.order.share.rank),
            **options,
        )

    def _draw_units(self, sampler: Any) -> Callable[[int], Sequence[Any]]:
        """Returns a function that draws an epoch's units from the sampler, the same in every process: the indices of
        examples, or a batch sampler's lists of them."""

        def draw(epoch: int) -> Sequence[Any]:
            with seeded_for_epoch(self.order.seed, epoch):
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)
                with user_code(f"the sampler {type(sampler).__name__}"):
                    units = list(sampler)
            if not is_shared(repr(units), self.backend):
                raise UserCodeError(
                    f"the sampler {type(sampler).__name__} does not give the same examples in all processes; the "
                    "trainer divides them, so it must not depend on the rank or on a generator that it seeds itself"
                )
            return units

        return draw


class ProcessBatches(Sampler[Any]):
    """A batch sampler: what this process takes in every pass, epoch by epoch. The first iteration begins at the order's
    start."""

    def __init__(self, data: MapStyleData, ready: bool) -> None:
        """`ready`: a unit is a batch, not an example.

        Raises:
            UserCodeError: an epoch has less than one global batch.
        """
        self._data, self._ready, self._start = data, ready, data.order.start
        self.epoch = self._start.epoch
        # Lightning looks for set_epoch here.
        self.sampler = self
        # Refuses an epoch that is too short.
        next(data.epoch(Position(self.epoch), 0))

    def set_epoch(self, epoch: int) -> None:
        # Lightning sets 0 before it knows where the run resumes.
        self.epoch = max(epoch, self._start.epoch)

    def __len__(self) -> int:
        """Returns the number of batches in a full epoch, also if the first iteration begins inside one."""
        return len(self._data.units(self.epoch)) // self._data.order.global_batch * self._data.order.passes

    def __iter__(self) -> Iterator[Any]:
        order, start, length = self._data.order, Position(self.epoch), len(self)
        if self.epoch == self._start.epoch:
            # Lightning begins a short loader again inside the epoch of a longer one.
            taken = self._start.offset % (length // order.passes * order.global_batch)
            start, self._start = Position(self.epoch, taken), start
        first = self.epoch * length + start.offset // order.global_batch * order.passes
        for number, (units, _) in enumerate(self._data.epoch(start, first), first):
            # Random numbers that the dataset draws in this process depend on the batch alone.
            with order.seeded(number):
                batch = units[0] if self._ready else list(units)
            yield batch


class ProcessStream(IterableDataset[Any]):
    """A process's batches of a stream that every process reads in full. `ready`: the stream's examples are batches.

    An incomplete last global batch is dropped in training and divided in validation.
    """

    def __init__(self, data: StreamData, training: bool, ready: bool) -> None:
        self._data, self._training, self._ready = data, training, ready
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self._batches()) if self._ready else self._batches()

    def _batches(self) -> Iterator[list[Any]]:
        order: Order = self._data.order
        last: list[Any] = []
        # The number tells apart the random numbers of epochs, of which none has so many batches.
        for batch in self._data.global_batches(self._epoch, self._epoch << 32):
            if self._training:
                if len(batch) == order.global_batch:
                    yield from order.divide(batch)
            elif len(batch) >= order.share.world:
                yield from self._parts(last)
                last = batch
            else:
                # Too few for all processes.
                last = last + batch
        yield from self._parts(last)

    def _parts(self, batch: Sequence[Any]) -> Iterator[list[Any]]:
        for part in shares(len(batch), self._data.order.share, self._data.order.rows, ready=self._ready):
            yield [batch[at] for at in part]


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
