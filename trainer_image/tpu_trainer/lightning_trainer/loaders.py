"""How a module's dataloaders are divided among the processes: who reads which examples in which batch.

A plain loader gets the trainer's own order, in which global batch j of an epoch is the same on any slice. A sampler of
the user's is drawn from in every process alike, with a seed of the run and the epoch, and its examples are divided in
the order in which they come. A batch sampler's batches, and what a loader without a batch size yields, cannot be
divided: the processes take them in turn.

In validation every example counts once, and all processes see equally many batches, so that what a module exchanges in
`validation_step` meets.
"""

from __future__ import annotations

import zlib
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

from tpu_trainer.contract.clock import Clock, Phase
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

_PLAIN = (SequentialSampler, RandomSampler, DistributedSampler)

Say = Callable[[str], None]
Unit = Any
"""What is handed out whole: an example's index, or a batch sampler's list of them."""


def shares(size: int, world: int, rank: int, rows: int) -> list[range]:
    """Process `rank`'s part of `size` examples, as equal batches of at most `rows`; every process has as many.

    Every example is in one process's part. If there are too few to give each batch one, the last is repeated.
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
    """Where training data stands: `batches` of epoch `epoch`, of each process's, have been used."""

    epoch: int = 0
    batches: int = 0


class Division:
    """Makes this process's loader of one of the user's. `start`: where the run continues; `before`: the examples that
    the first of its training data had then. `examples`: those that it has now.

    `warn` takes what a user should know of a loader whose order is not the trainer's own, `note` what is usual.
    """

    def __init__(
        self,
        order: Order,
        rows: int,
        start: Place,
        backend: Backend,
        clock: Clock,
        warn: Say,
        note: Say,
        before: int | None = None,
    ) -> None:
        """`order`: its passes are the step's; `rows`: examples of a pass in this process."""
        self.examples: int | None = None
        self._before = before
        self._order, self._rows, self._start = order, rows, start
        self._backend, self._clock, self._warn, self._note = backend, clock, warn, note
        self._said: set[str] = set()
        self._first: int | None = None

    def of(self, loader: object, *, training: bool) -> object:
        """A loader for this process.

        Raises:
            UserCodeError: it cannot be divided.
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
                "it must return a torch.utils.data.DataLoader"
            )
        return loader

    def _training(self, loader: DataLoader[Any], name: str) -> DataLoader[Any]:
        size = len(loader.dataset)  # type: ignore[arg-type]
        if self.examples is None:
            self.examples = size
            if (
                text := describe_resize(loader.dataset, self._before, Position(self._start.epoch, self._start.batches))
            ) is not None:
                self._tell(text)
        batched = loader.batch_sampler
        sampler = loader.sampler if batched is None else getattr(batched, "sampler", None)
        if batched is None or type(batched) is not BatchSampler:
            # A loader with batch_size None: its dataset's items are batches.
            units = loader.sampler if batched is None else batched
            self._tell(
                f"{name}: {type(units).__name__} decides which examples make a batch, so a step has {self._whole} of "
                f"its batches, one for every process and pass, and not the recipe's {self._order.global_batch} examples"
            )
            order = replace(self._order, global_batch=self._whole)
            plan = Plan(self._drawn(units), order, self._start, whole=True)
            return self._made(loader, plan, whole=batched is None)
        rows = self._size(batched.batch_size, name)
        order = replace(self._order, global_batch=rows * self._whole)
        if type(sampler) in _PLAIN and not _draws(sampler):
            return self._made(loader, Plan(partial(_permuted, size, order.seed), order, self._start))
        self._tell(f"{name}: its {type(sampler).__name__} decides the order of the examples")
        return self._made(loader, Plan(self._drawn(sampler), order, self._start))

    @property
    def _whole(self) -> int:
        return self._order.share.world * self._order.passes

    def _size(self, batch_size: int, name: str) -> int:
        """Examples of a pass: the recipe's for the first loader; others keep their proportion to it."""
        if self._first is None:
            self._first = batch_size
        if batch_size == self._first:
            if batch_size != self._rows:
                self._note(
                    f"note: {name}: batch_size {batch_size} is not used; by the recipe a step has "
                    f"{self._order.global_batch} examples, {self._rows} per process and pass"
                )
            return self._rows
        rows = max(1, round(batch_size * self._rows / self._first))
        self._tell(
            f"{name}: a loader with batch_size {batch_size} beside the first one's {self._first} gets {rows} examples "
            "per process and pass"
        )
        return rows

    def _held_out(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        share, batched = self._order.share, loader.batch_sampler
        if batched is None or type(batched) is not BatchSampler:
            units = list(loader.sampler if batched is None else batched)
            own = [units[at] for (at,) in shares(len(units), share.world, share.rank, 1)]
            return self._made(loader, own, whole=batched is None)
        indices = list(range(len(loader.dataset)))  # type: ignore[arg-type]
        if type(batched.sampler) not in _PLAIN or _draws(batched.sampler):
            indices = list(self._drawn(batched.sampler)(0))
        batches = shares(len(indices), share.world, share.rank, self._rows)
        return self._made(loader, [[indices[at] for at in batch] for batch in batches])

    def _stream(self, loader: DataLoader[Any], name: str, training: bool) -> DataLoader[Any]:
        share, items = self._order.share, loader.batch_size is None
        rows = 1 if items else self._rows
        dataset = OwnPart(loader.dataset, share, rows, training)
        if training and self._start.batches:
            self._tell(f"{name}: its dataset is iterable, so epoch {self._start.epoch} begins again")
        if loader.num_workers:
            self._tell(f"{name}: its {loader.num_workers} workers are not used: each would read the whole stream")
        return Timed(self._clock, dataset=dataset, batch_size=None if items else rows, collate_fn=loader.collate_fn)

    def _made(self, loader: DataLoader[Any], batches: Any, whole: bool = False) -> DataLoader[Any]:
        """`whole`: the units are items of the dataset that are batches already."""
        options: dict[str, Any] = {"sampler": batches, "batch_size": None} if whole else {"batch_sampler": batches}
        if loader.num_workers:
            options |= {
                "prefetch_factor": loader.prefetch_factor,
                # Processes that stay would not see the next epoch.
                "persistent_workers": loader.persistent_workers and not any(with_epochs(loader.dataset)),
                "multiprocessing_context": loader.multiprocessing_context,
            }
        return Timed(
            self._clock,
            dataset=loader.dataset,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            generator=torch.Generator().manual_seed(self._order.seed + self._order.share.rank),
            **options,
        )

    def _drawn(self, sampler: Any) -> Callable[[int], Sequence[Unit]]:
        """What the sampler gives in an epoch, the same in every process."""

        def draw(epoch: int) -> Sequence[Unit]:
            with GENERATORS, keep_generators():
                seed_generators(random_seed(self._order.seed, epoch, 0))
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)
                with user_code(f"the sampler {type(sampler).__name__}"):
                    units = list(sampler)
            # 24 bits, all that float32 holds exactly.
            digest = float(zlib.crc32(repr(units).encode()) % 2**24)
            if len({row[0] for row in self._backend.gather([digest])}) > 1:
                raise UserCodeError(
                    f"the sampler {type(sampler).__name__} does not give the same examples in all processes; the "
                    "trainer divides them, so it must not depend on the rank or on a generator with a seed of its own"
                )
            return units

        return draw

    def _tell(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._warn(text)


class Plan(Sampler[Any]):
    """A batch sampler: this process's units of every pass, epoch by epoch. The first time it begins at `start`."""

    def __init__(
        self, units: Callable[[int], Sequence[Unit]], order: Order, start: Place, *, whole: bool = False
    ) -> None:
        """`whole`: a unit is a batch, and not an example of one.

        Raises:
            UserCodeError: an epoch has less than one global batch.
        """
        self._units, self._order, self._start, self._whole = units, order, start, whole
        self._epoch = start.epoch
        self._drawn = (start.epoch, units(start.epoch))
        # Where Lightning looks for the epoch's setter.
        self.sampler = self
        if len(self) == 0:
            what = "batches" if whole else "examples"
            raise UserCodeError(
                f"the train dataset has {len(self._of_epoch())} {what}, fewer than one global batch of "
                f"{order.global_batch}; more data, a smaller slice or a smaller recipe.globalBatchSize is needed"
            )

    @property
    def epoch(self) -> int:
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        # Lightning sets 0 before it knows where the run continues.
        self._epoch = max(epoch, self._start.epoch)

    def __len__(self) -> int:
        """Of a whole epoch, wherever it begins."""
        return len(self._of_epoch()) // self._order.global_batch * self._order.passes

    def __iter__(self) -> Iterator[Any]:
        order, epoch, units = self._order, self._epoch, self._of_epoch()
        steps = len(units) // order.global_batch
        skipped = self._start.batches % (steps * order.passes) if epoch == self._start.epoch else 0
        self._start = Place(self._start.epoch)
        for number in range(skipped, steps * order.passes):
            step, part = divmod(number, order.passes)
            whole = units[step * order.global_batch : (step + 1) * order.global_batch]
            own = list(order.split_passes(whole[order.own_rows]))[part]
            # What the dataset draws depends on the batch alone, as far as it is read in this process.
            with GENERATORS:
                seed_generators(random_seed(order.seed, epoch * steps * order.passes + number, order.share.rank))
            yield own[0] if self._whole else list(own)

    def _of_epoch(self) -> Sequence[Unit]:
        if self._drawn[0] != self._epoch:
            self._drawn = (self._epoch, self._units(self._epoch))
        return self._drawn[1]


class OwnPart(IterableDataset[Any]):
    """A process's examples of a stream that every process reads whole: `rows` of every world x rows.

    In training the end that does not fill the processes' rows is dropped; in validation it is divided.
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
                whole = list(islice(examples, share.world * rows))
            if len(whole) == share.world * rows:
                yield from whole[share.rank * rows : (share.rank + 1) * rows]
                continue
            if not self._training:
                for batch in shares(len(whole), share.world, share.rank, rows):
                    yield from (whole[at] for at in batch)
            return


class Timed(DataLoader[Any]):
    """A loader whose waiting counts as waiting for input."""

    def __init__(self, clock: Clock, **options: Any) -> None:
        super().__init__(**options)
        self._clock = clock

    def __iter__(self) -> Any:
        for plan in (self.batch_sampler, self.sampler):
            if isinstance(plan, Plan):
                enter_epoch(self.dataset, plan.epoch)
        batches = super().__iter__()
        while True:
            with self._clock.during(Phase.INPUT):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch


def _permuted(size: int, seed: int, epoch: int) -> list[int]:
    indices: list[int] = permutation(size, seed, epoch).tolist()
    return indices


def _draws(sampler: Any) -> bool:
    """Whether a RandomSampler draws otherwise than all examples, each once."""
    if not isinstance(sampler, RandomSampler):
        return False
    return sampler.replacement or sampler.num_samples != len(sampler.data_source)
