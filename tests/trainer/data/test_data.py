"""Who sees which example when: the same for any number of processes."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.trainer.whole_runs import run
from tpu_contract.protocol import ExitCode
from tpu_trainer import Task
from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.data.batch_source import open_data, read_batches
from tpu_trainer.data.order import MapStyleData, Order, Position, Share, epoch_order, permutation
from tpu_trainer.loop.evaluate import evaluation_plan

worlds = st.integers(1, 9)
ALONE = Share(0, 1)


def read(size: int, order: Order, passes: int, custom: Any = None) -> list[tuple[list[int], Position]]:
    """The indices of every pass, with the position after its step."""
    taken = islice(MapStyleData.of(size, order, custom).passes(0), passes)
    return [(rows.tolist(), position) for _, rows, position in taken]


def own_rows(size: int, order: Order, steps: int) -> list[list[int]]:
    return [rows for rows, _ in read(size, order, steps * order.passes)]


@given(size=st.integers(1, 300), rows=st.integers(1, 8), world=worlds, seed=st.integers(0, 2**63), data=st.data())
def test_the_shares_of_any_world_make_up_the_global_batch(
    size: int, rows: int, world: int, seed: int, data: st.DataObject
) -> None:
    batch = rows * world
    size = max(size, batch)
    per_epoch = size // batch
    step = data.draw(st.integers(0, 3 * per_epoch - 1))
    orders = [Order(batch, seed, Share(rank, world)) for rank in range(world)]
    seen = [own_rows(size, order, step + 1)[step] for order in orders]
    epoch, j = divmod(step, per_epoch)
    assert [row for part in seen for row in part] == permutation(size, seed, epoch)[
        j * batch : (j + 1) * batch
    ].tolist()
    assert {len(part) for part in seen} == {rows}


@given(rows=st.integers(1, 6), passes=st.integers(1, 4), world=worlds, step=st.integers(0, 20))
def test_the_passes_of_a_step_make_up_the_step(rows: int, passes: int, world: int, step: int) -> None:
    batch = rows * passes * world
    share = Share(world - 1, world)
    whole = own_rows(3 * batch, Order(batch, 0, share), step + 1)[step]
    parts = own_rows(3 * batch, Order(batch, 0, share, passes), step + 1)[step * passes :]
    assert [row for part in parts for row in part] == whole
    assert {len(part) for part in parts} == {rows}


@given(size=st.integers(1, 100), batch=st.integers(1, 12), taken=st.integers(0, 40), seed=st.integers(0, 99))
def test_a_resumed_run_sees_what_the_whole_run_would_have_seen(size: int, batch: int, taken: int, seed: int) -> None:
    size = max(size, batch)
    whole = read(size, Order(batch, seed, ALONE), taken + 20)
    start = whole[taken - 1][1] if taken else Position()
    assert read(size, Order(batch, seed, ALONE, start=start), 20) == whole[taken:]


@given(size=st.integers(1, 100), before=st.integers(1, 12), after=st.integers(1, 12), taken=st.integers(0, 30))
def test_a_change_of_the_global_batch_trains_nothing_of_an_epoch_twice(
    size: int, before: int, after: int, taken: int
) -> None:
    size = max(size, before, after)
    first = read(size, Order(before, 5, ALONE), taken)
    start = first[-1][1] if first else Position()
    epoch_before = [row for rows, position in first if position.epoch == start.epoch for row in rows]
    rest = read(size, Order(after, 5, ALONE, start=start), size // after + 1)
    epoch_after = [row for rows, position in rest if position.epoch == start.epoch for row in rows]
    assert epoch_before + epoch_after == permutation(size, 5, start.epoch)[: len(epoch_before + epoch_after)].tolist()


def test_random_numbers_drawn_for_a_batch_depend_only_on_the_batch_and_the_process() -> None:
    def drawn(rank: int, batch: int) -> tuple[float, float, float]:
        with Order(4, 9, Share(rank, 2)).seeded(batch):
            return random.random(), float(np.random.random()), float(torch.rand(1))

    first = drawn(0, 7)
    others = {drawn(1, 7), drawn(0, 8)}
    assert drawn(0, 7) == first
    assert len(others | {first}) == 3


@given(size=st.integers(0, 300), seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_an_epoch_orders_every_example_once(size: int, seed: int, epoch: int) -> None:
    order = permutation(size, seed, epoch)
    assert sorted(order.tolist()) == list(range(size))
    assert order.dtype == np.int32


def twice(epoch: int, seed: int, size: int) -> list[int]:
    """Repeated augmentation, in an order that numpy's own generator draws."""
    drawn: list[int] = (np.random.permutation(2 * size) % size).tolist()
    return drawn


@given(taken=st.integers(0, 12), before=st.integers(1, 8), after=st.integers(1, 8))
def test_a_run_continues_inside_an_epoch_of_the_tasks_own_order(taken: int, before: int, after: int) -> None:
    whole = read(10, Order(before, 3, ALONE), taken, twice)
    start = whole[-1][1] if whole else Position()
    seen = [row for rows, position in whole if position.epoch == start.epoch for row in rows]
    rest = read(10, Order(after, 3, ALONE, start=start), 25, twice)
    seen += [row for rows, position in rest if position.epoch == start.epoch for row in rows]
    assert seen == epoch_order(10, 3, start.epoch, twice)[: len(seen)].tolist()
    assert len(seen) > 20 - before - after


def test_an_order_draws_from_the_seeded_generators_and_leaves_no_trace_in_them() -> None:
    random.seed(1), np.random.seed(1)
    untouched = (random.random(), float(np.random.random()))
    random.seed(1), np.random.seed(1)
    orders = [epoch_order(10, 3, epoch, twice).tolist() for epoch in (0, 1, 0)]
    assert (random.random(), float(np.random.random())) == untouched
    assert orders[0] == orders[2] != orders[1]


@pytest.mark.parametrize(
    ("indices", "complaint"),
    [
        ([0, 1, 2, 10], "epoch 0 has the index 10; the"),
        ([0, -1, 2, 3], "epoch 0 has the index -1; the"),
        ([0.0, 1.0, 2.0, 3.0], "numbers, got float64 of shape"),
        ([[0, 1], [2, 3]], "got int64 of shape [2, 2]"),
        ([0, 1], "epoch 0 of the task's order has 2 examples, fewer"),
    ],
)
def test_an_order_that_cannot_be_used_is_refused(indices: Any, complaint: str) -> None:
    task = constant(Raising(10, 10), order=lambda epoch, seed, size: indices)
    with pytest.raises(UserCodeError) as caught:
        next(read_batches(task, open_data(task, Order(4, 0, ALONE)), 0))
    assert complaint in str(caught.value)


def test_the_order_of_an_epoch_is_made_once() -> None:
    asked: list[int] = []

    def order(epoch: int, seed: int, size: int) -> range:
        asked.append(epoch)
        return range(size)

    task = constant(Raising(8, 8), order=order)
    batches = read_batches(task, open_data(task, Order(4, 0, ALONE, passes=2)), 0)
    positions = [position for _, position in islice(batches, 8)]
    assert asked == [0, 1]
    assert positions == [Position(0, 4)] * 2 + [Position(0, 8)] * 2 + [Position(1, 4)] * 2 + [Position(1, 8)] * 2


def test_seed_and_epoch_are_never_interchangeable() -> None:
    orders = [permutation(100, seed, epoch).tolist() for seed, epoch in [(0, 0), (0, 1), (1, 0), (2**32, 0)]]
    assert len({tuple(order) for order in orders}) == 4


@given(size=st.integers(1, 300), rows=st.integers(1, 16), world=worlds)
def test_evaluation_counts_every_example_in_one_batch_of_one_process(size: int, rows: int, world: int) -> None:
    plans = [evaluation_plan(size, rows, Share(rank, world)) for rank in range(world)]
    counted = [index for plan in plans for batch in plan for index in batch.indices[: batch.counted]]
    assert sorted(counted) == list(range(size))


@given(size=st.integers(1, 300), rows=st.integers(1, 16), world=worlds)
def test_evaluation_has_the_same_shapes_in_every_process(size: int, rows: int, world: int) -> None:
    plans = [evaluation_plan(size, rows, Share(rank, world)) for rank in range(world)]
    assert len({len(plan) for plan in plans}) == 1
    assert {len(batch.indices) for plan in plans for batch in plan} == {rows}
    assert all(0 <= index < size for plan in plans for batch in plan for index in batch.indices)


class Raising(Dataset[Any]):
    """A map-style dataset with a mistake: StopIteration is what ends an iterator, and this is none."""

    def __init__(self, size: int, good: int) -> None:
        self._size, self._good = size, good

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Tensor:
        if index >= self._good:
            raise StopIteration
        return torch.zeros(4)


def constant(train: Dataset[Any], **others: Any) -> Task:
    return Task(model=nn.Linear(4, 1), train=train, loss=lambda m, batch: m(batch).square().mean(), **others)


def test_a_stop_iteration_from_the_training_data_is_a_user_error() -> None:
    outcome = run(lambda hp, rank: constant(Raising(64, 60))).outcome
    assert outcome.code is ExitCode.UserError
    assert outcome.message.endswith("StopIteration\nStopIteration")


def test_a_stop_iteration_from_the_held_out_data_is_a_user_error() -> None:
    metrics = {"evaluation": Raising(64, 10), "metrics": lambda m, batch: {"a": batch[:, 0]}}
    outcome = run(lambda hp, rank: constant(Raising(64, 64), **metrics), trainSteps=4).outcome
    assert outcome.code is ExitCode.UserError
    assert outcome.message.endswith("StopIteration\nStopIteration")


@pytest.mark.parametrize(
    ("lengths", "held_out"), [((64, 80), False), ((64, 65), True), ((2**24, 2**24 + 1), False), ((2**41, 2**40), True)]
)
def test_data_of_unequal_lengths_ends_all_processes_with_the_same_error(
    lengths: tuple[int, int], held_out: bool
) -> None:
    def task(hp: Any, rank: int) -> Task:
        other = Raising(lengths[rank], 2**60)
        metrics = {"evaluation": other, "metrics": lambda m, batch: {"a": batch[:, 0]}}
        return constant(Raising(64, 64), **metrics) if held_out else constant(other)

    ran = run(task, 2, trainSteps=4)
    assert ran.outcome.code is ExitCode.UserError
    kind = "evaluation" if held_out else "training"
    assert {outcome.message.partition(":")[0] for outcome in ran.outcomes} == {
        f"the {kind} data has {lengths[0]} examples for host 0 and {lengths[1]} for host 1"
    }


def test_hosts_of_a_large_gang_with_other_lengths_are_named_briefly() -> None:
    ran = run(lambda hp, rank: constant(Raising(64 + 8 * rank, 2**60)), 4, trainSteps=4)
    assert ran.outcome.message.startswith("the training data has 64 examples for host 0 and 72-88 for hosts 1-3: ")
