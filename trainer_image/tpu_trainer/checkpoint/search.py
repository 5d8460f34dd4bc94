"""Finds the newest checkpoint that can be read, where others may be writing and a listing may lag behind.

What a file system on the network or a mounted bucket shows may be a minute old. So a checkpoint that has a COMMIT, and
lacks a file, is looked at again for that long before an older one is taken; and whenever one disappears while it is
read, all of them are listed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tpu_trainer.checkpoint.catalogue import (
    Candidate,
    GoneError,
    IncompleteError,
    RejectedCheckpoint,
    Say,
    SkippedError,
    check_listed,
    progress,
    survey,
)
from tpu_trainer.checkpoint.commit import Commit, Folder
from tpu_trainer.contract.errors import StorageError
from tpu_trainer.storage.store import ObjectStore

PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds between two looks; together as long as NFS and gcsfuse usually keep what they know of a directory."""

T = TypeVar("T")


@dataclass(frozen=True)
class SearchCriteria:
    """What to look for. commit: whether a checkpoint is looked at at all; the others are `Search.others`. unfit: why
    one cannot be taken, None if it can. folder: only this one."""

    commit: Callable[[Commit], bool] = lambda commit: True
    unfit: Callable[[Commit], str | None] = lambda commit: None
    folder: Folder | None = None


@dataclass(frozen=True)
class SearchResult(Generic[T]):
    """taken: the newest that was read, and `read` what it gave. passed: those that are ahead of it, newest first, and
    then those whose COMMIT cannot be read. unfinished: those that have none."""

    taken: Candidate | None = None
    read: T | None = None
    passed: Sequence[RejectedCheckpoint] = ()
    unfinished: Sequence[RejectedCheckpoint] = ()
    others: Sequence[Candidate] = ()

    @property
    def folders(self) -> frozenset[Folder]:
        """Returns the folders of all that were not taken."""
        entries = [*(one.entry for one in (*self.passed, *self.unfinished)), *(entry for _, entry in self.others)]
        return frozenset(entry.folder for entry in entries)


def search(
    store: ObjectStore, wanted: SearchCriteria, read: Callable[[Folder, Commit], T], say: Say, *, expected: bool = False
) -> SearchResult[T]:
    """Returns the newest that can be read.

    `read` returns what is needed of a checkpoint, or raises SkippedError. `say`: takes, for the log, what was passed
    over. `expected`: that nothing is there may be the listing's fault.

    Raises:
        StorageError: the storage refuses, or checkpoints are deleted faster than they are read.
    """
    told, before = None, None
    for pause in PAUSES:
        try:
            found = _look(store, wanted, read)
        except (IncompleteError, GoneError) as why:
            if str(why) != told:
                say(f"looks at the checkpoints in {store.uri} again, for up to {sum(PAUSES):.0f} s: {why}")
            told = str(why)
        else:
            # Without any, it may be that one was deleted for another that was not listed yet: until two looks agree.
            if found.taken is not None or found.folders == before or not (expected or found.folders):
                return _told(found, say)
            before = found.folders
        time.sleep(pause)
    try:
        return _told(_look(store, wanted, read, last=True), say)
    except GoneError as why:
        raise StorageError(
            f"{store.uri}: checkpoints are deleted faster than they can be read ({why}): another process, perhaps an "
            "earlier attempt that was cut off, still writes there"
        ) from why


def _told(found: SearchResult[T], say: Say) -> SearchResult[T]:
    for one in (*found.passed, *found.unfinished):
        say(str(one))
    return found


def _look(
    store: ObjectStore, wanted: SearchCriteria, read: Callable[[Folder, Commit], T], *, last: bool = False
) -> SearchResult[T]:
    """Looks once.

    Raises:
        IncompleteError: a file of the newest is not there; at the `last` look the next one is taken instead.
        GoneError: it was deleted.
    """
    here = survey(store, lambda folder: wanted.folder in (None, folder))
    others = [one for one in here.candidates if not wanted.commit(one[0])]
    passed: list[RejectedCheckpoint] = []
    taken, value = None, None
    for candidate in sorted(here.candidates, key=progress, reverse=True):
        commit, entry = candidate
        if not wanted.commit(commit):
            continue
        try:
            if (unfit := wanted.unfit(commit)) is not None:
                raise SkippedError(unfit)
            check_listed(store, candidate)
            taken, value = candidate, read(entry.folder, commit)
            break
        except SkippedError as why:
            if isinstance(why, GoneError) or (isinstance(why, IncompleteError) and not last):
                raise type(why)(f"checkpoint {entry.folder}: {why}") from why
            passed.append(RejectedCheckpoint(entry, str(why), commit))
    # Their examples are not known.
    furthest = -1 if taken is None else taken[1].folder.step
    passed += [one for one in here.unreadable if one.entry.folder.step > furthest]
    for one in here.unfinished:
        if one.gone and one.entry.folder.step > furthest:
            raise GoneError(f"checkpoint {one.entry.folder}: its COMMIT disappeared after it was listed")
    return SearchResult(taken, value, passed, here.unfinished, others)
