"""Finds the newest checkpoint that can be read, while others may be writing and the listing may lag behind.

A listing of a network file system or of a mounted bucket may be a minute old. So if a checkpoint has a COMMIT but lacks
a file, the search waits up to a minute for the file before it takes an older checkpoint. Whenever a checkpoint
disappears while it is read, the search lists all of them again.
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
"""Seconds between two looks; their sum is as long as NFS and gcsfuse usually cache a directory."""

T = TypeVar("T")


@dataclass(frozen=True)
class SearchCriteria:
    """What to look for. commit: whether a checkpoint is considered; the rest are `SearchResult.others`. unfit: returns
    why one cannot be taken, None if it can. folder: consider only this one."""

    commit: Callable[[Commit], bool] = lambda commit: True
    unfit: Callable[[Commit], str | None] = lambda commit: None
    folder: Folder | None = None


@dataclass(frozen=True)
class SearchResult(Generic[T]):
    """taken: what the search's `read` returned for the newest checkpoint that could be read. passed: checkpoints that
    are ahead of it, newest first, and then those whose COMMIT cannot be read. unfinished: checkpoints without COMMIT.
    others: those that the criteria left out."""

    taken: T | None = None
    passed: Sequence[RejectedCheckpoint] = ()
    unfinished: Sequence[RejectedCheckpoint] = ()
    others: Sequence[Candidate] = ()

    @property
    def folders(self) -> frozenset[Folder]:
        """Returns the folders of all checkpoints that were not taken."""
        rejected = (checkpoint.entry.folder for checkpoint in (*self.passed, *self.unfinished))
        return frozenset([*rejected, *(entry.folder for _, entry in self.others)])


def search(
    store: ObjectStore,
    criteria: SearchCriteria,
    read: Callable[[Folder, Commit], T],
    say: Say,
    *,
    expected: bool = False,
) -> SearchResult[T]:
    """Returns the newest checkpoint that can be read.

    `read`: returns what is needed of a checkpoint, or raises SkippedError. `say`: logs each checkpoint that is passed
    over. `expected`: there should be a checkpoint, so an empty listing may be out of date.

    Raises:
        StorageError: the storage refuses, or checkpoints are deleted faster than they are read.
    """
    reason, before = None, None
    for pause in PAUSES:
        try:
            result = _look(store, criteria, read)
        except (IncompleteError, GoneError) as why:
            if str(why) != reason:
                say(f"looks at the checkpoints in {store.uri} again, for up to {sum(PAUSES):.0f} s: {why}")
            reason = str(why)
        else:
            # One may have been deleted for another that is not listed yet: nothing is there only if two looks agree.
            if result.taken is not None or result.folders == before or not (expected or result.folders):
                return _log(result, say)
            before = result.folders
        time.sleep(pause)
    try:
        return _log(_look(store, criteria, read, last=True), say)
    except GoneError as why:
        raise StorageError(
            f"{store.uri}: checkpoints are deleted faster than they can be read ({why}): another process, perhaps an "
            "earlier attempt that was cut off, still writes there"
        ) from why


def _log(result: SearchResult[T], say: Say) -> SearchResult[T]:
    for checkpoint in (*result.passed, *result.unfinished):
        say(str(checkpoint))
    return result


def _look(
    store: ObjectStore, criteria: SearchCriteria, read: Callable[[Folder, Commit], T], *, last: bool = False
) -> SearchResult[T]:
    """Looks once.

    Raises:
        IncompleteError: a file of the newest is not there; at the `last` look the next one is taken instead.
        GoneError: a checkpoint was deleted meanwhile.
    """
    listed = survey(store, lambda folder: criteria.folder in (None, folder))
    others = [candidate for candidate in listed.candidates if not criteria.commit(candidate[0])]
    passed: list[RejectedCheckpoint] = []
    taken, furthest = None, -1
    for candidate in sorted(listed.candidates, key=progress, reverse=True):
        commit, entry = candidate
        if not criteria.commit(commit):
            continue
        try:
            if (unfit := criteria.unfit(commit)) is not None:
                raise SkippedError(unfit)
            check_listed(store, candidate)
            taken = read(entry.folder, commit)
            # By steps, because the examples of a checkpoint are not known without its COMMIT.
            furthest = entry.folder.step
            break
        except SkippedError as why:
            if isinstance(why, GoneError) or (isinstance(why, IncompleteError) and not last):
                raise type(why)(f"checkpoint {entry.folder}: {why}") from why
            passed.append(RejectedCheckpoint(entry, str(why), commit))
    passed += [rejected for rejected in listed.unreadable if rejected.entry.folder.step > furthest]
    for rejected in listed.unfinished:
        if rejected.gone and rejected.entry.folder.step > furthest:
            raise GoneError(f"checkpoint {rejected.entry.folder}: its COMMIT disappeared after it was listed")
    return SearchResult(taken, passed, listed.unfinished, others)
