"""Who sees which example when: the same for any number of processes."""

from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from tpu_trainer.data import Share, TrainSampler, permutation
from tpu_trainer.evaluation_plan import evaluation_plan

worlds = st.integers(1, 9)


@given(size=st.integers(1, 300), rows=st.integers(1, 8), world=worlds, seed=st.integers(0, 2**63), data=st.data())
def test_the_ranks_of_any_world_together_see_the_slice_of_the_permutation(
    size: int, rows: int, world: int, seed: int, data: st.DataObject
) -> None:
    batch = rows * world
    size = max(size, batch)
    per_epoch = size // batch
    step = data.draw(st.integers(0, 3 * per_epoch - 1))
    samplers = [TrainSampler(size, batch, seed, Share(rank, world)) for rank in range(world)]
    seen = [next(islice(sampler, step, None)) for sampler in samplers]
    epoch, j = divmod(step, per_epoch)
    assert [row for part in seen for row in part] == permutation(size, seed, epoch)[
        j * batch : (j + 1) * batch
    ].tolist()
    assert {len(part) for part in seen} == {rows}


@given(rows=st.integers(1, 6), passes=st.integers(1, 4), world=worlds, step=st.integers(0, 20))
def test_the_passes_of_a_step_together_are_the_step(rows: int, passes: int, world: int, step: int) -> None:
    batch = rows * passes * world
    share = Share(world - 1, world)
    whole = next(islice(TrainSampler(3 * batch, batch, 0, share), step, None))
    parts = list(islice(TrainSampler(3 * batch, batch, 0, share, passes), step * passes, (step + 1) * passes))
    assert [row for part in parts for row in part] == whole
    assert {len(part) for part in parts} == {rows}


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
