"""A store in a bucket of Google Cloud Storage, through gcsfs.

The service does the hard part: an object appears whole or not at all, all readers see it from then on, and it can be
created on the condition that there is none. STORAGE_EMULATOR_HOST names another server, without credentials.
"""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
import google_crc32c
from gcsfs.core import GCSFileSystem  # type: ignore[import-untyped]
from gcsfs.retry import HttpError  # type: ignore[import-untyped]
from google.auth.exceptions import GoogleAuthError, TransportError

from tpu_trainer.storage.store import MissingError, StorageTrouble

# A whole request has no limit, because its duration depends on the size of the model; silence ends it.
_PATIENCE = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)

# gcsfs raises these once its own retries are used up.
_TROUBLE = (OSError, aiohttp.ClientError, HttpError, GoogleAuthError, ValueError, RuntimeError)

_REASON_LIMIT = 200


class BucketStore:
    """Keeps objects in `bucket`, under names that start with `path` and a slash."""

    def __init__(self, bucket: str, path: str) -> None:
        self.uri = f"gs://{bucket}/{path}"
        self._bucket, self._root = bucket, f"{bucket}/{path}/"
        # gcsfs logs a traceback of every refused request before it raises; the error's one line is enough.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
        self._files = GCSFileSystem(
            # None makes it look for Google credentials, on this machine and on the network.
            token="anon" if os.environ.get("STORAGE_EMULATOR_HOST") else None,
            # A cached listing would hide what other processes write.
            use_listings_cache=False,
            skip_instance_cache=True,
            session_kwargs={"timeout": _PATIENCE},
        )

    def list(self, prefix: str) -> dict[str, int]:
        with self._errors("list the bucket"):
            files = self._files.find(self._root, prefix=prefix, detail=True)
        return {name.removeprefix(self._root): int(file["size"]) for name, file in files.items()}

    def read(self, name: str) -> bytes:
        with self._errors(f"read {name}"):
            try:
                data: bytes = self._files.cat_file(self._root + name)
            except FileNotFoundError as error:
                raise MissingError(f"{self.uri}: {name} is not there") from error
        return data

    def put(self, name: str, data: bytes) -> None:
        operation = f"write {name}"
        with self._errors(operation):
            self._files.pipe_file(self._root + name, data)
            stored = self._files.info(self._root + name)
        # The service computes the checksum itself, so a bit that changed on the way shows.
        if (int(stored["size"]), stored["crc32c"]) != (len(data), _crc32c(data)):
            raise StorageTrouble("the bucket holds bytes that differ from those sent").as_error(self.uri, operation)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        with self._errors(f"write {name}"):
            try:
                self._files.pipe_file(self._root + name, data, mode="create")
            except FileExistsError:
                return False
        return True

    def delete(self, name: str) -> None:
        with self._errors(f"delete {name}"):
            try:
                self._files.rm_file(self._root + name)
            except FileNotFoundError:
                return

    @contextmanager
    def _errors(self, operation: str) -> Iterator[None]:
        try:
            yield
        except _TROUBLE as error:
            raise self._trouble(error).as_error(self.uri, operation) from error

    def _trouble(self, error: Exception) -> StorageTrouble:
        reason = _last_line(error)
        if isinstance(error, FileNotFoundError):
            return StorageTrouble(
                f"there is no bucket {self._bucket}: correct its name or create it; a bucket that the account may not "
                "see looks the same",
                lasting=True,
            )
        if (refusal := _credentials_trouble(error)) is not None:
            return StorageTrouble(f"{refusal.reason}; {self._grant}", lasting=True) if refusal.lasting else refusal
        if isinstance(error, aiohttp.ClientConnectionError | TimeoutError):
            return StorageTrouble(f"no connection: {reason or type(error).__name__}")
        if str(error).startswith("Forbidden"):
            # Too many requests get the same status as missing rights.
            busy = "rate limit" in str(error).lower()
            return StorageTrouble(reason if busy else f"permission denied: {reason}; {self._grant}", lasting=not busy)
        return StorageTrouble(f"{type(error).__name__}: {reason}")

    @property
    def _grant(self) -> str:
        return (
            "the service account of the pods (spec.trainer.serviceAccountName, bound by Workload Identity Federation) "
            f"needs roles/storage.objectUser on gs://{self._bucket}"
        )


def _credentials_trouble(error: Exception) -> StorageTrouble | None:
    """Returns what is wrong with the credentials; None if the trouble is something else."""
    if isinstance(error, HttpError) and error.code in (401, "401"):
        # gcsfs reports "Invalid Credentials", whatever happened while it fetched them.
        cause = error.__cause__ if isinstance(error.__cause__, GoogleAuthError) else error
    elif isinstance(error, GoogleAuthError):
        cause = error
    else:
        return None
    text = str(cause)
    unreachable = isinstance(cause, TransportError) or "unavailable" in text or "Status: 5" in text
    if unreachable and "Status: 4" not in text:
        return StorageTrouble(f"no connection to the metadata server that gives credentials: {_last_line(cause)}")
    return StorageTrouble(f"no valid Google credentials: {_last_line(cause)}", lasting=True)


def _last_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[-1][:_REASON_LIMIT]


def _crc32c(data: bytes) -> str:
    """Returns the checksum as the service writes it: its four bytes, big-endian, in base64."""
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()
