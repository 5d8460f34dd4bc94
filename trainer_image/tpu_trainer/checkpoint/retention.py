"""Which checkpoints are deleted, and in what order: COMMIT first, so that what is half deleted is not taken for whole.

A run deletes only what its own job wrote, in this or an earlier attempt. Never another job's, and never a later
attempt's: a host that was cut off, and writes on beside its successor, must not destroy the successor's work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tpu_trainer.checkpoint.catalogue import Entry, PassedOverError, committed, entries
from tpu_trainer.checkpoint.commit import COMMIT, Author, Commit, Folder
from tpu_trainer.checkpoint.store import Store


def keep_newest(store: Store, author: Author, keep: int, written: Folder) -> None:
    """Deletes this job's committed checkpoints but `written` and the newest `keep`, and its debris."""
    whole, debris = _own(store, author)
    for entry in [*surplus(whole, author, keep, written), *debris]:
        _delete(store, entry)


def delete_debris(store: Store, author: Author) -> None:
    """Deletes what this job has left without a COMMIT that holds. Only while nothing is being written."""
    _, debris = _own(store, author)
    for entry in debris:
        _delete(store, entry)


def surplus(whole: Iterable[tuple[Commit, Entry]], author: Author, keep: int, written: Folder) -> Sequence[Entry]:
    """What is too much: all but the newest `keep`, and neither `written` nor the newest that is clean, which is where a
    run can begin again whose loss is not finite any more.

    `written` need not be among the newest: an earlier attempt that was cut off may have come further, and what it has
    reached stays. Those of another task, model or seed do not count, since this run could not use them.
    """
    usable = [(commit, entry) for commit, entry in whole if commit.author.fingerprint == author.fingerprint]
    newest_first = sorted(usable, key=lambda one: (one[0].examples, one[1].folder.attempt), reverse=True)
    clean = next((entry.folder for commit, entry in newest_first if commit.clean), None)
    return [entry for _, entry in newest_first[keep:] if entry.folder not in (written, clean)]


def _own(store: Store, author: Author) -> tuple[list[tuple[Commit, Entry]], list[Entry]]:
    whole, debris = [], []
    for entry in entries(store):
        if entry.folder.job != author.job or entry.folder.attempt > author.attempt:
            continue
        try:
            commit = committed(store, entry)
        except PassedOverError as why:
            if why.torn:
                debris.append(entry)
            continue
        if commit.author.uid == author.uid:
            whole.append((commit, entry))
    return whole, debris


def _delete(store: Store, entry: Entry) -> None:
    for file in sorted(entry.sizes, key=lambda file: file != COMMIT):
        store.delete(f"{entry.folder}/{file}")
