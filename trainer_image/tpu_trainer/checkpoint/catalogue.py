"""The checkpoints in a store: which there are, which are whole, how one is written, and which are deleted.

Reading trusts nothing but sizes and checksums; a checkpoint that is not whole, or not of this run, is skipped with
a line that says why. Writing puts COMMIT last, and deleting removes it first, so that what is half written or half
deleted is never taken for whole. A run deletes only what its own job wrote, in this or an earlier attempt: a host that
was cut off, and writes on beside its successor, must not destroy the successor's work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tpu_trainer.checkpoint.commit import COMMIT, Author, Commit, Evaluation, Folder, Mark, OtherFormatError
from tpu_trainer.checkpoint.snapshot import Snapshot, files_of, snapshot_of
from tpu_trainer.checkpoint.store import MissingError, Store
from tpu_trainer.errors import StorageError
from tpu_trainer.spec import BestSpec

Say = Callable[[str], None]


@dataclass(frozen=True)
class Entry:
    """One checkpoint's folder as listed; `sizes`: its files in bytes, with COMMIT if there is one."""

    folder: Folder
    sizes: Mapping[str, int]


Candidate = tuple[Commit, Entry]

_TOMBSTONE = b"being deleted"
"""In the place of a COMMIT, so that nobody can commit any more."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that was read whole. `reader`: the rank that read it, and has its tensors."""

    folder: Folder
    commit: Commit
    snapshot: Snapshot
    reader: int = 0


@dataclass(frozen=True)
class Target:
    """Where this run's checkpoints go; `keep` is how many committed ones stay, besides the best one if there is
    `best`."""

    store: Store
    author: Author
    keep: int
    best: BestSpec | None = None


class SkippedError(Exception):
    """The checkpoint cannot be taken; the text says why. `torn`: it is not whole, and never will be."""

    def __init__(self, why: str, torn: bool = True) -> None:
        super().__init__(why)
        self.torn = torn


def entries(store: Store) -> list[Entry]:
    """All folders that are named like checkpoints, in no particular order."""
    sizes: dict[Folder, dict[str, int]] = {}
    for path, size in store.list("step-").items():
        name, _, file = path.partition("/")
        folder = Folder.parse(name)
        if folder is not None and str(folder) == name and file:
            sizes.setdefault(folder, {})[file] = size
    return [Entry(folder, files) for folder, files in sizes.items()]


def candidates(store: Store, say: Say) -> list[Candidate]:
    """All checkpoints that look whole, the one that has seen the most examples first.

    Examples and not steps: on a larger slice a step has more of them. Of equal ones, the later attempt's.

    Raises:
        StorageError: the storage refuses.
    """
    whole = []
    for entry in sorted(entries(store), key=lambda entry: str(entry.folder), reverse=True):
        try:
            whole.append((committed(store, entry), entry))
        except SkippedError as why:
            say(_skipped(entry.folder, why))
    return sorted(whole, key=_progress, reverse=True)


def newest(store: Store, among: Iterable[Candidate], fingerprint: str, say: Say) -> Found | None:
    """The first of them that is whole and of this model, task and seed; None if there is none.

    Raises:
        StorageError: the storage refuses.
    """
    for commit, entry in among:
        try:
            if commit.author.fingerprint != fingerprint:
                raise SkippedError("it is of another task, model or seed", torn=False)
            return Found(entry.folder, commit, _read(store, entry.folder, commit))
        except SkippedError as why:
            say(_skipped(entry.folder, why))
    return None


def committed(store: Store, entry: Entry) -> Commit:
    """The entry's COMMIT, if all the files that it names have the sizes it states.

    Raises:
        SkippedError: they do not, or there is no COMMIT.
    """
    if COMMIT not in entry.sizes:
        raise SkippedError("it has no COMMIT: writing it was cut short, or has not finished")
    try:
        commit = Commit.parse(_present(store, entry.folder, COMMIT))
    except OtherFormatError as error:
        raise SkippedError(f"its {error}", torn=False) from error
    except ValueError as error:
        raise SkippedError(f"its {error}") from error
    if commit.step != entry.folder.step:
        raise SkippedError(f"its COMMIT is of step {commit.step}")
    for file, mark in commit.files.items():
        size = entry.sizes.get(file)
        if size is None:
            raise SkippedError(f"its {file} is missing")
        if size != mark.size:
            raise SkippedError(f"its {file} has {size} bytes, its COMMIT says {mark.size}")
    return commit


def prepare(target: Target) -> None:
    """Finds out at the start, not hours later, whether checkpoints can be written; deletes what dead writers left.

    Only while nothing is being written.

    Raises:
        StorageError: the storage refuses to list, write or delete.
    """
    try_writing(target)
    _, debris = _own(target)
    for entry in debris:
        _delete_debris(target.store, entry)


def try_writing(target: Target, who: str = "") -> None:
    """Raises StorageError: the storage refuses to write or delete. `who`: tells the writers of an attempt apart."""
    probe = f"step-probe-{target.author.job}-{target.author.attempt}{who}"
    target.store.put(probe, b"")
    target.store.delete(probe)


class Others:
    """The other hosts that write a part of the same checkpoint: by default there are none."""

    def begin(self) -> None:
        """They may write."""

    def marks(self) -> Mapping[str, Mark]:
        """Of their files, once they have written them. Raises StorageError if one cannot."""
        return {}

    def close(self) -> None:
        """They need not wait for `begin` any more."""


def write(
    target: Target, snapshot: Snapshot, evaluation: Evaluation | None = None, others: Others | None = None
) -> int:
    """Returns the bytes of the whole checkpoint once it is committed. `evaluation`: of its step.

    Raises:
        StorageError: it is not committed, and the files written so far count for nothing.
    """
    store, author = target.store, target.author
    folder = Folder(snapshot.step, author.job, author.attempt)
    others = others or Others()
    marks: dict[str, Mark] = {}
    try:
        # A restarted process of the same attempt may reach the same step again: while the files are being replaced, the
        # first COMMIT would vouch for a mixture.
        store.delete(f"{folder}/{COMMIT}")
        others.begin()
        put_files(store, folder, files_of(snapshot), marks)
        marks |= others.marks()
    except StorageError:
        # On a full disk they would block the next attempt.
        with contextlib.suppress(StorageError):
            delete_files(store, folder, [name.partition("/")[2] for name in store.list(f"{folder}/")])
        raise
    finally:
        others.close()
    clean = bool(snapshot.document.get("clean", True))
    weights = str(snapshot.document.get("weights", ""))
    commit = Commit(snapshot.step, snapshot.examples, author, marks, clean, evaluation, weights).to_json()
    # A request that was sent again after a lost answer finds its own COMMIT there.
    if not store.put_if_absent(f"{folder}/{COMMIT}", commit) and store.read(f"{folder}/{COMMIT}") != commit:
        raise StorageError(f"{store.uri}: another process writes checkpoint {folder} as this job's attempt, too")
    return sum(mark.size for mark in marks.values()) + len(commit)


def put_files(store: Store, folder: Folder, files: Iterable[tuple[str, bytes]], marks: dict[str, Mark]) -> None:
    """Writes the files; `marks` is filled as they are written.

    Raises:
        StorageError: a file could not be written.
    """
    for file, data in files:
        store.put(f"{folder}/{file}", data)
        marks[file] = Mark.of(data)


def delete_files(store: Store, folder: Folder, files: Iterable[str]) -> None:
    for file in files:
        store.delete(f"{folder}/{file}")


def make_room(target: Target, step: int, best: Folder | None = None) -> None:
    """After the commit of `step`: deletes this job's other checkpoints except the newest `keep` and `best`, and its
    debris.

    Raises:
        StorageError: not everything could be deleted.
    """
    author = target.author
    whole, debris = _own(target)
    written = Folder(step, author.job, author.attempt)
    for entry in surplus(whole, author, target.keep, written, best):
        _delete(target.store, entry)
    for entry in debris:
        _delete_debris(target.store, entry)


def surplus(
    whole: Iterable[Candidate], author: Author, keep: int, written: Folder, best: Folder | None = None
) -> Sequence[Entry]:
    """What to delete: all but the newest `keep`, `written`, `best`, and the newest clean one, from which a run whose
    loss is no longer finite can start again.

    `written` need not be among the newest: an earlier attempt that was cut off may have come further, and its
    checkpoints stay. Those of another task, model or seed do not count, since this run could not use them.
    """
    usable = [(commit, entry) for commit, entry in whole if commit.author.fingerprint == author.fingerprint]
    newest_first = sorted(usable, key=_progress, reverse=True)
    clean = next((entry.folder for commit, entry in newest_first if commit.clean), None)
    return [entry for _, entry in newest_first[keep:] if entry.folder not in (written, clean, best)]


def _own(target: Target) -> tuple[list[Candidate], list[Entry]]:
    """This job's checkpoints, of this attempt and earlier ones: the whole ones, and debris without a valid COMMIT."""
    author = target.author
    whole, debris = [], []
    for entry in entries(target.store):
        if entry.folder.job != author.job or entry.folder.attempt > author.attempt:
            continue
        try:
            commit = committed(target.store, entry)
        except SkippedError as why:
            if why.torn:
                debris.append(entry)
            continue
        if commit.author.uid == author.uid:
            whole.append((commit, entry))
    return whole, debris


def _delete(store: Store, entry: Entry) -> None:
    for file in sorted(entry.sizes, key=lambda file: file != COMMIT):
        store.delete(f"{entry.folder}/{file}")


def _delete_debris(store: Store, entry: Entry) -> None:
    """Deletes what has no valid COMMIT, unless its writer, cut off but alive, has committed it since the listing."""
    if COMMIT in entry.sizes:
        _delete(store, entry)
    elif store.put_if_absent(f"{entry.folder}/{COMMIT}", _TOMBSTONE):
        delete_files(store, entry.folder, [*entry.sizes, COMMIT])


def _progress(candidate: Candidate) -> tuple[int, int, str]:
    commit, entry = candidate
    return commit.examples, entry.folder.attempt, str(entry.folder)


def _read(store: Store, folder: Folder, commit: Commit) -> Snapshot:
    return snapshot_of(commit.files, lambda file: checked(store, folder, commit, file))


def checked(store: Store, folder: Folder, commit: Commit, file: str) -> bytes:
    """The content of one of the checkpoint's files.

    Raises:
        SkippedError: it is not what COMMIT says.
        StorageError: the storage refuses.
    """
    data = _present(store, folder, file)
    if Mark.of(data) != commit.files[file]:
        raise SkippedError(f"its {file} is not what was written: the checksum differs")
    return data


def _present(store: Store, folder: Folder, file: str) -> bytes:
    try:
        return store.read(f"{folder}/{file}")
    except MissingError as error:
        raise SkippedError(f"its {file} disappeared while it was read") from error


def _skipped(folder: Folder, why: SkippedError) -> str:
    return f"checkpoint {folder} is passed over: {why}"
