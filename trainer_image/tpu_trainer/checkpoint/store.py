"""Where checkpoints lie: named objects below one place, a directory or a path in a bucket.

A name has slashes inside, as in "step-00000120-5f0c-1/COMMIT".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tpu_trainer.errors import BadSpecError, StorageDeniedError, StorageError

_BUCKET = re.compile(r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])/(.+)", re.DOTALL)


class MissingError(StorageError):
    """There is no object of that name."""


class Store(Protocol):
    """Whole objects by name. Every method raises StorageError, one line for a person, when the storage refuses, and
    StorageDeniedError where it would refuse again.

    uri: the place, as the run spec names it.
    """

    uri: str

    def list(self, prefix: str) -> dict[str, int]:
        """The objects whose name begins with `prefix`, and their sizes in bytes."""

    def read(self, name: str) -> bytes:
        """Raises MissingError where there is none."""

    def put(self, name: str, data: bytes) -> None:
        """Afterwards the object is there and holds `data`; another of this name is replaced. Never half of it."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """`put`, but only where there is no object of this name: of several writers one gets True.

        In a directory, and there only, a crash may leave a part of it.
        """

    def delete(self, name: str) -> None:
        """Afterwards there is no such object; there need not have been one."""


def open_store(uri: str, setting: str = "checkpoint.uri") -> Store:
    """The store at `uri`, which is not touched yet. `setting`: the field of the run spec that holds it.

    Raises:
        BadSpecError: it is neither an absolute path nor gs://bucket/path.
    """
    in_bucket = _BUCKET.fullmatch(uri.rstrip("/"))
    # Imported here: a run without a bucket should not pay for the cloud's client, nor need it.
    if in_bucket:
        from tpu_trainer.checkpoint.bucket_store import BucketStore

        return BucketStore(*in_bucket.groups())
    if uri.startswith("/"):
        from tpu_trainer.checkpoint.directory_store import DirectoryStore

        return DirectoryStore(Path(uri))
    raise BadSpecError(f'{setting}: "gs://bucket/path" or the absolute path of a directory, got {uri!r}')


@dataclass(frozen=True)
class Trouble:
    """Why the storage refuses, in one line; `lasting`: it will refuse again until somebody mends it."""

    reason: str
    lasting: bool = False


def refused(uri: str, doing: str, trouble: Trouble) -> StorageError:
    """The error for storage trouble; `doing` is "write NAME" or the like."""
    kind = StorageDeniedError if trouble.lasting else StorageError
    return kind(f"{uri}: cannot {doing}: {trouble.reason}")
