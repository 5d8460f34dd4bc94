"""How this process reads the task's training data: by index, in shards, or as one stream that all processes read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, tee
from typing import Any

from torch.utils.data import default_collate

from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.contract.findings import Finding
from tpu_trainer.data import epochs
from tpu_trainer.data.loading import has_length, is_sharded, length_of, load, training_workers
from tpu_trainer.data.order import MapStyleData, Order, Position, StreamData, TrainingData, random_seed
from tpu_trainer.data.same_data import COMPARED, STREAM, check_examples, check_lengths, check_order, compare
from tpu_trainer.data.shards import shard_data
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


def open_data(task: Task, order: Order, epoch_size: int | None = None) -> TrainingData:
    """Returns the task's training data. `epoch_size`: as in the recipe."""
    if has_length(task.train):
        return MapStyleData.of(length_of(task.train, "train"), order, task.order)
    if is_sharded(task.train):
        return shard_data(training_workers(task), order, epoch_size)
    return StreamData(order, task.train, task.workers)


def read_batches(task: Task, data: TrainingData, first: int) -> Iterator[tuple[Batch, Position]]:
    """Yields the process's part of every step, pass by pass, on the CPU, each with the position after its step.

    Endless. first: passes done before `data.order.start`.

    Raises:
        UserCodeError: an epoch does not fill a global batch, or the dataset raised.
    """
    passes = data.passes(first)
    if not isinstance(data, MapStyleData):
        collate = task.collate or default_collate
        for number, rows, position in passes:
            with data.order.seeded(number), user_code("collating a batch"):
                batch = collate(list(rows))
            yield batch, position
        return
    ahead, passes = tee(passes)
    indices = (epochs.Indices(rows.tolist(), position.epoch) for _, rows, position in ahead)
    dataset: Any = epochs.EpochDataset(task.train) if any(epochs.with_epochs(task.train)) else task.train
    drawn = random_seed(data.order.seed, first, data.order.share.rank)
    batches = load(dataset, indices, task.collate, training_workers(task), drawn)
    for number, _, position in passes:
        with data.order.seeded(number):
            batch = next(batches)
        yield batch, position


def open_batches(
    task: Task, data: TrainingData, passes: range, backend: Backend, host: int, tell: Tell
) -> Iterator[tuple[Batch, Position]]:
    """Returns what `read_batches` yields for the passes `passes`, counted over the run. A collective: the processes
    compare the first batch of a stream.

    Raises:
        UserCodeError: the data cannot be read, or the processes read different streams.
    """
    for step, text in ((0, data.describe_sharing()), (passes.start // data.order.passes, data.describe_repeat())):
        if text is not None:
            tell(Finding("Data", step, text))
    first: deque[Sequence[Any]] = deque(maxlen=1)
    if not isinstance(data, StreamData) or not passes or data.order.share.world == 1:
        return islice(read_batches(task, data, passes.start), len(passes))
    data = replace(data, seen=lambda batch: first.append(batch[:COMPARED]))
    batches = islice(read_batches(task, data, passes.start), len(passes))
    # Read here, in the training's thread, because comparing is a collective.
    read: list[tuple[Batch, Position]] = []
    short: UserCodeError | None = None
    try:
        read.append(next(batches))
    except UserCodeError as error:
        # A part of the stream may be too short for a batch although the stream is not.
        if not first:
            raise
        short = error
    compare("examples in the training stream", lambda: first[0], STREAM, backend, host, tell)
    if short is not None:
        raise short
    return chain(read, batches)


def _is_webdataset(dataset: Any) -> bool:
    if is_sharded(dataset) or has_length(dataset):
        return False
    return any(kind.__module__.partition(".")[0] == "webdataset" for kind in type(dataset).__mro__)
