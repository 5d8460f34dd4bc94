"""The interface of a store, which keeps objects by name, and the store in a directory.

A name may contain slashes, as in "step-00000120-5f0c-1/COMMIT". The directory may be on a disk, on a shared file
system, or in a bucket mounted with gcsfuse.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tpu_trainer.contract.errors import StorageDeniedError, StorageError

# The answers of network and FUSE file systems that cannot sync a directory; they write names through by themselves.
_NO_DIRECTORY_SYNC = {errno.EACCES, errno.EBADF, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM}

# The answers of file systems without hard links, gcsfuse among them.
_NO_HARD_LINKS = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EMLINK}


class MissingError(StorageError):
    """There is no object of that name."""


class ObjectStore(Protocol):
    """Keeps whole objects by name. `uri`: the place, as the run spec names it.

    If the storage refuses, every method raises StorageError with a message of one line, or StorageDeniedError if a
    second attempt would fail as well.
    """

    uri: str

    def list(self, prefix: str) -> dict[str, int]:
        """Returns the objects whose names start with `prefix`, and their sizes in bytes."""

    def read(self, name: str) -> bytes:
        """Returns the object's content. Raises MissingError: there is no such object."""

    def put(self, name: str, data: bytes) -> None:
        """Creates or replaces the object atomically."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Creates the object if there is none of that name: of several writers exactly one gets True.

        In a directory without hard links a crash may leave a part of it.
        """

    def delete(self, name: str) -> None:
        """Deletes the object, if there is one."""


@dataclass(frozen=True)
class StorageTrouble:
    """Why the storage refuses, in one line. `lasting`: a second attempt would be refused, too."""

    reason: str
    lasting: bool = False

    def as_error(self, uri: str, operation: str) -> StorageError:
        """Returns the error to raise. `operation`: "write NAME" or the like."""
        kind = StorageDeniedError if self.lasting else StorageError
        return kind(f"{uri}: cannot {operation}: {self.reason}")


class DirectoryStore:
    """Keeps objects as files below `root`, which is created with the first of them."""

    def __init__(self, root: Path) -> None:
        self.uri = str(root)
        self._root = root

    def list(self, prefix: str) -> dict[str, int]:
        # Only the folders asked for: the directory may also hold a data set.
        top, _, _ = prefix.partition("/")
        with self._errors("list the directory"):
            try:
                paths = [path for path in self._root.iterdir() if path.name.startswith(top)]
            except FileNotFoundError:
                return {}
            files = [file for path in paths for file in _files_below(path)]
            names = {file.relative_to(self._root).as_posix(): file for file in files}
            sizes = {name: _size(file) for name, file in names.items() if name.startswith(prefix)}
        return {name: size for name, size in sizes.items() if size is not None}

    def read(self, name: str) -> bytes:
        with self._errors(f"read {name}"):
            try:
                return (self._root / name).read_bytes()
            except FileNotFoundError as error:
                raise MissingError(f"{self.uri}: {name} is not there") from error

    def put(self, name: str, data: bytes) -> None:
        target = self._root / name
        part = target.with_name(f"{target.name}.part")
        with self._errors(f"write {name}"):
            target.parent.mkdir(parents=True, exist_ok=True)
            with _removed_on_failure(part):
                _write(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), data)
                part.replace(target)
            self._sync_directories(target)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        target = self._root / name
        with self._errors(f"write {name}"):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                _create_atomically(target, data)
            except FileExistsError:
                return False
            self._sync_directories(target)
        return True

    def delete(self, name: str) -> None:
        target = self._root / name
        with self._errors(f"delete {name}"):
            target.unlink(missing_ok=True)
            # Folders go with their last file.
            with contextlib.suppress(OSError):
                for folder in Path(name).parents[:-1]:
                    (self._root / folder).rmdir()

    def _sync_directories(self, target: Path) -> None:
        """Makes the names durable as well: the file's, and those of directories that may be new."""
        for directory in (target.parent, self._root, self._root.parent):
            try:
                handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)
            except OSError as error:
                if error.errno not in _NO_DIRECTORY_SYNC:
                    raise

    @contextmanager
    def _errors(self, operation: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _trouble(error).as_error(self.uri, operation) from error


def _trouble(error: OSError) -> StorageTrouble:
    reason = error.strerror or type(error).__name__
    if error.errno == errno.EROFS:
        return StorageTrouble(f"{reason}: mount the volume for writing", lasting=True)
    if error.errno in (errno.EACCES, errno.EPERM):
        where = f" ({error.filename})" if error.filename else ""
        return StorageTrouble(
            f"{reason}{where}: the worker runs as user {os.geteuid()} of group {os.getegid()}, which must be allowed "
            "to read and write there",
            lasting=True,
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageTrouble(f"{reason}: make room there, or keep fewer checkpoints (checkpoint.keep)")
    return StorageTrouble(reason)


def _create_atomically(target: Path, data: bytes) -> None:
    """Creates the file, whole or not at all. Raises FileExistsError: there is such a file."""
    part = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
    try:
        _create(part, data)
        os.link(part, target)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        # gcsfuse shows a file once it is closed; elsewhere a crash may leave a part of it.
        _create(target, data)
    finally:
        part.unlink(missing_ok=True)


def _create(path: Path, data: bytes) -> None:
    """Creates and writes the file. Raises FileExistsError: there is such a file."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    with _removed_on_failure(path):
        _write(handle, data)


def _write(handle: int, data: bytes) -> None:
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    """Deletes the file if the block fails: on a full disk it would block the next attempt."""
    try:
        yield
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def _files_below(path: Path) -> Iterator[Path]:
    """Yields the files below a directory, or the file itself, but not those that another process deletes meanwhile."""
    if not path.is_dir():
        yield path
        return

    def raise_error(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for directory, _, files in os.walk(path, onerror=raise_error):
        yield from (Path(directory, file) for file in files)


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return None
