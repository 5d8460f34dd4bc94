"""Writes a snapshot as a checkpoint that either is whole or counts as absent, and makes room for it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from tpu_trainer.checkpoint import retention
from tpu_trainer.checkpoint.commit import COMMIT, Author, Commit, Folder, Mark
from tpu_trainer.checkpoint.files import files_of
from tpu_trainer.checkpoint.snapshot import Snapshot
from tpu_trainer.checkpoint.store import Store
from tpu_trainer.errors import StorageError


@dataclass(frozen=True)
class Target:
    """Where this run's checkpoints go: `keep` is how many committed ones stay."""

    store: Store
    author: Author
    keep: int


def prepare(target: Target) -> None:
    """Finds out at the start, not hours later, whether checkpoints can be written; deletes what dead writers left.

    Raises:
        StorageError: the storage refuses to be listed, written to or deleted from.
    """
    probe = f"step-probe-{target.author.job}-{target.author.attempt}"
    target.store.put(probe, b"")
    target.store.delete(probe)
    retention.delete_debris(target.store, target.author)


def write(target: Target, snapshot: Snapshot) -> int:
    """Returns the bytes written once the checkpoint is committed.

    Raises:
        StorageError: it is not committed, and the files that are there already count for nothing.
    """
    store, author = target.store, target.author
    folder = Folder(snapshot.step, author.job, author.attempt)
    # A restarted process of the same attempt may come by the same step again: while the files are being replaced,
    # the COMMIT of the first time would vouch for a mixture.
    store.delete(f"{folder}/{COMMIT}")
    marks: dict[str, Mark] = {}
    try:
        for file, data in files_of(snapshot):
            store.put(f"{folder}/{file}", data)
            marks[file] = Mark.of(data)
    except StorageError:
        _take_back(store, [f"{folder}/{file}" for file in marks])
        raise
    clean = bool(snapshot.document.get("clean", True))
    commit = Commit(snapshot.step, snapshot.examples, author, marks, clean).to_json()
    # A request that was sent again after a lost answer finds its own COMMIT there.
    if not store.put_if_absent(f"{folder}/{COMMIT}", commit) and store.read(f"{folder}/{COMMIT}") != commit:
        raise StorageError(f"{store.uri}: another process writes checkpoint {folder} as this job's attempt, too")
    return sum(mark.size for mark in marks.values()) + len(commit)


def make_room(target: Target, step: int) -> None:
    """Deletes the oldest checkpoints after the one of `step` was committed.

    Raises:
        StorageError: not everything could be deleted.
    """
    written = Folder(step, target.author.job, target.author.attempt)
    retention.keep_newest(target.store, target.author, target.keep, written)


def _take_back(store: Store, names: list[str]) -> None:
    """Deletes what a failed write has left: on a full disk it would be in the way of the next one."""
    with contextlib.suppress(StorageError):
        for name in names:
            store.delete(name)
