"""Data without a length: the same global batches for any number of processes, and where a run continues in it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion
from torch.utils.data import IterableDataset

from tests.trainer import tasks
from tpu_trainer import Task
from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.data.batch_source import open_data, read_batches
from tpu_trainer.data.loading import has_length
from tpu_trainer.data.order import Order, Position, Share, StreamData


class Numbers(IterableDataset[int]):
    """0, 1, 2 ... of every epoch, each plus 1000 x epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return (1000 * self.epoch + number for number in range(self.size))


class StatefulNumbers(Numbers):
    """Continues after the example that its state names."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.taken = 0

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]

    def __iter__(self) -> Iterator[int]:
        while self.taken < self.size:
            self.taken += 1
            yield 1000 * self.epoch + self.taken - 1
        self.taken = 0


Seen = list[tuple[list[int], Position]]


def seen(dataset: Numbers, order: Order, steps: int) -> Seen:
    task = Task(model=tasks.Network(), train=dataset, loss=tasks.loss)
    batches = read_batches(task, StreamData(order, dataset), 0)
    return [(batch.tolist(), position) for batch, position in islice(batches, steps * order.passes)]


@given(size=st.integers(1, 60), rows=st.integers(1, 4), world=st.integers(1, 5), passes=st.integers(1, 3))
def test_all_processes_together_train_on_the_stream_in_order(size: int, rows: int, world: int, passes: int) -> None:
    batch = rows * world * passes
    size = max(size, batch)
    steps = 2 * (size // batch)
    parts = [seen(Numbers(size), Order(batch, 0, Share(rank, world), passes), steps) for rank in range(world)]
    for step in range(steps):
        own = [[row for rows, _ in part[step * passes : (step + 1) * passes] for row in rows] for part in parts]
        epoch, j = divmod(step, size // batch)
        assert list(chain(*own)) == [1000 * epoch + j * batch + i for i in range(batch)]


class Shuffled(Numbers):
    """Draws the order of every epoch from Python's own generator, as a careless dataset does."""

    def __iter__(self) -> Iterator[int]:
        numbers = list(super().__iter__())
        random.shuffle(numbers)
        return iter(numbers)


@pytest.mark.parametrize("first_batch", [0, 5])
def test_a_dataset_that_shuffles_gives_all_processes_the_same_stream(first_batch: int) -> None:
    def own(rank: int) -> list[list[int]]:
        task = Task(model=tasks.Network(), train=Shuffled(12), loss=tasks.loss)
        batches = read_batches(task, open_data(task, Order(4, 3, Share(rank, 2))), first_batch)
        return [batch.tolist() for batch, _ in islice(batches, 3)]

    first = own(0)
    random.seed(99)
    assert sorted(chain(*first, *own(1))) == list(range(12))


def test_an_iterable_that_knows_its_length_is_a_stream() -> None:
    class Sized(Numbers):
        def __len__(self) -> int:
            return self.size

    assert not has_length(Sized(4))
    assert has_length([1, 2])


@given(taken=st.integers(1, 12))
def test_a_dataset_with_a_state_continues_inside_its_epoch(taken: int) -> None:
    whole = seen(StatefulNumbers(22), Order(4, 0, Share(0, 1)), 20)
    start = whole[taken - 1][1]
    assert seen(StatefulNumbers(22), Order(4, 0, Share(0, 1), start=start), 20 - taken) == whole[taken:]


class WritesOnly(Numbers):
    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("dataset", "state"),
    [
        (Numbers(20), None),
        (WritesOnly(20), {}),
        (StatefulNumbers(20), None),
    ],
)
def test_a_dataset_without_a_state_begins_its_epoch_again_and_says_so(
    dataset: Numbers, state: dict[str, Any] | None, snapshot: SnapshotAssertion
) -> None:
    start = Position(epoch=2, offset=8, dataset=state)
    continued = seen(dataset, Order(4, 0, Share(0, 1), start=start), 2)
    assert [rows for rows, _ in continued] == [[2000, 2001, 2002, 2003], [2004, 2005, 2006, 2007]]
    assert StreamData(Order(4, 0, Share(0, 1), start=start), dataset).describe_repeat() == snapshot


def test_a_stream_that_continues_exactly_is_no_finding() -> None:
    exact: list[tuple[Numbers, Position]] = [
        (StatefulNumbers(20), Position(2, 8, {"taken": 8})),
        (Numbers(20), Position(2, 0)),
    ]
    for dataset, start in exact:
        assert StreamData(Order(4, 0, Share(0, 1), start=start), dataset).describe_repeat() is None


def test_a_stream_shorter_than_one_global_batch_is_an_error(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(UserCodeError) as caught:
        seen(Numbers(3), Order(4, 0, Share(0, 1)), 1)
    assert "3 examples" in str(caught.value)
    assert str(caught.value) == snapshot


def test_a_dataset_state_that_is_not_json_is_refused() -> None:
    class Odd(StatefulNumbers):
        def state_dict(self) -> dict[str, Any]:
            return {"generator": torch.Generator()}

    with pytest.raises(UserCodeError, match="must hold JSON values only"):
        seen(Odd(8), Order(4, 0, Share(0, 1)), 1)
