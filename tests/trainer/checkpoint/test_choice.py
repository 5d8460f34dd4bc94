"""Which checkpoint a run continues from."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from tests.trainer.checkpoint.runs import assert_same, author, commit, latest, snapshot
from tests.trainer.checkpoint.stores import MemoryStore
from tpu_trainer.checkpoint.commit import Commit, Folder, Mark, OtherFormatError
from tpu_trainer.contract.errors import StorageError
from tpu_trainer.storage.store import ObjectStore


def quiet(_: str) -> None: ...


def test_an_empty_place_has_none(store: ObjectStore) -> None:
    assert latest(store, "f", quiet) is None


def test_the_newest_is_taken(store: ObjectStore) -> None:
    for step in (100, 20, 30):
        commit(store, step)
    found = latest(store, "f", quiet)
    assert found.folder == Folder(100, "5f0c1234", 1)
    assert found.commit.author == author()
    assert_same(found.snapshot, snapshot(100))


def test_the_later_attempt_wins_between_equal_checkpoints(store: ObjectStore) -> None:
    for attempt in (2, 10, 9):
        commit(store, 30, author(attempt=attempt), content=attempt)
    assert latest(store, "f", quiet).folder.attempt == 10


def test_newer_means_more_examples_because_on_a_larger_slice_there_are_fewer_steps(store: ObjectStore) -> None:
    commit(store, 500, author(attempt=1, batch=16), examples=8000)
    commit(store, 260, author(attempt=2, batch=32), examples=8320)
    assert latest(store, "f", quiet).folder == Folder(260, "5f0c1234", 2)


def test_checkpoints_of_another_fingerprint_are_passed_over_with_a_line(
    store: ObjectStore, snapshot: SnapshotAssertion
) -> None:
    commit(store, 10)
    commit(store, 20, author(fingerprint="g"))
    lines: list[str] = []
    assert latest(store, "f", lines.append).commit.step == 10
    assert lines == snapshot


def test_other_files_are_not_looked_at(store: ObjectStore) -> None:
    for name in ("step-x-5f0c-1/COMMIT", "step-00000010/COMMIT", "step-000000010-a-1/COMMIT", "step-00000010-a-01/x"):
        store.put(name, b"")
    lines: list[str] = []
    assert latest(store, "f", lines.append) is None
    assert lines == []


def test_storage_that_refuses_is_not_taken_for_a_torn_checkpoint() -> None:
    class Refusing(MemoryStore):
        def read(self, name: str) -> bytes:
            raise StorageError("memory: permission denied")

    store = Refusing()
    commit_elsewhere = MemoryStore()
    commit(commit_elsewhere, 10)
    store.objects = commit_elsewhere.objects
    with pytest.raises(StorageError, match="permission denied"):
        latest(store, "f", quiet)


marks = st.dictionaries(st.text(), st.builds(Mark, st.integers(0), st.integers(0, 2**32 - 1)))


@given(step=st.integers(0), examples=st.integers(0), uid=st.text(), files=marks)
def test_a_commit_reads_as_it_was_written(step: int, examples: int, uid: str, files: dict[str, Mark]) -> None:
    written = Commit(step, examples, author(uid=uid), files)
    assert Commit.parse(written.to_json()) == written


@given(data=st.binary() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(lambda x: repr(x).encode()))
@example(data=b'{"format": 1, "files": ' + b"[" * 100_000)
def test_anything_else_is_not_a_commit(data: bytes) -> None:
    with pytest.raises(ValueError, match="COMMIT is cut off, or not a COMMIT"):
        Commit.parse(data)


def test_a_commit_of_another_format_is_recognised(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(OtherFormatError) as caught:
        Commit.parse(b'{"format": 7}')
    assert "format 7" in str(caught.value)
    assert str(caught.value) == snapshot


@given(uid=st.text())
def test_any_uid_makes_a_folder_that_is_recognised(uid: str) -> None:
    folder = Folder(1, author(uid=uid).job, 1)
    assert Folder.parse(str(folder)) == folder
