"""Whatever storage does, a job never loses its newest intact checkpoint, never begins at step 0 in silence, never
continues from a mixture, and continues with the bits that were saved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.trainer.checkpoint.faults import Fault, Faulty, Full, Kill, Lag, Meanwhile, Refuse
from tests.trainer.checkpoint.lives import COMMIT, DAMAGE, HARMLESS, Job, Kept, committed, content, intact
from tests.trainer.checkpoint.runs import BATCH, author
from tests.trainer.checkpoint.stores import Killed, MemoryStore
from tpu_contract.run_spec import BestSpec, InitSpec, Mode
from tpu_trainer.checkpoint.initial import load_initial_weights
from tpu_trainer.checkpoint.origin import CheckpointSource
from tpu_trainer.contract.errors import StorageError, TrainerError
from tpu_trainer.storage.store import DirectoryStore, ObjectStore

NEWEST = "step-00000020-5f0c1234-1"


def trained(store: ObjectStore, keep: int = 1, parts: bool = False) -> Job:
    """A job whose first attempt has ended after checkpoints of steps 10 and 20."""
    job = Job(store, keep, parts=parts)
    assert job.save(10)
    assert job.save(20)
    return job


def ended_with(failure: Exception | None) -> str:
    assert isinstance(failure, TrainerError), failure
    return failure.code.name


@pytest.mark.parametrize("parts", [False, True], ids=["whole", "in parts"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_job_whose_only_checkpoint_is_damaged_ends_with_an_error_and_keeps_its_files(
    damage: str, parts: bool, store: ObjectStore
) -> None:
    job = trained(store, parts=parts)
    DAMAGE[damage](store, NEWEST)
    before = committed(store)
    began = job.begin(2)
    assert ended_with(began.failure) == "CheckpointUnusable"
    assert NEWEST in str(began.failure)
    assert committed(store) == before


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_job_that_falls_back_to_an_older_checkpoint_says_so_and_keeps_the_files_of_the_newest(
    damage: str, store: ObjectStore
) -> None:
    job = trained(store, keep=3)
    DAMAGE[damage](store, NEWEST)
    before = committed(store)
    began = job.begin(2)
    assert began.found.folder.step == 10
    job.check_found(began.found)
    (warning,) = began.warnings
    assert f"checkpoint {NEWEST} is passed over" in warning
    assert committed(store) == before


@pytest.mark.parametrize("change", HARMLESS)
def test_what_a_later_version_adds_to_a_commit_is_no_damage(change: str, store: ObjectStore) -> None:
    job = trained(store)
    HARMLESS[change](store, NEWEST)
    began = job.begin(2)
    assert began.found is not None
    job.check_found(began.found)
    assert not began.warnings


LISTED = {
    "without a file": (lambda name: name == f"{NEWEST}/model.safetensors", None),
    "with a file's old size": (lambda name: name == f"{NEWEST}/state.json", 0),
    "without its COMMIT": (lambda name: name == f"{NEWEST}/{COMMIT}", None),
}


@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("listed", LISTED)
@pytest.mark.parametrize("listings", [2, 1000], ids=["for a moment", "for ever"])
def test_the_newest_checkpoint_is_taken_although_it_is_listed(
    listed: str, listings: int, keep: int, store: ObjectStore
) -> None:
    job = trained(store, keep)
    names, size = LISTED[listed]
    began = job.begin(2, Lag(names, listings, size))
    assert began.found is not None, began
    assert str(began.found.folder) == NEWEST
    job.check_found(began.found)
    assert not began.warnings


def test_a_later_attempt_looks_again_before_it_begins_at_step_0() -> None:
    job = trained(MemoryStore())
    began = job.begin(2, Lag(lambda name: True, 1))
    assert began.found is not None


def test_a_file_that_comes_back_within_the_time_is_waited_for() -> None:
    job = trained(MemoryStore(), keep=3)
    name = f"{NEWEST}/model.safetensors"
    lost, looks = job.store.read(name), count(1)
    job.store.delete(name)

    class ComesBack(Fault):
        def call(self, operation: str, arguments: tuple[object, ...], do: Callable[[], object]) -> object:
            if operation == "list" and next(looks) == 3:
                job.store.put(name, lost)
            return do()

    began = job.begin(2, ComesBack())
    assert str(began.found.folder) == NEWEST


class ToOld(Fault):
    """A version of the trainer that does not know that somebody reads."""

    def call(self, operation: str, arguments: tuple[object, ...], do: Callable[[], dict[str, int]]) -> object:
        answer = do()
        if operation == "list":
            return {name: size for name, size in answer.items() if not name.startswith("step-reading")}
        return answer


@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize(("saves", "knows"), [(1000, True), (5, False)], ids=["of this version", "of an earlier one"])
def test_a_predecessor_that_still_writes_does_not_send_its_successor_to_step_0(
    saves: int, knows: bool, keep: int, store: ObjectStore
) -> None:
    job = trained(store, keep)
    old, steps = Job(store, keep), count(30, 10)
    faults = [] if knows else [ToOld()]
    began = job.begin(2, Meanwhile(lambda: old.save(next(steps), *faults) and None, min(saves, 40)))
    assert began.found is not None, began
    assert began.found.folder.step >= 20
    job.check_found(began.found)
    # Once the choice is made, the predecessor deletes again what is too much of its own.
    assert not [name for name in store.list("step-") if name.startswith("step-reading")]


def test_a_predecessor_that_writes_faster_than_its_successor_reads_is_the_storages_failure() -> None:
    job = trained(MemoryStore())
    old, steps = Job(job.store), count(30, 10)
    began = job.begin(2, Meanwhile(lambda: old.save(next(steps), ToOld()) and None, 1000))
    assert ended_with(began.failure) == "StorageFailed"
    assert "faster than they can be read" in str(began.failure)


@given(
    keep=st.integers(1, 3),
    saves=st.integers(0, 5),
    knows=st.booleans(),
    file=st.sampled_from(["model", "state.json", COMMIT]),
    listings=st.integers(0, 4),
    size=st.sampled_from([None, 0]),
)
def test_nor_does_it_on_storage_that_lags(
    keep: int, saves: int, knows: bool, file: str, listings: int, size: int | None
) -> None:
    job = trained(MemoryStore(), keep)
    old, steps = Job(job.store, keep), count(30, 10)
    faults = [] if knows else [ToOld()]
    meanwhile = Meanwhile(lambda: old.save(next(steps), *faults) and None, saves)
    began = job.begin(2, Lag(lambda name: f"/{file}" in name, listings, size), meanwhile)
    assert began.found is not None, began
    assert began.found.folder.step >= 20
    job.check_found(began.found)


def elsewhere(job: Job, *faults: Fault) -> CheckpointSource:
    """What checkpoint.resumeFrom of another job names."""
    return CheckpointSource("memory", Faulty(job.store, *faults), None)


def test_a_job_that_continues_another_ones_older_checkpoint_says_so() -> None:
    there = trained(MemoryStore(), keep=3)
    DAMAGE["a short file of weights"](there.store, NEWEST)
    began = Job(MemoryStore(), by=author(uid="another")).begin(1, elsewhere=elsewhere(there))
    assert began.found.folder.step == 10
    (warning,) = began.warnings
    assert warning.startswith("checkpoint.resumeFrom:")


def test_what_a_job_continues_elsewhere_may_be_listed_late_and_change_while_it_is_read() -> None:
    there = trained(MemoryStore())
    steps = count(30, 10)
    lag = Lag(lambda name: "/model" in name, 2)
    meanwhile = Meanwhile(lambda: there.save(next(steps)) and None, 3)
    began = Job(MemoryStore(), by=author(uid="another")).begin(1, elsewhere=elsewhere(there, lag, meanwhile))
    assert began.found.folder.step >= 20
    there.check_found(began.found)


def test_a_job_with_damaged_checkpoints_of_its_own_does_not_begin_elsewhere_again() -> None:
    there, job = trained(MemoryStore()), trained(MemoryStore())
    DAMAGE["a newer format"](job.store, NEWEST)
    began = job.begin(2, elsewhere=elsewhere(there))
    assert ended_with(began.failure) == "CheckpointUnusable"


def test_a_job_that_is_created_again_begins_at_step_0_beside_what_is_damaged_and_says_so() -> None:
    named = replace(author(), name="default/digits")
    job = Job(MemoryStore(), by=named)
    job.save(20)
    DAMAGE["a missing file of weights"](job.store, NEWEST)
    before = committed(job.store)
    began = Job(job.store, by=replace(named, uid="created-again")).begin(1)
    assert (began.found, began.failure) == (None, None)
    assert [f"checkpoint {NEWEST} " in text for text in began.warnings] == [True]
    assert committed(job.store) == before


def test_weights_to_begin_with_of_an_older_checkpoint_are_told(tmp_path: Path) -> None:
    there = trained(DirectoryStore(tmp_path), keep=3)
    DAMAGE["a short file of weights"](there.store, NEWEST)
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(3, 2))
    source, told = load_initial_weights(InitSpec(str(tmp_path)), model)
    assert source.startswith("1 tensors of checkpoint")
    assert told is not None
    assert f"checkpoint {NEWEST} is passed over: " in told
    assert torch.equal(model.w, torch.full((3, 2), content(1, 10)))


def test_the_mark_of_one_that_was_killed_while_it_chose_is_removed_by_the_next() -> None:
    job = trained(MemoryStore())
    for attempt in (2, 4):
        job.store.put(f"step-reading-5f0c1234-{attempt}", b"")
    job.begin(3)
    assert not [name for name in job.store.list("step-") if name.startswith("step-reading")]


def test_a_disk_that_was_full_at_the_commit_can_be_written_again(store: ObjectStore) -> None:
    job = Job(store)
    assert job.save(10)
    used = sum(store.list("").values())
    assert not job.save(20, Full(store, 2 * used - 100))
    began = job.begin(2, Full(store, 2 * used))
    assert began.failure is None
    assert job.save(20, Full(store, 2 * used + 100))


def test_what_a_writer_left_that_was_killed_at_the_commit_makes_room_on_a_full_disk(store: ObjectStore) -> None:
    job = Job(store)
    with contextlib.suppress(Killed):
        # One deletion and three files come before the COMMIT.
        job.save(10, Kill(4))
    used = sum(store.list("").values())
    assert used
    began = job.begin(2, Full(store, used))
    assert began.failure is None
    assert any("never" in warning or "that was ever complete" in warning for warning in began.warnings)
    assert store.list("") == {}


def test_a_commit_whose_answer_was_lost_is_undone_as_a_whole(store: ObjectStore) -> None:
    job = trained(store)
    assert not job.save(30, Refuse(["put_if_absent"], done=True))
    assert list(committed(store)) == [NEWEST]


@pytest.mark.parametrize("listed", LISTED)
def test_retention_does_not_believe_a_listing(listed: str) -> None:
    job = Job(MemoryStore(), keep=2, best=BestSpec("error", Mode.MIN))
    job.save(10, value=0.1)
    job.save(20, value=0.05)
    names, size = LISTED[listed]
    for step in (30, 40, 50):
        job.save(step, Lag(names, 1000, size), value=0.2)
    assert [kept.name[:13] for kept in intact(job.store, job.by)] == ["step-00000050", "step-00000040", "step-00000020"]


def test_a_damaged_checkpoint_goes_once_there_are_enough_newer_ones(store: ObjectStore) -> None:
    job = trained(store, keep=2)
    DAMAGE["a short file of weights"](store, NEWEST)
    assert job.begin(2).found is not None
    seen = []
    for step in (15, 20, 25):
        assert job.save(step)
        seen.append(NEWEST in committed(store))
    assert seen == [True, True, False]


ATTEMPTS = 4
faults_at_the_start = st.one_of(
    st.builds(list),
    st.tuples(
        st.sampled_from(["model", "optimizer", "state.json", COMMIT]),
        st.integers(1, 20),
        st.sampled_from([None, 0, 5]),
    ).map(lambda one: [Lag(lambda name: f"/{one[0]}" in name, one[1], one[2])]),
    st.builds(
        lambda kind, times, first: [Refuse([kind], times, first)],
        st.sampled_from(["list", "read", "put", "delete"]),
        st.integers(1, 3),
        st.integers(0, 6),
    ),
    st.integers(0, 20).map(lambda operations: [Kill(operations)]),
)
faults_of_a_save = st.one_of(
    st.builds(list),
    st.builds(list),
    st.integers(0, 24).map(lambda operations: [Kill(operations)]),
    st.builds(
        lambda kind, first, done: [Refuse([kind], 1, first, done)],
        st.sampled_from(["list", "read", "put", "put_if_absent", "delete"]),
        st.integers(0, 4),
        st.booleans(),
    ),
    st.integers(1, 20).map(lambda listings: [Lag(lambda name: "/model" in name, listings)]),
)
lives = st.lists(
    st.tuples(
        faults_at_the_start,
        st.lists(st.tuples(faults_of_a_save, st.none() | st.integers(0, 3)), max_size=4),
        st.none() | st.sampled_from([*DAMAGE, *HARMLESS]),
    ),
    min_size=2,
    max_size=ATTEMPTS,
)


Life = list[tuple[list[Fault], list[tuple[list[Fault], int | None]], str | None]]
"""For each attempt: faults while it begins, its saves with their faults and evaluations, and a damage at its end."""


def live(store: ObjectStore, life: Life, job: Job) -> None:
    """The law, checked at every beginning and after every checkpoint."""
    for attempt, (at_the_start, saves, damage) in enumerate(life, 1):
        job.by = replace(job.by, attempt=attempt)
        vouched, whole = committed(store), intact(store, job.by)
        try:
            began = job.begin(attempt, *at_the_start)
        except Killed:
            assert committed(store) == vouched
            continue
        assert committed(store) == vouched, "nothing that has a COMMIT goes before there is a newer checkpoint"
        if isinstance(began.failure, StorageError):
            assert any(isinstance(fault, Refuse) for fault in at_the_start), began.failure
            continue
        if whole:
            assert began.failure is None
            assert began.found is not None, "a checkpoint that could be continued"
            assert str(began.found.folder) == whole[0].name, "the newest intact one"
            job.check_found(began.found)
            newest = max(int(name.split("-")[1]) for name in vouched)
            assert began.warnings or began.found.folder.step >= newest, "falling back in silence"
        elif vouched:
            assert ended_with(began.failure) == "CheckpointUnusable"
            return
        else:
            assert began.failure is None
            assert began.found is None
        step = began.found.folder.step if began.found else 0
        for at_the_save, value in saves:
            step += 1
            held = intact(store, job.by)
            try:
                done = job.save(step, *at_the_save, value=value)
            except Killed:
                break
            finally:
                check_kept(job, held)
            newest = max((kept.examples for kept in intact(store, job.by)), default=0)
            assert newest >= step * BATCH or not done, "what was just written"
        if damage is not None and (whole := intact(store, job.by)):
            ({**DAMAGE, **HARMLESS})[damage](store, whole[0].name)


def check_kept(job: Job, before: list[Kept]) -> None:
    """Of what was intact before a save, the newest `keep` and the best are still there. Retention sees sizes only."""
    now = intact(job.store, job.by, by_size=True)
    for kept in (one for one in before if one.name not in {here.name for here in now}):
        newer = [one for one in now if (one.examples, one.attempt) > (kept.examples, kept.attempt)]
        assert len(newer) >= job.keep, "the newest are kept"
        if job.best is not None and kept.value is not None:
            assert any(one.value is not None and one.value <= kept.value for one in now), "the best is kept"


Options = tuple[int, BestSpec | None, bool]
"""keep, keepBest, and whether two hosts write."""

jobs = st.tuples(st.integers(1, 3), st.none() | st.just(BestSpec("error", Mode.MIN)), st.booleans())


@given(life=lives, job=jobs)
@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
def test_no_life_loses_a_checkpoint_or_begins_again_in_silence(life: Life, job: Options) -> None:
    store = MemoryStore()
    live(store, life, Job(store, *job, by=author()))


@given(life=lives, job=jobs)
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_nor_in_directories_and_buckets(life: Life, job: Options, new_store: Callable[[], ObjectStore]) -> None:
    store = new_store()
    live(store, life, Job(store, *job, by=author()))
