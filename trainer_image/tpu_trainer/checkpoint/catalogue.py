"""The checkpoints in a store: which there are, which are whole, how one is written, and which are deleted.

Writing puts COMMIT last, and deleting removes it first, so that what is half written or half deleted is never taken for
whole. A run deletes only what its own job wrote, in this or an earlier attempt: a host that was cut off, and writes on
beside its successor, must not destroy the successor's work. A listing may lag behind, so none is a reason to delete:
what it lacks is read by its name, and what has a COMMIT stays until this attempt has a newer checkpoint.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tpu_trainer.checkpoint.commit import COMMIT, Author, Commit, Evaluation, Folder, Mark, OtherFormatError
from tpu_trainer.checkpoint.snapshot import Snapshot, snapshot_files
from tpu_trainer.contract.errors import StorageError
from tpu_trainer.contract.outcome import Best
from tpu_trainer.contract.spec import BestSpec
from tpu_trainer.storage.store import MissingError, ObjectStore

Say = Callable[[str], None]


@dataclass(frozen=True)
class Entry:
    """One checkpoint's folder as listed; `sizes`: its files in bytes, with COMMIT if there is one."""

    folder: Folder
    sizes: Mapping[str, int]


Candidate = tuple[Commit, Entry]

_TOMBSTONE = b""
"""In the place of a COMMIT, so that nobody can commit any more. Empty, because a full disk has room for that; a crash
between creating a COMMIT and filling it leaves the same."""

_NO_COMMITS = (_TOMBSTONE, b"being deleted")
"""The second is the tombstone of earlier versions."""

_READING = re.compile(r"step-reading-([0-9A-Za-z]{1,8})-([0-9]{1,6})")


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that was read whole. `reader`: the rank that read it, and has its tensors."""

    folder: Folder
    commit: Commit
    snapshot: Snapshot
    reader: int = 0


@dataclass(frozen=True)
class CheckpointTarget:
    """Where this run's checkpoints go; `keep` is how many committed ones stay, besides the best one if there is
    `best`."""

    store: ObjectStore
    author: Author
    keep: int
    best: BestSpec | None = None


class SkippedError(Exception):
    """The checkpoint cannot be taken; the text says why."""


class UnfinishedError(SkippedError):
    """It was never complete, or is being deleted."""


class IncompleteError(SkippedError):
    """A file is missing or has another size, as far as can be seen: a later look may find it."""


class GoneError(SkippedError):
    """It was deleted while it was read."""


@dataclass(frozen=True)
class RejectedCheckpoint:
    """A checkpoint that is not taken. commit: None if it cannot be read. worthless: no version of the trainer can read
    anything of it. gone: its COMMIT was there when it was listed."""

    entry: Entry
    why: str
    commit: Commit | None = None
    worthless: bool = False
    gone: bool = False

    def __str__(self) -> str:
        return f"checkpoint {self.entry.folder} is passed over: {self.why}"


@dataclass
class Survey:
    """What a store holds, by one listing and all COMMITs. candidates: those with a COMMIT, in no particular order,
    whether or not their files are there. readers: (job, attempt) of those that choose a checkpoint at this moment."""

    candidates: list[Candidate] = field(default_factory=list)
    unreadable: list[RejectedCheckpoint] = field(default_factory=list)
    unfinished: list[RejectedCheckpoint] = field(default_factory=list)
    readers: list[tuple[str, int]] = field(default_factory=list)


def survey(store: ObjectStore, concerns: Callable[[Folder], bool] = lambda folder: True) -> Survey:
    """Looks at the folders that `concerns` returns True for.

    Raises:
        StorageError: the storage refuses.
    """
    listing, found = store.list("step-"), Survey()
    found.readers = [(name[1], int(name[2])) for name in map(_READING.fullmatch, listing) if name]
    for entry in sorted(entries(listing), key=lambda entry: str(entry.folder), reverse=True):
        if not concerns(entry.folder):
            continue
        try:
            found.candidates.append((read_commit(store, entry.folder), entry))
        except UnfinishedError as why:
            gone = COMMIT in entry.sizes and isinstance(why.__cause__, MissingError)
            found.unfinished.append(RejectedCheckpoint(entry, str(why), gone=gone))
        except SkippedError as why:
            found.unreadable.append(
                RejectedCheckpoint(entry, str(why), worthless=not isinstance(why.__cause__, OtherFormatError))
            )
    return found


def entries(listing: Mapping[str, int]) -> list[Entry]:
    """All folders that are named like checkpoints, in no particular order."""
    sizes: dict[Folder, dict[str, int]] = {}
    for path, size in listing.items():
        name, _, file = path.partition("/")
        folder = Folder.parse(name)
        if folder is not None and str(folder) == name and file:
            sizes.setdefault(folder, {})[file] = size
    return [Entry(folder, files) for folder, files in sizes.items()]


def read_commit(store: ObjectStore, folder: Folder) -> Commit:
    """Returns the folder's COMMIT, whether or not a listing has it.

    Raises:
        SkippedError: it is not there (UnfinishedError), or cannot be read.
        StorageError: the storage refuses.
    """
    try:
        data = store.read(f"{folder}/{COMMIT}")
    except MissingError as error:
        raise UnfinishedError("it has no COMMIT: writing it was cut short, or has not finished") from error
    if data in _NO_COMMITS:
        raise UnfinishedError("its COMMIT is empty: writing it, or deleting it, was cut short")
    try:
        commit = Commit.parse(data)
    except ValueError as error:
        raise SkippedError(f"its {error}") from error
    if commit.step != folder.step:
        raise SkippedError(f"its COMMIT is of step {commit.step}")
    return commit


def check_listed(store: ObjectStore, candidate: Candidate) -> None:
    """Reads by name what the listing lacks, or shows with another size than COMMIT.

    Raises:
        SkippedError: it is not there, or not what was written.
        StorageError: the storage refuses.
    """
    commit, entry = candidate
    for file, mark in commit.files.items():
        if entry.sizes.get(file) != mark.size:
            read_checked(store, entry.folder, commit, file)


def read_checked(store: ObjectStore, folder: Folder, commit: Commit, file: str) -> bytes:
    """The content of one of the checkpoint's files.

    Raises:
        SkippedError: it is not what COMMIT says.
        StorageError: the storage refuses.
    """
    mark = commit.files[file]
    try:
        data = store.read(f"{folder}/{file}")
    except MissingError as error:
        try:
            read_commit(store, folder)
        except UnfinishedError:
            raise GoneError(f"its {file} disappeared while it was read") from error
        raise IncompleteError(f"its {file} is missing") from error
    if len(data) != mark.size:
        raise IncompleteError(f"its {file} has {len(data)} bytes, its COMMIT says {mark.size}")
    if Mark.of(data) != mark:
        raise SkippedError(f"its {file} is not what was written: the checksum differs")
    return data


def is_complete(store: ObjectStore, candidate: Candidate) -> bool:
    """Returns whether all its files are there, in their sizes. Raises StorageError: the storage refuses."""
    try:
        check_listed(store, candidate)
    except SkippedError:
        return False
    return True


def progress(candidate: Candidate) -> tuple[int, int, str]:
    """Returns how far it is, to compare: by examples and not by steps, because on a larger slice a step has more of
    them. Of equal ones the later attempt's is further."""
    commit, entry = candidate
    return commit.examples, entry.folder.attempt, str(entry.folder)


def _mark_of(job: str, attempt: int) -> str:
    return f"step-reading-{job}-{attempt}"


@contextmanager
def reading(target: CheckpointTarget) -> Iterator[None]:
    """Marks the time of the choice of a checkpoint: an earlier attempt that still writes deletes nothing meanwhile."""
    name = _mark_of(target.author.job, target.author.attempt)
    # Where it cannot be written, the choice itself still works: it looks again whenever something disappears.
    with contextlib.suppress(StorageError):
        target.store.put(name, b"")
    try:
        yield
    finally:
        with contextlib.suppress(StorageError):
            target.store.delete(name)


def prepare(target: CheckpointTarget) -> None:
    """Finds out at the start, not hours later, whether checkpoints can be written. First deletes what was never
    complete, because on a full disk that makes the room.

    Only while nothing is being written.

    Raises:
        StorageError: the storage refuses to list, write or delete.
    """
    own = _own(target)
    for one in own.unfinished:
        _delete_unfinished(target.store, one.entry)
    for job, attempt in own.readers:
        if job == target.author.job:
            # Of one that was killed while it chose.
            target.store.delete(_mark_of(job, attempt))
    probe_writing(target)


def probe_writing(target: CheckpointTarget, who: str = "") -> None:
    """Raises StorageError: the storage refuses to write or delete. `who`: tells the writers of an attempt apart."""
    probe = f"step-probe-{target.author.job}-{target.author.attempt}{who}"
    target.store.put(probe, b"")
    target.store.delete(probe)


class PeerParts:
    """The other hosts that write a part of the same checkpoint: by default there are none."""

    def begin(self) -> None:
        """They may write."""

    def marks(self) -> Mapping[str, Mark]:
        """Of their files, once they have written them. Raises StorageError if one cannot."""
        return {}

    def close(self) -> None:
        """They need not wait for `begin` any more."""


def write(
    target: CheckpointTarget, snapshot: Snapshot, evaluation: Evaluation | None = None, others: PeerParts | None = None
) -> int:
    """Returns the bytes of the whole checkpoint once it is committed. `evaluation`: of its step.

    Raises:
        StorageError: it is not committed, and the files written so far count for nothing.
    """
    store, author = target.store, target.author
    folder = Folder(snapshot.step, author.job, author.attempt)
    others = others or PeerParts()
    marks: dict[str, Mark] = {}
    try:
        # A restarted process of the same attempt may reach the same step again: while the files are being replaced, the
        # first COMMIT would vouch for a mixture.
        store.delete(f"{folder}/{COMMIT}")
        others.begin()
        put_files(store, folder, snapshot_files(snapshot), marks)
        marks |= others.marks()
    except StorageError:
        _free(store, folder)
        raise
    finally:
        others.close()
    clean = bool(snapshot.document.get("clean", True))
    weights = str(snapshot.document.get("weights", ""))
    commit = Commit(snapshot.step, snapshot.examples, author, marks, clean, evaluation, weights).to_json()
    try:
        created = store.put_if_absent(f"{folder}/{COMMIT}", commit)
    except StorageError:
        # Its answer may be lost, and the COMMIT there: `_free` begins with it.
        _free(store, folder)
        raise
    # A request that was sent again after a lost answer finds its own COMMIT there.
    if not created and store.read(f"{folder}/{COMMIT}") != commit:
        raise StorageError(f"{store.uri}: another process writes checkpoint {folder} as this job's attempt, too")
    return sum(mark.size for mark in marks.values()) + len(commit)


def _free(store: ObjectStore, folder: Folder) -> None:
    """Deletes what a write that failed has left: on a full disk it would block the next one."""
    with contextlib.suppress(StorageError):
        _delete(store, folder, [name.partition("/")[2] for name in store.list(f"{folder}/")])


def put_files(store: ObjectStore, folder: Folder, files: Iterable[tuple[str, bytes]], marks: dict[str, Mark]) -> None:
    """Writes the files; `marks` is filled as they are written.

    Raises:
        StorageError: a file could not be written.
    """
    for file, data in files:
        store.put(f"{folder}/{file}", data)
        marks[file] = Mark.of(data)


def delete_files(store: ObjectStore, folder: Folder, files: Iterable[str]) -> None:
    for file in files:
        store.delete(f"{folder}/{file}")


def make_room(target: CheckpointTarget, step: int, best: Best | None = None) -> None:
    """After the commit of `step`: deletes this job's other checkpoints except the newest `keep` and `best`, what was
    never complete, and what is damaged and older. Nothing while a later attempt chooses its checkpoint.

    Raises:
        StorageError: not everything could be deleted.
    """
    store, author = target.store, target.author
    written, own = Folder(step, author.job, author.attempt), _own(target)
    if any(job == author.job and attempt > author.attempt for job, attempt in own.readers):
        return
    spared = None if best is None else Folder.parse(best.name)
    whole = {entry.folder: is_complete(store, (commit, entry)) for commit, entry in own.candidates}
    for entry in surplus(own.candidates, author, target.keep, written, spared, lambda folder: whole[folder]):
        _delete(store, entry.folder, entry.sizes)
    for one in own.unreadable:
        if one.worthless and one.entry.folder.step <= step:
            _delete(store, one.entry.folder, one.entry.sizes)
    for one in own.unfinished:
        _delete_unfinished(store, one.entry)


def surplus(
    held: Iterable[Candidate],
    author: Author,
    keep: int,
    written: Folder,
    best: Folder | None = None,
    whole: Callable[[Folder], bool] = lambda folder: True,
) -> Sequence[Entry]:
    """What to delete: all but the newest `keep`, `written`, `best`, and the newest clean one, from which a run whose
    loss is no longer finite can start again.

    `written` need not be among the newest: an earlier attempt that was cut off may have come further, and its
    checkpoints stay. Those of another task, model or seed do not count, since this run could not use them. Nor do those
    that are not `whole`, which stay until there are `keep` newer ones.
    """
    usable = [(commit, entry) for commit, entry in held if commit.author.fingerprint == author.fingerprint]
    newest_first = sorted(usable, key=progress, reverse=True)
    intact = [one for one in newest_first if whole(one[1].folder)]
    kept = {entry.folder for _, entry in intact[:keep]} | {written}
    oldest = min((one for one in newest_first if one[1].folder in kept), key=progress, default=None)
    clean = next((entry.folder for commit, entry in intact if commit.clean), None)
    spared = {*kept, clean, best}
    return [
        one[1]
        for one in newest_first
        if one[1].folder not in spared
        and (whole(one[1].folder) or (oldest is not None and progress(one) < progress(oldest)))
    ]


def _own(target: CheckpointTarget) -> Survey:
    """Looks at what this job wrote, in this attempt and earlier ones."""
    author = target.author
    own = survey(target.store, lambda folder: folder.job == author.job and folder.attempt <= author.attempt)
    own.candidates = [one for one in own.candidates if one[0].author.uid == author.uid]
    return own


def _delete(store: ObjectStore, folder: Folder, files: Iterable[str]) -> None:
    delete_files(store, folder, [COMMIT, *(file for file in files if file != COMMIT)])


def _delete_unfinished(store: ObjectStore, entry: Entry) -> None:
    """Deletes it, unless its writer, cut off but alive, has committed it since it was looked at."""
    if COMMIT in entry.sizes or store.put_if_absent(f"{entry.folder}/{COMMIT}", _TOMBSTONE):
        delete_files(store, entry.folder, [*(file for file in entry.sizes if file != COMMIT), COMMIT])
