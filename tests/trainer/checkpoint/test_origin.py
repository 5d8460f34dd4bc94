"""Whose checkpoints a job continues: its own, those it is told to, and never another job's by accident."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.trainer.checkpoint.runs import author, commit
from tests.trainer.checkpoint.stores import MemoryStore
from tpu_trainer.checkpoint.commit import COMMIT, Author, Folder
from tpu_trainer.checkpoint.origin import CheckpointSource, choose_named, choose_own
from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.storage.store import DirectoryStore

RECIPE = {"optimizer.learningRate": "0.1", "trainSteps": "20"}
ME = replace(author(), name="default/digits", recipe=RECIPE)
CREATED_AGAIN = replace(ME, uid="0e11-earlier")
OTHER_RATE = replace(CREATED_AGAIN, recipe=RECIPE | {"optimizer.learningRate": "0.5"})
OTHER_JOB = replace(ME, uid="9a72-other", name="default/sweep-2")
OF_0_1_0 = author(uid="77aa-old")
OTHER_MODEL = replace(CREATED_AGAIN, fingerprint="g")


def chosen(
    store: MemoryStore | DirectoryStore, elsewhere: CheckpointSource | None = None
) -> tuple[Folder | None, list[str]]:
    """What ME continues from its own folder, and what it warns of."""
    warnings: list[str] = []
    found = choose_own(store, ME, elsewhere, lambda _: None, warnings.append)
    return (found.folder if found else None), warnings


@pytest.mark.parametrize(
    ("writer", "continues"),
    [(ME, True), (CREATED_AGAIN, True), (OTHER_JOB, False), (OF_0_1_0, False), (OTHER_MODEL, False)],
    ids=["own", "created again with the same recipe", "another job", "version 0.1.0", "another model"],
)
def test_a_job_continues_its_own_checkpoint_and_warns_of_others(writer: Author, continues: bool) -> None:
    store = MemoryStore()
    commit(store, 10, writer)
    folder, warnings = chosen(store)
    assert (folder is not None, not warnings) == (continues, continues)


def test_its_own_comes_before_others_that_have_trained_further() -> None:
    store = MemoryStore()
    commit(store, 10, ME)
    commit(store, 20, OTHER_JOB)
    commit(store, 30, OTHER_RATE)
    assert chosen(store) == (Folder(10, ME.job, 1), [])


def test_a_job_created_again_with_another_recipe_must_say_where_to_begin() -> None:
    store = MemoryStore()
    commit(store, 10, OTHER_RATE)
    with pytest.raises(UserCodeError) as raised:
        chosen(store)
    assert "(optimizer.learningRate 0.5" in str(raised.value)
    assert "0.1" in str(raised.value)
    assert "it, set checkpoint.resumeFrom" in str(raised.value)
    assert "step 0" in str(raised.value)


def test_a_job_told_where_to_begin_is_not_stopped_by_what_its_folder_holds(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    commit(store, 10, OTHER_RATE)
    itself = CheckpointSource.at(f"{tmp_path}/")
    assert chosen(store, itself) == (None, [])
    assert choose_named(itself, ME, lambda _: None, lambda _: None).commit.author == OTHER_RATE


@pytest.mark.parametrize(
    ("name", "step"), [("", 20), ("/step-00000010-9a72othe-1", 10), ("/step-00000010-9a72othe-1/", 10)]
)
def test_a_named_folder_gives_its_newest_and_a_named_checkpoint_itself(tmp_path: Path, name: str, step: int) -> None:
    for at in (10, 20):
        commit(DirectoryStore(tmp_path / "sweeps"), at, OTHER_JOB)
    found = choose_named(CheckpointSource.at(f"{tmp_path}/sweeps{name}"), ME, lambda _: None, lambda _: None)
    assert found.commit.step == step


@pytest.mark.parametrize(
    "written",
    [
        [],
        [OTHER_MODEL],
        ["damaged"],
    ],
    ids=["empty", "another model", "no COMMIT"],
)
def test_a_place_to_begin_without_a_fitting_checkpoint_ends_the_job(
    tmp_path: Path, written: list[Author | str], snapshot: SnapshotAssertion
) -> None:
    store = DirectoryStore(tmp_path)
    for writer in written:
        commit(store, 10, OTHER_JOB if isinstance(writer, str) else writer)
        if isinstance(writer, str):
            store.delete(f"step-00000010-9a72othe-1/{COMMIT}")
    with pytest.raises(UserCodeError) as caught:
        choose_named(CheckpointSource.at(str(tmp_path)), ME, lambda _: None, lambda _: None)
    assert str(caught.value) == snapshot


def test_checkpoints_where_version_0_1_0_kept_them_cause_a_warning(tmp_path: Path) -> None:
    commit(DirectoryStore(tmp_path), 10, OF_0_1_0)
    folder, (warning,) = chosen(DirectoryStore(tmp_path / ME.name))
    assert folder is None
    assert warning.startswith("begins at step 0: ")
    assert str(tmp_path) in warning
