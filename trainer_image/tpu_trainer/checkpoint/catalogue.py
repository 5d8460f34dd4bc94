"""Which checkpoints there are, which of them are whole, and which one a run continues from.

Reading trusts nothing but sizes and checksums; a checkpoint that is not whole, or not of this run, is passed over with
a line that says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tpu_trainer.checkpoint.commit import COMMIT, Commit, Folder, Mark, OtherFormatError
from tpu_trainer.checkpoint.files import snapshot_of
from tpu_trainer.checkpoint.snapshot import Snapshot
from tpu_trainer.checkpoint.store import MissingError, Store
from tpu_trainer.errors import StorageError

Say = Callable[[str], None]

ROW = 40
"""Numbers in a row that holds a name, in `as_row`."""


@dataclass(frozen=True)
class Entry:
    """One checkpoint's folder as listed; `sizes`: its files in bytes, COMMIT too where there is one."""

    folder: Folder
    sizes: Mapping[str, int]


Candidate = tuple[Commit, Entry]


@dataclass(frozen=True)
class Found:
    """A checkpoint that was read whole."""

    folder: Folder
    commit: Commit
    snapshot: Snapshot


class PassedOverError(Exception):
    """The checkpoint cannot be taken; the text says why. `torn`: it is not whole, and nobody will ever take it."""

    def __init__(self, why: str, torn: bool = True) -> None:
        super().__init__(why)
        self.torn = torn


def entries(store: Store) -> list[Entry]:
    """All the folders that are named like checkpoints, in no particular order."""
    sizes: dict[Folder, dict[str, int]] = {}
    for path, size in store.list("step-").items():
        name, _, file = path.partition("/")
        folder = Folder.parse(name)
        if folder is not None and str(folder) == name and file:
            sizes.setdefault(folder, {})[file] = size
    return [Entry(folder, files) for folder, files in sizes.items()]


def candidates(store: Store, say: Say) -> list[Candidate]:
    """All checkpoints that look whole, the one that has seen the most examples first.

    Examples and not steps: on a larger slice a step counts for more of them. Of equal ones the later attempt's.

    Raises:
        StorageError: the storage refuses.
    """
    return sorted(_committed(store, entries(store), say), key=_order, reverse=True)


def newest(store: Store, among: Iterable[Candidate], fingerprint: str, say: Say) -> Found | None:
    """The first of them that is whole and of this model, task and seed; None without one.

    Raises:
        StorageError: the storage refuses.
    """
    for commit, entry in among:
        try:
            if commit.author.fingerprint != fingerprint:
                raise PassedOverError("it is of another task, model or seed", torn=False)
            return Found(entry.folder, commit, _read(store, entry.folder, commit))
        except PassedOverError as why:
            _tell(say, entry.folder, why)
    return None


def find(store: Store, folder: Folder, host: int) -> Found:
    """The checkpoint that host 0 has chosen, checked again by this host.

    Raises:
        StorageError: it is not there, not whole, or the storage refuses.
    """
    for entry in entries(store):
        if entry.folder == folder:
            try:
                commit = committed(store, entry)
                return Found(folder, commit, _read(store, folder, commit))
            except PassedOverError as why:
                raise StorageError(f"{store.uri}: host {host} cannot read checkpoint {folder}: {why}") from why
    raise StorageError(
        f"{store.uri}: host {host} cannot see checkpoint {folder}, which host 0 chose: checkpoint.uri must be storage "
        "that all hosts share"
    )


def committed(store: Store, entry: Entry) -> Commit:
    """The entry's COMMIT, where all the files that it names have the sizes it says.

    Raises:
        PassedOverError: they have not, or there is no COMMIT.
    """
    if COMMIT not in entry.sizes:
        raise PassedOverError("it has no COMMIT: its writing was cut short, or goes on")
    try:
        commit = Commit.parse(_present(store, entry.folder, COMMIT))
    except OtherFormatError as error:
        raise PassedOverError(f"its {error}", torn=False) from error
    except ValueError as error:
        raise PassedOverError(f"its {error}") from error
    if commit.step != entry.folder.step:
        raise PassedOverError(f"its COMMIT is of step {commit.step}")
    for file, mark in commit.files.items():
        size = entry.sizes.get(file)
        if size is None:
            raise PassedOverError(f"its {file} is missing")
        if size != mark.size:
            raise PassedOverError(f"its {file} has {size} bytes, its COMMIT says {mark.size}")
    return commit


def as_row(folder: Folder | None) -> list[float]:
    """A name as `ROW` small numbers, for a collective that carries nothing else; zeros for none."""
    name = "" if folder is None else str(folder)
    return [float(byte) for byte in name.encode().ljust(ROW, b"\0")]


def from_row(row: Iterable[float]) -> Folder | None:
    """The inverse of `as_row`."""
    return Folder.parse(bytes(int(number) for number in row).rstrip(b"\0").decode())


def _committed(store: Store, found: Iterable[Entry], say: Say) -> list[Candidate]:
    whole = []
    for entry in sorted(found, key=lambda entry: str(entry.folder), reverse=True):
        try:
            whole.append((committed(store, entry), entry))
        except PassedOverError as why:
            _tell(say, entry.folder, why)
    return whole


def _order(candidate: Candidate) -> tuple[int, int, str]:
    commit, entry = candidate
    return commit.examples, entry.folder.attempt, str(entry.folder)


def _read(store: Store, folder: Folder, commit: Commit) -> Snapshot:
    def checked(file: str) -> bytes:
        if file not in commit.files:
            return b""
        data = _present(store, folder, file)
        if Mark.of(data) != commit.files[file]:
            raise PassedOverError(f"its {file} is not what was written: the checksum differs")
        return data

    return snapshot_of(checked)


def _present(store: Store, folder: Folder, file: str) -> bytes:
    try:
        return store.read(f"{folder}/{file}")
    except MissingError as error:
        raise PassedOverError(f"its {file} went away while it was read") from error


def _tell(say: Say, folder: Folder, why: PassedOverError) -> None:
    say(f"checkpoint {folder} is passed over: {why}")
