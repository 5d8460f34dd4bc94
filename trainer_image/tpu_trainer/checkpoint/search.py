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
    Passed,
    SkippedError,
    check_listed,
    progress,
    survey,
)
from tpu_trainer.checkpoint.commit import Commit, Folder
from tpu_trainer.checkpoint.store import Store
from tpu_trainer.errors import StorageError

PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds between two looks; together as long as NFS and gcsfuse usually keep what they know of a directory."""

T = TypeVar("T")


@dataclass(frozen=True)
class Wanted:
    """What to look for. commit: whether a checkpoint is looked at at all; the others are `Search.others`. unfit: why
    one cannot be taken, None if it can. folder: only this one."""

    commit: Callable[[Commit], bool] = lambda commit: True
    unfit: Callable[[Commit], str | None] = lambda commit: None
    folder: Folder | None = None


@dataclass(frozen=True)
class Search(Generic[T]):
    """taken: the newest that was read, and `read` what it gave. passed: those that are ahead of it, newest first, and
    then those whose COMMIT cannot be read. unfinished: those that have none."""

    taken: Candidate | None = None
    read: T | None = None
    passed: Sequence[Passed] = ()
    unfinished: Sequence[Passed] = ()
    others: Sequence[Candidate] = ()

    @property
    def empty(self) -> bool:
        return self.taken is None and not (self.passed or self.unfinished or self.others)

    @property
    def lines(self) -> list[str]:
        """For the log: what was passed over, and why."""
        return [str(one) for one in (*self.passed, *self.unfinished)]


def search(store: Store, wanted: Wanted, read: Callable[[Folder, Commit], T], *, expected: bool = False) -> Search[T]:
    """`read` returns what is needed of a checkpoint, or raises SkippedError. `expected`: that nothing is there may be
    the listing's fault.

    Raises:
        StorageError: the storage refuses, or checkpoints are deleted faster than they are read.
    """
    for pause in PAUSES:
        try:
            found = _look(store, wanted, read)
        except (IncompleteError, GoneError):
            time.sleep(pause)
            continue
        if not (expected and found.empty):
            return found
        expected = False
        time.sleep(pause)
    try:
        return _look(store, wanted, read, last=True)
    except GoneError as why:
        raise StorageError(
            f"{store.uri}: checkpoints are deleted faster than they can be read ({why}): another process, perhaps an "
            "earlier attempt that was cut off, still writes there"
        ) from why


def _look(store: Store, wanted: Wanted, read: Callable[[Folder, Commit], T], *, last: bool = False) -> Search[T]:
    """Raises:
    IncompleteError: a file of the newest is not there; if this is the `last` look, the next one is taken instead.
    GoneError: it was deleted.
    """
    here = survey(store, lambda folder: wanted.folder in (None, folder))
    others = [one for one in here.candidates if not wanted.commit(one[0])]
    passed: list[Passed] = []
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
        except GoneError:
            raise
        except SkippedError as why:
            if isinstance(why, IncompleteError) and not last:
                raise
            passed.append(Passed(entry, str(why), commit))
    # Their examples are not known.
    furthest = -1 if taken is None else taken[1].folder.step
    passed += [one for one in here.unreadable if one.entry.folder.step > furthest]
    if any(one.gone and one.entry.folder.step > furthest for one in here.unfinished):
        raise GoneError("its COMMIT disappeared after it was listed")
    return Search(taken, value, passed, here.unfinished, others)
