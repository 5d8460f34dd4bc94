"""Which checkpoints are deleted: as a table and a property of the pure choice, and in real stores."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.checkpoint.runs import author, commit, snapshot
from tests.trainer.checkpoint.stores import MemoryStore, counting
from tpu_contract.run_spec import BestSpec, Mode
from tpu_trainer.checkpoint.best import best_in, best_of
from tpu_trainer.checkpoint.catalogue import CheckpointTarget, Entry, prepare, surplus, write
from tpu_trainer.checkpoint.commit import COMMIT, Author, Commit, Evaluation, Folder
from tpu_trainer.contract.outcome import Best
from tpu_trainer.storage.store import ObjectStore


def folders(store: ObjectStore) -> set[str]:
    return {name.partition("/")[0] for name in store.list("")}


def test_the_newest_are_kept_and_older_ones_deleted(store: ObjectStore) -> None:
    for step in (10, 20, 30, 40):
        commit(store, step, keep=2)
    assert folders(store) == {"step-00000030-5f0c1234-1", "step-00000040-5f0c1234-1"}


def test_checkpoints_of_earlier_attempts_count(store: ObjectStore) -> None:
    commit(store, 10, author(attempt=1))
    commit(store, 20, author(attempt=2))
    commit(store, 30, author(attempt=3), keep=2)
    assert folders(store) == {"step-00000020-5f0c1234-2", "step-00000030-5f0c1234-3"}


def test_other_jobs_later_attempts_other_models_and_strangers_files_stay(store: ObjectStore) -> None:
    commit(store, 10, author(uid="another"))
    commit(store, 10, author(attempt=3))
    commit(store, 10, author(fingerprint="other model"))
    commit(store, 20, author(attempt=2), keep=1)
    store.put("step-notes.txt", b"")
    store.put("step-00000015-another-1/model.safetensors", b"in flight")
    store.put("step-00000090-5f0c1234-4/model.safetensors", b"in flight")
    commit(store, 30, author(attempt=2), keep=1)
    assert folders(store) == {
        "step-00000010-another-1",
        "step-00000010-5f0c1234-3",
        "step-00000010-5f0c1234-1",
        "step-00000030-5f0c1234-2",
        "step-notes.txt",
        "step-00000015-another-1",
        "step-00000090-5f0c1234-4",
    }


def test_a_job_whose_uid_has_the_same_beginning_keeps_its_checkpoints(store: ObjectStore) -> None:
    commit(store, 10, author(uid="5f0c1234-other"))
    commit(store, 20, author(attempt=2), keep=1)
    assert folders(store) == {"step-00000010-5f0c1234-1", "step-00000020-5f0c1234-2"}


def test_a_commit_of_a_later_format_is_not_taken_for_debris(store: ObjectStore) -> None:
    store.put(f"step-00000010-5f0c1234-1/{COMMIT}", b'{"format": 7}')
    prepare(CheckpointTarget(store, author(attempt=2), 1))
    assert folders(store) == {"step-00000010-5f0c1234-1"}


def test_a_start_deletes_what_own_and_earlier_attempts_left_unfinished_and_leaves_no_trace(store: ObjectStore) -> None:
    for attempt in (1, 2, 3):
        store.put(f"step-00000010-5f0c1234-{attempt}/model.safetensors", b"cut off")
    prepare(CheckpointTarget(store, author(attempt=2), 1))
    assert folders(store) == {"step-00000010-5f0c1234-3"}


def test_a_commit_is_deleted_before_the_files_it_vouches_for() -> None:
    store, deleted = MemoryStore(), []

    class Noting(MemoryStore):
        def delete(self, name: str) -> None:
            deleted.append(name)
            super().delete(name)

    store = Noting()
    commit(store, 10)
    deleted.clear()
    commit(store, 20, keep=1)
    of_the_old = [name.partition("/")[2] for name in deleted if name.startswith("step-00000010")]
    assert of_the_old[0] == COMMIT
    assert sorted(of_the_old[1:]) == ["model.safetensors", "optimizer.safetensors", "state.json"]


def test_making_room_reads_no_more_than_the_commits() -> None:
    store = MemoryStore()
    for step in (10, 20, 30):
        commit(store, step)
    counted, done = counting(store)
    commit(counted, 40, keep=4)
    assert done.count("list") == 1
    assert done.count("read") == 4


def entry(examples: int, attempt: int, fingerprint: str, clean: bool) -> tuple[Commit, Entry]:
    by = author(attempt, fingerprint=fingerprint)
    return Commit(examples, examples, by, {}, clean), Entry(Folder(examples, by.job, attempt), {})


wholes = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 3), st.sampled_from("fg"), st.booleans()),
    min_size=1,
    unique_by=lambda key: key[:2],
)


@given(keys=wholes, keep=st.integers(1, 4), data=st.data())
def test_the_newest_usable_ones_the_newest_clean_one_the_best_and_the_one_just_written_are_kept(
    keys: list[tuple[int, int, str, bool]], keep: int, data: st.DataObject
) -> None:
    whole = [entry(*key) for key in keys]
    commit_written, written = data.draw(st.sampled_from(whole))
    own: Author = commit_written.author
    best = data.draw(st.none() | st.sampled_from([folder.folder for _, folder in whole]))
    gone = {deleted.folder for deleted in surplus(whole, own, keep, written.folder, best)}
    mine = {folder.folder: c for c, folder in whole if c.author.fingerprint == own.fingerprint}
    by_age = sorted(mine, key=lambda folder: (mine[folder].examples, folder.attempt))
    clean = [folder for folder in by_age if mine[folder].clean]
    assert mine.keys() - gone == {*by_age[-keep:], *clean[-1:], written.folder, *({best} & mine.keys())}
    assert gone <= mine.keys()


@given(values=st.lists(st.none() | st.floats() | st.integers(0, 3), max_size=8), mode=st.sampled_from(Mode))
def test_the_best_has_the_best_finite_value_and_of_equal_ones_is_the_first(
    values: list[float | None], mode: Mode
) -> None:
    evaluations = [
        {"error": value} if step % 3 else {"error": value, "other": 0.0} for step, value in enumerate(values)
    ]
    whole = [
        (Commit(step, step, author(), {}, evaluation=evaluation), Entry(Folder(step, "5f0c1234", 1), {}))
        for step, evaluation in enumerate(evaluations)
    ]
    unevaluated = (Commit(99, 99, author(), {}), Entry(Folder(99, "5f0c1234", 1), {}))
    found = best_of([unevaluated, *reversed(whole)], BestSpec("error", mode))
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        assert found is None
    else:
        best = max(finite) if mode is Mode.MAX else min(finite)
        assert found == Best(str(Folder(values.index(best), "5f0c1234", 1)), values.index(best), "error", best)


@pytest.mark.parametrize("evaluation", [None, {}, {"error": 0.5, "f1": None}])
def test_a_commit_keeps_its_evaluation(evaluation: Evaluation | None) -> None:
    commit = Commit(7, 70, author(), {}, evaluation=evaluation)
    assert Commit.parse(commit.to_json()) == commit


def test_a_checkpoint_of_another_model_or_job_is_not_the_best(store: ObjectStore) -> None:
    by = BestSpec("error", Mode.MIN)
    for step, writer, error in [(10, author(), 0.5), (20, author(fingerprint="g"), 0.1), (30, author(uid="x"), 0.2)]:
        write(CheckpointTarget(store, writer, 9, by), snapshot(step), {"error": error})
    assert best_in(CheckpointTarget(store, author(attempt=2), 9, by)) == Best(
        str(Folder(10, "5f0c1234", 1)), 10, "error", 0.5
    )
