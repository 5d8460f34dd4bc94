"""How this process reads the task's training data: by index, in shards, or as one stream that all processes read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.contract.findings import Finding
from tpu_trainer.data.loading import (
    Order,
    Position,
    describe_repeat,
    has_length,
    is_sharded,
    stream_batches,
    train_batches,
)
from tpu_trainer.data.same_data import COMPARED, STREAM, check_examples, check_lengths, check_order, compare
from tpu_trainer.data.shards import MOST_LANES, LanePlan, merge_positions, plan_lanes, shard_batches
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.task.task import Batch, Task

Tell = Callable[[Finding], None]

_WEBDATASET = (
    "a WebDataset reads its files for one process alone, or splits them by rank, and the trainer would take a part of "
    "that part. Give the task an object with num_shards = len(urls) and shard(index, count) that returns "
    "WebDataset(urls[index::count], nodesplitter=None, workersplitter=None, shardshuffle=False) with its decoding "
    "(docs/data.md)"
)


def check_data(task: Task, seed: int, backend: Backend, host: int, tell: Tell) -> None:
    """Checks that all processes see the same data, as far as possible before the training reads it. A collective;
    `host`: this process's host.

    Raises:
        UserCodeError: in every process, when they do not.
    """
    # First, because the later checks may refuse one process's length and leave the others waiting for it.
    check_lengths(task, backend, host)
    if _is_webdataset(task.train) and backend.world > 1:
        raise UserCodeError(f"the task's train dataset: {_WEBDATASET}")
    check_order(task, seed, backend, host)
    check_examples(task, seed, backend, host, tell)


@dataclass(frozen=True)
class BatchSource:
    """batches: the process's part of every step, pass by pass, on the CPU, each with the position after its step.
    merge: turns this process's position into the job's, in a collective."""

    batches: Iterator[tuple[Batch, Position]]
    merge: Callable[[Position], Position] = lambda position: position


def open_batches(
    task: Task,
    order: Order,
    passes: range,
    epoch_size: int | None,
    backend: Backend,
    host: int,
    tell: Tell,
) -> BatchSource:
    """Reads the passes `passes`, counted over the run, from `order.start` on. A collective: the processes compare the
    first batch of a stream.

    epoch_size: as in the recipe.

    Raises:
        UserCodeError: the data cannot be read, or the processes read different streams.
    """
    first, world = passes.start, order.share.world
    if has_length(task.train):
        return BatchSource(islice(train_batches(task, order, first), len(passes)))
    if is_sharded(task.train):
        plan = plan_lanes(task.train, order)
        if (text := _describe_shared_lanes(plan, world)) is not None:
            tell(Finding("Data", 0, text))
        batches = islice(shard_batches(task, plan, first, epoch_size), len(passes))
        return BatchSource(batches, partial(merge_positions, backend=backend, plan=plan))
    if (text := _describe_shared_stream(task, world)) is not None:
        tell(Finding("Data", 0, text))
    if (text := describe_repeat(task.train, order.start)) is not None:
        tell(Finding("Data", first // order.passes, text))
    examples: list[Sequence[Any]] = []
    seen = stream_batches(task, order, first, lambda batch: examples.append(batch[:COMPARED]))
    batches = islice(seen, len(passes))
    if not passes or world == 1:
        return BatchSource(batches)
    # Read here, in the training's thread, because comparing is a collective.
    read: list[tuple[Batch, Position]] = []
    short: UserCodeError | None = None
    try:
        read.append(next(batches))
    except UserCodeError as error:
        # A part of the stream may be too short for a batch although the stream is not.
        if not examples:
            raise
        short = error
    compare("examples in the training stream", lambda: examples[0], STREAM, backend, host, tell)
    if short is not None:
        raise short
    return BatchSource(chain(read, batches))


def _describe_shared_lanes(plan: LanePlan, world: int) -> str | None:
    if plan.readers == 1:
        return None
    return (
        f"the train dataset has {plan.shards} shards, which are read in {plan.lanes} lanes; {world} processes cannot "
        f"share those equally, so each example is read by {plan.readers} processes and used by one. There are as many "
        f"lanes as the largest power of two up to the number of shards, and up to {MOST_LANES}"
    )


def _describe_shared_stream(task: Task, world: int) -> str | None:
    remarks = []
    if world > 1:
        remarks.append(f"each of the {world} processes reads all of it and uses 1/{world}: it is read {world} times")
    if task.workers:
        remarks.append(f"the task's {task.workers} workers are not used for it: the process itself reads")
    if not remarks:
        return None
    return (
        f"the train dataset is one stream; {', and '.join(remarks)}. With num_shards and shard(index, count) each "
        "process reads its own shards, with workers (docs/data.md)"
    )


def _is_webdataset(dataset: Any) -> bool:
    if is_sharded(dataset) or has_length(dataset):
        return False
    return any(kind.__module__.partition(".")[0] == "webdataset" for kind in type(dataset).__mro__)
