"""The checkpoints in a store: lists them, checks that they are complete, writes new ones and deletes old ones.

Writing puts COMMIT last, and deleting removes it first, so that no half of a checkpoint passes for a complete one. A
run deletes only what its own job wrote, in this or an earlier attempt: a host that was cut off may still write beside
its successor, and must not destroy the successor's work. A listing may lag behind, so it is never a reason to delete:
a file that it lacks is read by its name, and a folder with a COMMIT stays until this attempt has a newer checkpoint.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tpu_contract.run_spec import BestSpec
from tpu_trainer.checkpoint.commit import COMMIT, Author, Commit, Evaluation, Folder, Mark, OtherFormatError
from tpu_trainer.checkpoint.snapshot import Snapshot, snapshot_files
from tpu_trainer.contract.errors import StorageError
from tpu_trainer.contract.outcome import Best
from tpu_trainer.storage import open_store
from tpu_trainer.storage.store import MissingError, ObjectStore

Say = Callable[[str], None]


@dataclass(frozen=True)
class Entry:
    """One checkpoint's folder as listed. `sizes`: the bytes of each file, COMMIT included if there is one."""

    folder: Folder
    sizes: Mapping[str, int]


Candidate = tuple[Commit, Entry]

_TOMBSTONE = b""
"""Takes the place of a COMMIT, so that no writer can commit any more. It is empty, because a full disk has room for
that; a crash between creating a COMMIT and filling it leaves the same."""

_NO_COMMITS = (_TOMBSTONE, b"being deleted")
"""The tombstones of this and of earlier versions."""

_READING = re.compile(r"step-reading-([0-9A-Za-z]{1,8})-([0-9]{1,6})")


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that was read completely. `reader`: the rank that read it and holds its tensors."""

    folder: Folder
    commit: Commit
    snapshot: Snapshot
    reader: int = 0


@dataclass(frozen=True)
class CheckpointTarget:
    """Where this run's checkpoints go. `keep`: how many committed ones stay. `best`: the rule by which one more
    stays."""

    store: ObjectStore
    author: Author
    keep: int
    best: BestSpec | None = None


class SkippedError(Exception):
    """The checkpoint cannot be taken; the text says why."""


class UnfinishedError(SkippedError):
    """The checkpoint was never complete, or is being deleted."""


class IncompleteError(SkippedError):
    """A file is missing or has another size; a later look may find it."""


class GoneError(SkippedError):
    """The checkpoint was deleted while it was read."""


@dataclass(frozen=True)
class RejectedCheckpoint:
    """A checkpoint that is not taken. commit: None if it cannot be read. worthless: no version of the trainer can read
    its COMMIT. gone: its COMMIT was listed, and has disappeared since."""

    entry: Entry
    why: str
    commit: Commit | None = None
    worthless: bool = False
    gone: bool = False

    def __str__(self) -> str:
        return f"checkpoint {self.entry.folder} is passed over: {self.why}"


@dataclass
class Survey:
    """What a store holds, by one listing and all COMMITs. candidates: checkpoints with a COMMIT, in no particular
    order, whether or not their files are there. readers: (job, attempt) of the runs that are choosing a checkpoint
    now."""

    candidates: list[Candidate] = field(default_factory=list)
    unreadable: list[RejectedCheckpoint] = field(default_factory=list)
    unfinished: list[RejectedCheckpoint] = field(default_factory=list)
    readers: list[tuple[str, int]] = field(default_factory=list)


def survey(store: ObjectStore, concerns: Callable[[Folder], bool] = lambda folder: True) -> Survey:
    """Lists the store and reads the COMMITs of the folders that `concerns` returns True for.

    Raises:
        StorageError: the storage refuses.
    """
    listing, result = store.list("step-"), Survey()
    result.readers = [(name[1], int(name[2])) for name in map(_READING.fullmatch, listing) if name]
    for entry in sorted(entries(listing), key=lambda entry: str(entry.folder), reverse=True):
        if not concerns(entry.folder):
            continue
        try:
            result.candidates.append((read_commit(store, entry.folder), entry))
        except UnfinishedError as why:
            gone = COMMIT in entry.sizes and isinstance(why.__cause__, MissingError)
            result.unfinished.append(RejectedCheckpoint(entry, str(why), gone=gone))
        except SkippedError as why:
            result.unreadable.append(
                RejectedCheckpoint(entry, str(why), worthless=not isinstance(why.__cause__, OtherFormatError))
            )
    return result


def entries(listing: Mapping[str, int]) -> list[Entry]:
    """Returns all folders that are named like checkpoints, in no particular order."""
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
    """Returns the content of one of the checkpoint's files.

    Raises:
        SkippedError: it does not match its size and checksum in COMMIT.
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
    """Returns whether all files of the checkpoint are there, in their sizes.

    Raises:
        StorageError: the storage refuses.
    """
    try:
        check_listed(store, candidate)
    except SkippedError:
        return False
    return True


def progress(candidate: Candidate) -> tuple[int, int, str]:
    """Returns a key that orders checkpoints by how far they are: by examples, because the size of a step depends on the
    slice, and then by attempt."""
    commit, entry = candidate
    return commit.examples, entry.folder.attempt, str(entry.folder)


def _reading_mark(job: str, attempt: int) -> str:
    return f"step-reading-{job}-{attempt}"


@contextmanager
def mark_reading(target: CheckpointTarget) -> Iterator[None]:
    """Marks in the store that this run is choosing a checkpoint: an earlier attempt that still writes deletes nothing
    meanwhile."""
    name = _reading_mark(target.author.job, target.author.attempt)
    # Without the mark the choice still works: the search looks again whenever something disappears.
    with contextlib.suppress(StorageError):
        target.store.put(name, b"")
    try:
        yield
    finally:
        with contextlib.suppress(StorageError):
            target.store.delete(name)


def prepare(target: CheckpointTarget) -> None:
    """Checks at the start, not hours later, that checkpoints can be written. First deletes the job's incomplete ones,
    which on a full disk makes the room. Call it while nothing is being written.

    Raises:
        StorageError: the storage refuses to list, write or delete.
    """
    checkpoints = _survey_own(target)
    for rejected in checkpoints.unfinished:
        _delete_unfinished(target.store, rejected.entry)
    for job, attempt in checkpoints.readers:
        if job == target.author.job:
            # A run that was killed during its choice has left the mark.
            target.store.delete(_reading_mark(job, attempt))
    probe_writing(target)


def probe_writing(target: CheckpointTarget, who: str = "") -> None:
    """Writes and deletes a probe. `who`: distinguishes the writers of an attempt.

    Raises:
        StorageError: the storage refuses.
    """
    probe = f"step-probe-{target.author.job}-{target.author.attempt}{who}"
    target.store.put(probe, b"")
    target.store.delete(probe)


class PeerParts:
    """The parts of a checkpoint that other hosts write; this base class has none."""

    def begin(self) -> None:
        """Lets the other hosts write."""

    def marks(self) -> Mapping[str, Mark]:
        """Waits for the other hosts; returns the marks of their files. Raises StorageError: a host failed."""
        return {}

    def close(self) -> None:
        """Ends the other hosts' wait for `begin`."""


def write(
    target: CheckpointTarget,
    snapshot: Snapshot,
    evaluation: Evaluation | None = None,
    peer_parts: PeerParts | None = None,
) -> int:
    """Writes and commits a checkpoint; returns its bytes, all parts included. `evaluation`: of its step.

    Raises:
        StorageError: it is not committed; the files written so far are no checkpoint.
    """
    store, author = target.store, target.author
    folder = Folder(snapshot.step, author.job, author.attempt)
    peer_parts = peer_parts or PeerParts()
    marks: dict[str, Mark] = {}
    try:
        # A restarted process of the same attempt may reach the same step again: while the files are being replaced, the
        # first COMMIT would cover a mixture.
        store.delete(f"{folder}/{COMMIT}")
        peer_parts.begin()
        put_files(store, folder, snapshot_files(snapshot), marks)
        marks |= peer_parts.marks()
    except StorageError:
        _free(store, folder)
        raise
    finally:
        peer_parts.close()
    clean = bool(snapshot.document.get("clean", True))
    weights = str(snapshot.document.get("weights", ""))
    commit = Commit(snapshot.step, snapshot.examples, author, marks, clean, evaluation, weights).to_json()
    try:
        created = store.put_if_absent(f"{folder}/{COMMIT}", commit)
    except StorageError:
        # The COMMIT may be there although its answer was lost: `_free` deletes it first.
        _free(store, folder)
        raise
    # A request that is repeated after a lost answer finds the COMMIT of the first one.
    if not created and store.read(f"{folder}/{COMMIT}") != commit:
        raise StorageError(f"{store.uri}: another process writes checkpoint {folder} as this job's attempt, too")
    return sum(mark.size for mark in marks.values()) + len(commit)


def _free(store: ObjectStore, folder: Folder) -> None:
    """Deletes what a failed write has left: on a full disk it would block the next one."""
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
    """Deletes what the job no longer needs after the commit of `step`: its other checkpoints except the newest `keep`
    and `best`, incomplete ones, and older damaged ones. Does nothing while a later attempt chooses its checkpoint.

    Raises:
        StorageError: not everything could be deleted.
    """
    store, author = target.store, target.author
    written, checkpoints = Folder(step, author.job, author.attempt), _survey_own(target)
    if any(job == author.job and attempt > author.attempt for job, attempt in checkpoints.readers):
        return
    spared = None if best is None else Folder.parse(best.name)
    complete = {entry.folder: is_complete(store, (commit, entry)) for commit, entry in checkpoints.candidates}
    for entry in surplus(checkpoints.candidates, author, target.keep, written, spared, lambda folder: complete[folder]):
        _delete(store, entry.folder, entry.sizes)
    for rejected in checkpoints.unreadable:
        if rejected.worthless and rejected.entry.folder.step <= step:
            _delete(store, rejected.entry.folder, rejected.entry.sizes)
    for rejected in checkpoints.unfinished:
        _delete_unfinished(store, rejected.entry)


def remove_rungs(prefix: str) -> int:
    """Deletes the checkpoints of a ladder's lower rungs, whose URIs start with `prefix`, .../NAME.rungs/UID-. Only the
    next rung reads them, until it has its own. Returns how many objects there were.

    Raises:
        StorageError: the storage refuses.
    """
    parent, folder, job = prefix.rsplit("/", 2)
    store = open_store(parent, "checkpoint.rungs")
    # COMMITs first, so that no half-deleted checkpoint passes for a complete one.
    names = sorted(store.list(f"{folder}/{job}"), key=lambda name: not name.endswith(f"/{COMMIT}"))
    for name in names:
        store.delete(name)
    return len(names)


def surplus(
    held: Iterable[Candidate],
    author: Author,
    keep: int,
    written: Folder,
    best: Folder | None = None,
    complete: Callable[[Folder], bool] = lambda folder: True,
) -> Sequence[Entry]:
    """Returns what to delete: all but the newest `keep`, `written`, `best`, and the newest clean one, from which a run
    whose loss is no longer finite can start again.

    `written` need not be among the newest: an earlier attempt that was cut off may have come further, and its
    checkpoints stay. Checkpoints of another task, model or seed do not count, since this run could not use them. Those
    that are not `complete` do not count either, and stay until there are `keep` newer ones.
    """
    usable = [(commit, entry) for commit, entry in held if commit.author.fingerprint == author.fingerprint]
    newest_first = sorted(usable, key=progress, reverse=True)
    intact = [candidate for candidate in newest_first if complete(candidate[1].folder)]
    newest = {entry.folder for _, entry in intact[:keep]} | {written}
    oldest = min((candidate for candidate in newest_first if candidate[1].folder in newest), key=progress, default=None)
    clean = next((entry.folder for commit, entry in intact if commit.clean), None)
    spared = {*newest, clean, best}
    return [
        candidate[1]
        for candidate in newest_first
        if candidate[1].folder not in spared
        and (complete(candidate[1].folder) or (oldest is not None and progress(candidate) < progress(oldest)))
    ]


def _survey_own(target: CheckpointTarget) -> Survey:
    """Surveys what this job wrote, in this attempt and earlier ones."""
    author = target.author
    checkpoints = survey(target.store, lambda folder: folder.job == author.job and folder.attempt <= author.attempt)
    checkpoints.candidates = [pair for pair in checkpoints.candidates if pair[0].author.uid == author.uid]
    return checkpoints


def _delete(store: ObjectStore, folder: Folder, files: Iterable[str]) -> None:
    delete_files(store, folder, [COMMIT, *(file for file in files if file != COMMIT)])


def _delete_unfinished(store: ObjectStore, entry: Entry) -> None:
    """Deletes the checkpoint, unless its writer, cut off but alive, has committed it since the survey."""
    if COMMIT in entry.sizes or store.put_if_absent(f"{entry.folder}/{COMMIT}", _TOMBSTONE):
        delete_files(store, entry.folder, [*(file for file in entry.sizes if file != COMMIT), COMMIT])
