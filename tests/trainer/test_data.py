"""Who sees which example when: the same for any number of processes."""

from __future__ import annotations

import random
from itertools import islice

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpu_trainer.data import Order, PassSampler, Position, Share, global_batches, permutation
from tpu_trainer.evaluation_plan import evaluation_plan

worlds = st.integers(1, 9)
ALONE = Share(0, 1)


def own_rows(size: int, order: Order, steps: int) -> list[list[int]]:
    """The indices of every pass of the first `steps` steps."""
    return list(islice(PassSampler(size, order), steps * order.passes))


@given(size=st.integers(1, 300), rows=st.integers(1, 8), world=worlds, seed=st.integers(0, 2**63), data=st.data())
def test_the_ranks_of_any_world_together_see_the_slice_of_the_permutation(
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
def test_the_passes_of_a_step_together_are_the_step(rows: int, passes: int, world: int, step: int) -> None:
    batch = rows * passes * world
    share = Share(world - 1, world)
    whole = own_rows(3 * batch, Order(batch, 0, share), step + 1)[step]
    parts = own_rows(3 * batch, Order(batch, 0, share, passes), step + 1)[step * passes :]
    assert [row for part in parts for row in part] == whole
    assert {len(part) for part in parts} == {rows}


@given(size=st.integers(1, 100), batch=st.integers(1, 12), taken=st.integers(0, 40), seed=st.integers(0, 99))
def test_a_run_that_continues_at_a_position_sees_what_the_whole_run_would_have_seen(
    size: int, batch: int, taken: int, seed: int
) -> None:
    size = max(size, batch)
    whole = list(islice(global_batches(size, Order(batch, seed, ALONE)), taken + 20))
    start = whole[taken - 1][1] if taken else Position()
    rest = list(islice(global_batches(size, Order(batch, seed, ALONE, start=start)), 20))
    assert [(rows.tolist(), position) for rows, position in rest] == [
        (rows.tolist(), position) for rows, position in whole[taken:]
    ]


@given(size=st.integers(1, 100), before=st.integers(1, 12), after=st.integers(1, 12), taken=st.integers(0, 30))
def test_a_change_of_the_global_batch_trains_nothing_of_an_epoch_twice(
    size: int, before: int, after: int, taken: int
) -> None:
    size = max(size, before, after)
    first = list(islice(global_batches(size, Order(before, 5, ALONE)), taken))
    start = first[-1][1] if first else Position()
    epoch_before = [row for rows, position in first if position.epoch == start.epoch for row in rows.tolist()]
    rest = islice(global_batches(size, Order(after, 5, ALONE, start=start)), size // after + 1)
    epoch_after = [row for rows, position in rest if position.epoch == start.epoch for row in rows.tolist()]
    assert epoch_before + epoch_after == permutation(size, 5, start.epoch)[: len(epoch_before + epoch_after)].tolist()


def test_random_numbers_drawn_while_a_batch_is_read_depend_on_the_batch_and_the_process_alone() -> None:
    def drawn(rank: int, batch: int) -> tuple[float, float, float]:
        with Order(4, 9, Share(rank, 2)).drawing(batch):
            return random.random(), float(np.random.random()), float(torch.rand(1))

    first = drawn(0, 7)
    others = {drawn(1, 7), drawn(0, 8)}
    assert drawn(0, 7) == first
    assert len(others | {first}) == 3


@given(size=st.integers(0, 300), seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_an_epoch_orders_every_example_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(permutation(size, seed, epoch).tolist()) == list(range(size))


def test_seed_and_epoch_never_stand_for_each_other() -> None:
    orders = [permutation(100, seed, epoch).tolist() for seed, epoch in [(0, 0), (0, 1), (1, 0), (2**32, 0)]]
    assert len({tuple(order) for order in orders}) == 4


@given(size=st.integers(1, 300), rows=st.integers(1, 16), world=worlds)
def test_evaluation_counts_every_example_in_one_batch_of_one_process(size: int, rows: int, world: int) -> None:
    plans = [evaluation_plan(size, rows, Share(rank, world)) for rank in range(world)]
    counted = [
        index
        for plan in plans
        for batch in plan
        for index, weight in zip(batch.indices, batch.counted, strict=True)
        if weight
    ]
    assert sorted(counted) == list(range(size))


@given(size=st.integers(1, 300), rows=st.integers(1, 16), world=worlds)
def test_evaluation_has_the_same_shapes_in_every_process(size: int, rows: int, world: int) -> None:
    plans = [evaluation_plan(size, rows, Share(rank, world)) for rank in range(world)]
    assert len({len(plan) for plan in plans}) == 1
    assert {len(batch.indices) for plan in plans for batch in plan} == {rows}
    assert all(0 <= index < size for plan in plans for batch in plan for index in batch.indices)
