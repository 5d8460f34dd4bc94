"""A store in a bucket of Google Cloud Storage, through gcsfs.

The service does the hard part: an object appears whole or not at all, everybody sees it from then on, and it can be
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

from tpu_trainer.storage.store import MissingError, StorageTrouble, refused

# No limit on a whole request, whose duration depends on the size of the model; silence ends it.
_PATIENCE = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)

# What gcsfs raises once its own retries are used up.
_TROUBLE = (OSError, aiohttp.ClientError, HttpError, GoogleAuthError, ValueError, RuntimeError)

_REASON_LIMIT = 200


class BucketStore:
    """The objects of `bucket` whose names start with `path` and a slash."""

    def __init__(self, bucket: str, path: str) -> None:
        self.uri = f"gs://{bucket}/{path}"
        self._bucket, self._root = bucket, f"{bucket}/{path}/"
        # gcsfs logs every refused request with a traceback before it raises; here each is one line of the error.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
        self._files = GCSFileSystem(
            # Otherwise it first looks for Google credentials, on this machine and on the network.
            token="anon" if os.environ.get("STORAGE_EMULATOR_HOST") else None,
            # A cached listing would hide what other processes write.
            use_listings_cache=False,
            skip_instance_cache=True,
            session_kwargs={"timeout": _PATIENCE},
        )

    def list(self, prefix: str) -> dict[str, int]:
        with self._doing("list the bucket"):
            found = self._files.find(self._root, prefix=prefix, detail=True)
        return {name.removeprefix(self._root): int(file["size"]) for name, file in found.items()}

    def read(self, name: str) -> bytes:
        with self._doing(f"read {name}"):
            try:
                data: bytes = self._files.cat_file(self._root + name)
            except FileNotFoundError as error:
                raise MissingError(f"{self.uri}: {name} is not there") from error
        return data

    def put(self, name: str, data: bytes) -> None:
        doing = f"write {name}"
        with self._doing(doing):
            self._files.pipe_file(self._root + name, data)
            stored = self._files.info(self._root + name)
        # Checked against what the service itself computed: no bit can have changed on the way.
        if (int(stored["size"]), stored["crc32c"]) != (len(data), _crc32c(data)):
            raise refused(self.uri, doing, StorageTrouble("the bucket holds bytes that differ from those sent"))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        with self._doing(f"write {name}"):
            try:
                self._files.pipe_file(self._root + name, data, mode="create")
            except FileExistsError:
                return False
        return True

    def delete(self, name: str) -> None:
        with self._doing(f"delete {name}"):
            try:
                self._files.rm_file(self._root + name)
            except FileNotFoundError:
                return

    @contextmanager
    def _doing(self, doing: str) -> Iterator[None]:
        try:
            yield
        except _TROUBLE as error:
            raise refused(self.uri, doing, self._trouble(error)) from error

    def _trouble(self, error: Exception) -> StorageTrouble:
        said = _last_line(error)
        if isinstance(error, FileNotFoundError):
            return StorageTrouble(
                f"there is no bucket {self._bucket}: correct its name or create it; a bucket that the account may not "
                "see looks the same",
                lasting=True,
            )
        if (refusal := _refused_credentials(error)) is not None:
            return StorageTrouble(f"{refusal.reason}; {self._grant}", lasting=True) if refusal.lasting else refusal
        if isinstance(error, aiohttp.ClientConnectionError | TimeoutError):
            return StorageTrouble(f"no connection: {said or type(error).__name__}")
        if str(error).startswith("Forbidden"):
            # Too many requests get the same status as missing rights.
            busy = "rate limit" in str(error).lower()
            return StorageTrouble(said if busy else f"permission denied: {said}; {self._grant}", lasting=not busy)
        return StorageTrouble(f"{type(error).__name__}: {said}")

    @property
    def _grant(self) -> str:
        return (
            "the service account of the pods (spec.trainer.serviceAccountName, bound by Workload Identity Federation) "
            f"needs roles/storage.objectUser on gs://{self._bucket}"
        )


def _refused_credentials(error: Exception) -> StorageTrouble | None:
    """What is wrong with the credentials; None if the trouble is something else."""
    if isinstance(error, HttpError) and error.code in (401, "401"):
        # gcsfs says "Invalid Credentials" whatever happened while it fetched them.
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
    """As the service writes it: the checksum's four bytes, big-endian, in base64."""
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()
