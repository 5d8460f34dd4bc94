"""Streams in shards: the same global batches for any number of processes, each of which reads only its own part."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion
from torch.utils.data import get_worker_info

from tests.trainer import tasks
from tests.trainer.gang_processes import Launcher, start_replicas
from tests.trainer.in_threads import in_threads
from tests.trainer.whole_runs import run
from tpu_contract.protocol import ExitCode
from tpu_trainer import Hyperparameters, Task
from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.data.batch_source import open_data, read_batches
from tpu_trainer.data.loading import Workers, is_sharded
from tpu_trainer.data.order import Order, Position, Share
from tpu_trainer.data.shards import ShardData, shard_data

# torch warns where a machine has fewer cores than that.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

ALONE = Share(0, 1)


class Files:
    """Shard i has `lengths[i]` examples: 1000 x i and the following numbers. `opened`: the shards that were read."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths
        self.num_shards = len(lengths)
        self.opened: list[int] = []

    def shard(self, index: int, count: int) -> Iterable[Any]:
        assert count == len(self.lengths)
        self.opened.append(index)
        return range(1000 * index, 1000 * index + self.lengths[index])


def batches(
    stream: Any, order: Order, steps: int, first_batch: int = 0, **options: Any
) -> list[tuple[list[Any], Position]]:
    """Those of a process: for every pass its examples and its position."""
    task = Task(model=tasks.Network(), train=stream, loss=tasks.loss, collate=list, **options)
    return list(islice(read_batches(task, open_data(task, order), first_batch), steps * order.passes))


def plan(stream: Any, order: Order) -> ShardData:
    return shard_data(Workers(dataset=stream), order)


def globally(stream: Any, batch: int, world: int, steps: int, passes: int = 1, seed: int = 3) -> list[list[Any]]:
    """The global batches of `world` processes, each in the order of the run."""
    parts = [batches(stream, Order(batch, seed, Share(rank, world), passes), steps) for rank in range(world)]
    own = [
        [[row for rows, _ in part[at : at + passes] for row in rows] for at in range(0, len(part), passes)]
        for part in parts
    ]
    return [[row for rows in zip(*step, strict=True) for row in rows] for step in zip(*own, strict=True)]


UNEVEN = Files(5, 9, 7, 11, 6, 8, 40, 1)


@pytest.mark.parametrize("world", [2, 3, 4, 6, 8, 24])
def test_the_global_batches_are_the_same_for_any_number_of_processes(world: int) -> None:
    assert globally(UNEVEN, 24, world, steps=12) == globally(UNEVEN, 24, 1, steps=12)


def test_the_passes_of_a_step_make_up_the_step() -> None:
    assert globally(UNEVEN, 24, 2, 12, passes=3) == globally(UNEVEN, 24, 2, 12)


def test_the_order_depends_on_the_seed() -> None:
    assert globally(UNEVEN, 8, 1, 4, seed=4) != globally(UNEVEN, 8, 1, 4, seed=3)


def test_a_pass_over_shards_of_equal_length_sees_every_example_once() -> None:
    seen = [row for rows in globally(Files(*[6] * 8), 8, 2, steps=12) for row in rows]
    everything = [1000 * index + number for index in range(8) for number in range(6)]
    assert [sorted(seen[:48]), sorted(seen[48:])] == [everything, everything]


def test_every_example_is_seen_about_equally_often_whatever_its_shards_length() -> None:
    counted = Counter(row for rows in globally(Files(2, 9, 30, 5), 46, 2, steps=40) for row in rows)
    assert len(counted) == 46
    assert (min(counted.values()), max(counted.values())) == (39, 42)


@given(shards=st.integers(1, 600))
def test_there_are_as_many_lanes_as_a_power_of_two_of_shards_and_never_more_than_256(shards: int) -> None:
    lanes = plan(Files(*[1] * shards), Order(4, 0, ALONE)).lanes
    assert lanes == 256 if shards >= 256 else lanes <= shards < 2 * lanes
    assert lanes & (lanes - 1) == 0


def test_a_process_opens_its_own_shards_only() -> None:
    streams = [Files(*[6] * 16) for _ in range(4)]
    for rank, stream in enumerate(streams):
        batches(stream, Order(16, 0, Share(rank, 4)), 6)
    opened = [set(stream.opened) for stream in streams]
    assert [len(own) for own in opened] == [4] * 4
    assert set.union(*opened) == set(range(16))


@pytest.mark.parametrize("workers", [1, 3, 64])
def test_workers_read_the_same_examples(workers: int) -> None:
    stream, order = Files(*[7] * 9), Order(12, 3, Share(1, 2), passes=2)
    assert batches(stream, order, 8, workers=workers) == batches(stream, order, 8)


@pytest.mark.parametrize("taken", [0, 1, 13])
@pytest.mark.parametrize(("world", "after"), [(1, 8), (2, 24), (8, 16), (8, 24)])
def test_another_slice_continues_with_the_next_example_of_the_order(taken: int, world: int, after: int) -> None:
    whole = [row for rows in globally(UNEVEN, 8, 1, 40) for row in rows]
    start = continued(UNEVEN, taken, world=4)
    parts = [batches(UNEVEN, Order(after, 3, Share(rank, world), start=start), 4) for rank in range(world)]
    # Example k of the run belongs to process k mod world, wherever the run continues.
    seen = {row for part in parts for rows, _ in part for row in rows}
    assert seen == set(whole[8 * taken : 8 * taken + 4 * after])
    assert {len(rows) for part in parts for rows, _ in part} == {after // world}


def continued(stream: Any, steps: int, world: int) -> Position:
    """What a checkpoint keeps after so many steps of 8 examples."""

    def position(backend: Any) -> Position:
        order = Order(8, 3, Share(backend.rank, world))
        reached = batches(stream, order, steps)
        return plan(stream, order).merge(reached[-1][1], backend) if reached else Position()

    (kept,) = {repr(one): one for one in in_threads(world, position)}.values()
    return kept


class Shuffled(Files):
    """Every shard draws as careless code does."""

    def shard(self, index: int, count: int) -> Iterable[Any]:
        return ((number, random.random(), float(torch.rand(()))) for number in super().shard(index, count))


def test_random_numbers_are_the_same_for_any_number_of_processes_workers_and_after_a_resume() -> None:
    stream = Shuffled(*[9] * 8)
    whole = [rows for rows, _ in batches(stream, Order(8, 3, ALONE), 20)]
    assert globally(stream, 8, 4, 20) == whole
    assert [rows for rows, _ in batches(stream, Order(8, 3, ALONE), 20, workers=3)] == whole
    start = continued(stream, 11, world=2)
    assert [rows for rows, _ in batches(stream, Order(8, 3, ALONE, start=start), 9, first_batch=11)] == whole[11:]
    assert len({drawn for rows in whole for _, drawn, _ in rows}) == 160


class Skipping(Files):
    """Its shards can begin further on by themselves."""

    def __init__(self, *lengths: int) -> None:
        super().__init__(*lengths)
        self.skipped: list[int] = []

    def shard(self, index: int, count: int) -> Iterable[Any]:
        return Skipper(self, super().shard(index, count))


class Skipper:
    def __init__(self, of: Skipping, examples: Iterable[Any]) -> None:
        self._of, self._examples = of, examples

    def skip(self, count: int) -> Iterable[Any]:
        self._of.skipped.append(count)
        return islice(self._examples, count, None)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._examples)


def test_a_shard_that_can_skip_is_not_read_again() -> None:
    stream = Skipping(*[9] * 4)
    start = continued(stream, 4, world=2)
    assert stream.skipped == []
    rest = batches(stream, Order(8, 3, ALONE, start=start), 2)
    assert [rows for rows, _ in rest] == globally(stream, 8, 1, 6)[4:]
    assert stream.skipped == [8] * 4


class HuggingFace:
    """The interface of datasets.IterableDataset that is used: keywords, `n_shards`, an epoch for every dataset."""

    def __init__(self, shards: Sequence[int], epoch: int = 0) -> None:
        self.shards, self.n_shards, self.epoch = shards, len(shards), epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def shard(self, num_shards: int, index: int, contiguous: bool = True) -> HuggingFace:
        assert (num_shards, contiguous) == (self.n_shards, True)
        return HuggingFace([self.shards[index]])

    def __iter__(self) -> Iterator[Any]:
        # As it does in a worker of a DataLoader: each takes its own shards.
        info = get_worker_info()
        for shard in self.shards if info is None else self.shards[info.id :: info.num_workers]:
            yield from ((shard, number, self.epoch) for number in range(4))

    def state_dict(self) -> Any:
        raise AssertionError("examples in its shuffle buffer are lost when a state is loaded")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_of_hugging_face_is_read_shard_by_shard(workers: int) -> None:
    stream = HuggingFace("abcd")
    seen = [row for rows, _ in batches(stream, Order(16, 3, ALONE), 3, workers=workers) for row in rows]
    for epoch in range(3):
        assert sorted(seen[16 * epoch : 16 * epoch + 16]) == [(shard, i, epoch) for shard in "abcd" for i in range(4)]


def test_what_has_a_length_and_indices_is_not_read_in_shards() -> None:
    class MapStyle(Files):
        __len__ = __getitem__ = lambda self, *_: 1

    assert is_sharded(Files(1))
    assert not is_sharded(MapStyle(1))
    assert not is_sharded(range(3))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_empty_shard_is_an_error_that_names_it(workers: int, snapshot: SnapshotAssertion) -> None:
    with pytest.raises(UserCodeError) as caught:
        batches(Files(3, 3, 0, 3), Order(4, 3, ALONE), 9, workers=workers)
    assert "2 of 4" in str(caught.value)
    assert str(caught.value) == snapshot


@pytest.mark.parametrize("shards", [None, 0, -1, 2.0, True])
def test_a_stream_must_say_how_many_shards_it_has(shards: Any, snapshot: SnapshotAssertion) -> None:
    stream = Files(1)
    stream.num_shards = shards
    with pytest.raises(UserCodeError) as caught:
        plan(stream, Order(4, 0, ALONE))
    assert str(caught.value) == snapshot


def test_other_shards_than_the_checkpoints_are_refused(snapshot: SnapshotAssertion) -> None:
    start = continued(Files(4, 4), 2, world=1)
    with pytest.raises(UserCodeError) as caught:
        plan(Files(4, 4, 4), Order(4, 0, ALONE, start=start))
    assert str(caught.value) == snapshot
    with pytest.raises(UserCodeError) as caught:
        plan(Files(4, 4), Order(4, 0, ALONE, start=Position(1, 8)))
    assert str(caught.value) == snapshot


class Examples(Files):
    """Shards of `tasks.examples`, of unequal lengths; one example is NaN where `nan` says so."""

    nan = -1

    def shard(self, index: int, count: int) -> Iterable[Any]:
        features, labels = tasks.examples().tensors
        for number in super().shard(index, count):
            row = number % tasks.EXAMPLES
            yield features[row] if number != self.nan else features[row] * float("nan"), labels[row]


def made(stream: Any, **options: Any) -> Task:
    return Task(model=tasks.Network(), train=stream, loss=tasks.loss, **options)


def test_replicas_with_uneven_shards_end_together_and_count_epochs_alike() -> None:
    ran = run(lambda hp, rank: made(Examples(2, 9, 30, 5)), 4, trainSteps=20, datasetSize=46)
    alone = run(lambda hp, rank: made(Examples(2, 9, 30, 5)), 1, trainSteps=20, datasetSize=46)
    assert ran.outcome.code is ExitCode.Succeeded, ran.outcome.message
    ran.assert_replicas_equal()
    assert ran.losses == pytest.approx(alone.losses, abs=1e-5)
    assert ran.warnings == ()


def test_an_example_that_is_not_finite_ends_all_replicas_alike() -> None:
    stream = type("WithNaN", (Examples,), {"nan": 2007})
    ran = run(lambda hp, rank: made(stream(20, 20, 20, 20)), 4)
    assert {outcome.code for outcome in ran.outcomes} == {ExitCode.NotFinite}


def test_fewer_shards_than_processes_are_a_warning_with_their_number() -> None:
    ran = run(lambda hp, rank: made(Examples(20, 20, 20)), 4, trainSteps=10)
    assert ran.outcome.code is ExitCode.Succeeded
    (warning,) = ran.warnings
    assert "cannot share those equally" in warning
    assert "is read by 2 processes" in warning
    assert ran.losses == pytest.approx(run(lambda hp, rank: made(Examples(20, 20, 20)), trainSteps=10).losses, abs=1e-5)


def test_epochs_are_counted_in_examples() -> None:
    task = made(Files(*[4] * 4), collate=list)
    seen = list(islice(read_batches(task, open_data(task, Order(8, 0, ALONE), epoch_size=20), 0), 6))
    assert [(position.epoch, position.offset) for _, position in seen] == [
        (0, 8),
        (0, 16),
        (1, 4),
        (1, 12),
        (1, 20),
        (2, 8),
    ]


@pytest.mark.parametrize(("replicas", "workers"), [(1, 0), (4, 0), (2, 2)])
def test_a_checkpoint_continues_on_another_slice_with_the_same_losses(
    replicas: int, workers: int, tmp_path: Path
) -> None:
    spec = {"checkpoint": {"uri": str(tmp_path), "everySteps": 7, "keep": 1}, "datasetSize": 46}
    whole = run(lambda hp, rank: made(Examples(2, 9, 30, 5)), 2, trainSteps=14, datasetSize=46).losses
    first = run(lambda hp, rank: made(Examples(2, 9, 30, 5), workers=workers), 2, trainSteps=7, **spec)
    second = run(lambda hp, rank: made(Examples(2, 9, 30, 5), workers=workers), replicas, trainSteps=14, **spec)
    assert second.outcome.code is ExitCode.Succeeded, second.outcome.message
    assert first.losses + second.losses == pytest.approx(whole, abs=1e-5)
    assert len(second.losses) == 7


def test_on_chips_the_places_of_all_lanes_come_over_the_device(launcher: Launcher, tmp_path: Path) -> None:
    spec = {"entrypoint": "tests.trainer.data.test_shards:entrypoint", "checkpoint": {"uri": str(tmp_path), "keep": 1}}
    spec["checkpoint"]["everySteps"] = 5
    gang = start_replicas(launcher, "chips", 2, trainSteps=10, warmupSteps=0, **spec)
    assert set(gang.wait()) == {0}, gang.output()
    (state,) = tmp_path.rglob("step-00000010-*/state.json")
    position = json.loads(state.read_text())["document"]["position"]["dataset"]
    assert sum(taken for _, taken in position["places"].values()) == position["taken"] == 160
    assert sorted(position["places"]) == ["0", "1", "2", "3"]


def entrypoint(hp: Hyperparameters) -> Task:
    return made(Examples(80, 80, 80, 80))
