"""When a checkpoint is taken, that training waits only for the one before, and what is said when writing fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from tests.trainer.checkpoint.runs import author, latest, snapshot
from tests.trainer.checkpoint.stores import PATIENCE, Intercepted, MemoryStore
from tpu_trainer.checkpoint.catalogue import CheckpointTarget, prepare
from tpu_trainer.checkpoint.checkpointer import CheckpointCost, Checkpointer, Checkpoints, CheckpointSchedule
from tpu_trainer.checkpoint.snapshot import Snapshot
from tpu_trainer.contract.errors import StorageError
from tpu_trainer.contract.findings import NumericalHealth
from tpu_trainer.data.order import Position
from tpu_trainer.storage.store import ObjectStore

HERE = Position()


@pytest.mark.parametrize(
    ("due", "step", "seconds_since", "expected"),
    [
        (CheckpointSchedule(10, None, 99), 10, 0, True),
        (CheckpointSchedule(10, None, 99), 11, 1e9, False),
        (CheckpointSchedule(None, 300, 99), 11, 299.9, False),
        (CheckpointSchedule(None, 300, 99), 11, 300, True),
        (CheckpointSchedule(10, 300, 99), 20, 0, True),
        (CheckpointSchedule(10, 300, 99), 21, 300, True),
        (CheckpointSchedule(10, 300, 99), 21, 299, False),
        (CheckpointSchedule(None, None, 99), 98, 1e9, False),
        (CheckpointSchedule(None, None, 99), 99, 0, True),
    ],
)
def test_a_checkpoint_is_due_by_steps_by_minutes_and_at_the_end(
    due: CheckpointSchedule, step: int, seconds_since: float, expected: bool
) -> None:
    assert (due.by_step(step) or due.by_time(seconds_since)) is expected


class Run:
    """A run on a store that may stand still or refuse; everything that was said and taken."""

    def __init__(
        self, store: ObjectStore, due: CheckpointSchedule, keep: int = 9, now: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.said: list[str] = []
        self.taken: list[int] = []
        target = CheckpointTarget(store, author(), keep)
        self.checkpoints = Checkpointer(target, due, self._take, self.said.append, now=now)

    def _take(self, step: int, position: Position, health: NumericalHealth, alone: bool) -> Snapshot:
        self.taken.append(step)
        return snapshot(step)

    def train(self, *steps: int) -> None:
        for step in steps:
            if self.checkpoints.overdue() or self.checkpoints.due(step):
                self.checkpoints.save(step, HERE, NumericalHealth())


class Gate:
    """Operations wait before it while it is shut; `arrived` is set when one does."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.arrived = threading.Event()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def __call__(self, operation: str) -> None:
        self.arrived.set()
        assert self._open.wait(PATIENCE)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


def steps_in(store: ObjectStore) -> int | None:
    found = latest(store, author().fingerprint, lambda _: None)
    return None if found is None else found.commit.step


def test_training_continues_while_a_checkpoint_is_written(gate: Gate) -> None:
    store = MemoryStore()
    run = Run(Intercepted(store, gate), CheckpointSchedule(2, None, 99))
    gate.shut()
    run.train(1, 2, 3)
    assert gate.arrived.wait(PATIENCE)
    assert run.checkpoints.last_step is None
    gate.open()
    assert run.checkpoints.finish()
    assert run.checkpoints.last_step == steps_in(store) == 2


def test_a_snapshot_is_taken_only_after_the_one_before_is_written(gate: Gate) -> None:
    store = MemoryStore()
    clock = count(0.0, 5.0)
    run = Run(Intercepted(store, gate), CheckpointSchedule(2, None, 99), now=lambda: next(clock))
    gate.shut()
    run.train(2)
    begun, done = threading.Event(), threading.Event()

    def next_one() -> None:
        begun.set()
        run.train(4)
        done.set()

    training = threading.Thread(target=next_one)
    training.start()
    assert begun.wait(PATIENCE)
    assert run.taken == [2]
    assert not done.is_set()
    gate.open()
    training.join(PATIENCE)
    assert done.is_set()
    assert run.checkpoints.finish()
    assert run.taken == [2, 4]
    (said,) = run.said
    assert said.startswith("step 4: training stood still")
    assert "5.0 s" in said
    assert "checkpoint of step 2" in said


def test_a_failed_write_is_reported_and_the_next_one_is_attempted(snapshot: SnapshotAssertion) -> None:
    store = MemoryStore()
    failing = iter([StorageError("memory: cannot write model.safetensors: No space left on device")])

    def fail_once(operation: str) -> None:
        if operation == "put" and (error := next(failing, None)):
            raise error

    run = Run(Intercepted(store, fail_once), CheckpointSchedule(2, None, 99))
    run.train(2)
    assert not run.checkpoints.finish()
    assert "checkpoint of step 2" in str(run.said)
    assert run.said == snapshot
    run.train(3, 4)
    assert run.checkpoints.finish()
    assert run.checkpoints.last_step == steps_in(store) == 4
    assert len(run.said) == 1


def test_any_other_error_is_reported_with_its_type_and_fails_nothing(snapshot: SnapshotAssertion) -> None:
    def fail(operation: str) -> None:
        raise MemoryError("of the\nhost")

    run = Run(Intercepted(MemoryStore(), fail), CheckpointSchedule(2, None, 99))
    run.train(2)
    assert not run.checkpoints.finish()
    assert "checkpoint of step 2" in str(run.said)
    assert run.said == snapshot


def test_old_ones_that_cannot_be_deleted_are_reported_but_the_checkpoint_counts(snapshot: SnapshotAssertion) -> None:
    store = MemoryStore()

    def forbid(operation: str) -> None:
        if operation == "list":
            raise StorageError("memory: cannot list the bucket: permission denied")

    run = Run(Intercepted(store, forbid), CheckpointSchedule(2, None, 99))
    run.train(2)
    assert run.checkpoints.finish()
    assert run.checkpoints.last_step == steps_in(store) == 2
    assert "checkpoint of step 2" in str(run.said)
    assert run.said == snapshot


def test_a_stop_between_checkpoints_writes_one_and_waits_for_it() -> None:
    store = MemoryStore()
    run = Run(store, CheckpointSchedule(10, None, 99))
    run.train(10, 11, 12, 13)
    assert run.checkpoints.save_now(13, HERE, NumericalHealth()) == 13
    assert steps_in(store) == 13


def test_a_stop_at_a_step_that_was_due_writes_it_once() -> None:
    run = Run(MemoryStore(), CheckpointSchedule(10, None, 99))
    run.train(10)
    assert run.checkpoints.save_now(10, HERE, NumericalHealth()) == 10
    assert run.taken == [10]


def test_a_stop_repeats_a_write_that_failed() -> None:
    store = MemoryStore()
    failing = iter([StorageError("memory: no connection")])

    def fail_once(operation: str) -> None:
        if error := next(failing, None):
            raise error

    run = Run(Intercepted(store, fail_once), CheckpointSchedule(10, None, 99))
    run.train(10)
    assert run.checkpoints.save_now(10, HERE, NumericalHealth()) == 10
    assert steps_in(store) == 10


def test_a_stop_whose_checkpoint_cannot_be_written_returns_none(snapshot: SnapshotAssertion) -> None:
    store = MemoryStore()
    refusing = threading.Event()

    def fail(operation: str) -> None:
        if refusing.is_set():
            raise StorageError("memory: no connection")

    run = Run(Intercepted(store, fail), CheckpointSchedule(10, None, 99))
    run.train(10)
    assert run.checkpoints.finish()
    refusing.set()
    assert run.checkpoints.save_now(13, HERE, NumericalHealth()) is None
    assert run.checkpoints.last_step == steps_in(store) == 10
    assert "checkpoint of step 13" in str(run.said)
    assert "step 10" in str(run.said)
    assert run.said == snapshot


@pytest.mark.parametrize("repeated", [True, False])
def test_a_last_checkpoint_that_cannot_be_written_a_second_time_does_not_count(
    repeated: bool, snapshot: SnapshotAssertion
) -> None:
    store, refusing = MemoryStore(), threading.Event()

    def fail(operation: str) -> None:
        if operation == "put_if_absent" and refusing.is_set():
            raise StorageError("memory: no connection")

    run = Run(Intercepted(store, fail), CheckpointSchedule(10, None, 99))
    run.train(10)
    run.checkpoints.closes = True
    run.train(20)
    assert run.checkpoints.finish()
    refusing.set()
    run.train(20)
    assert not run.checkpoints.finish()
    assert run.checkpoints.last_step == steps_in(store) == 10
    assert "checkpoint of step 20" in str(run.said)
    assert "step 10" in str(run.said)
    assert run.said == snapshot
    if repeated:
        refusing.clear()
    assert run.checkpoints.save_now(20, HERE, NumericalHealth()) == (20 if repeated else None)
    assert run.checkpoints.last_step == steps_in(store) == (20 if repeated else 10)


def test_a_run_that_continues_counts_the_checkpoint_it_came_from() -> None:
    target = CheckpointTarget(MemoryStore(), author(), 1)
    checkpoints = Checkpointer(
        target, CheckpointSchedule(10, None, 99), lambda step, *_: snapshot(step), print, resumed=40
    )
    assert checkpoints.finish()
    assert checkpoints.last_step == 40
    assert checkpoints.save_now(40, HERE, NumericalHealth()) == 40


def test_minutes_count_from_the_last_snapshot() -> None:
    seconds = [0.0]
    run = Run(MemoryStore(), CheckpointSchedule(None, 60, 99), now=lambda: seconds[0])
    for seconds[0], step in ((59.0, 1), (61.0, 2), (120.0, 3), (121.0, 4)):
        run.train(step)
    assert run.checkpoints.finish()
    assert run.taken == [2, 4]


def test_the_cost_adds_up() -> None:
    store = MemoryStore()
    run = Run(store, CheckpointSchedule(10, None, 99))
    run.train(10, 20)
    assert run.checkpoints.finish()
    assert run.checkpoints.cost.commits == 2
    assert run.checkpoints.cost.size == sum(map(len, store.objects.values()))


def test_a_replica_that_does_not_write_knows_when_the_writer_does() -> None:
    silent = Checkpoints(CheckpointSchedule(10, 60, 99))
    assert [step for step in range(100) if silent.due(step)] == [*range(0, 100, 10), 99]
    assert not Checkpoints().due(99)
    assert not silent.overdue()
    silent.save(10, HERE, NumericalHealth())
    assert (silent.save_now(10, HERE, NumericalHealth()), silent.finish(), silent.last_step, silent.cost) == (
        None,
        True,
        None,
        CheckpointCost(),
    )


@pytest.mark.parametrize("forbidden", ["list", "put", "delete"])
def test_a_place_that_refuses_is_found_before_the_first_step(forbidden: str) -> None:
    def forbid(operation: str) -> None:
        if operation == forbidden:
            raise StorageError("permission denied")

    with pytest.raises(StorageError, match="permission denied"):
        prepare(CheckpointTarget(Intercepted(MemoryStore(), forbid), author(), 1))


@given(dues=st.sets(st.integers(1, 30)), stop=st.integers(1, 31), keep=st.integers(1, 3))
def test_wherever_a_run_is_stopped_the_newest_checkpoint_has_that_step(dues: set[int], stop: int, keep: int) -> None:
    store = MemoryStore()
    run = Run(store, CheckpointSchedule(max(dues, default=99), None, 99), keep)
    run.train(*range(1, stop + 1))
    assert run.checkpoints.save_now(stop, HERE, NumericalHealth()) == steps_in(store) == stop
    assert len({name.partition("/")[0] for name in store.objects}) <= keep
