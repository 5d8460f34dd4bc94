"""Where the report and the event files go: a local directory, or any URL that fsspec knows (gs://...).

Used by `reporter` and `tensorboard`, which answer for the errors it raises: OSError or whatever the storage's own
client raises.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol


class Folder(Protocol):
    """Whole files, each replaced at once: a reader sees the old one or the new one."""

    def write(self, name: str, content: bytes) -> None: ...

    def read(self, name: str) -> bytes | None:
        """None where there is no such file."""


def open_folder(place: str) -> Folder:
    """`place`: a path, or a URL with a scheme. Nothing is created or asked for before the first read or write."""
    return RemoteFolder(place) if "://" in place else LocalFolder(Path(place))


class LocalFolder:
    """A directory, made when it is first written to."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, name: str, content: bytes) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        beside = self._path / f".{name}.{os.getpid()}"
        try:
            beside.write_bytes(content)
            beside.replace(self._path / name)
        finally:
            beside.unlink(missing_ok=True)

    def read(self, name: str) -> bytes | None:
        try:
            return (self._path / name).read_bytes()
        except FileNotFoundError:
            return None


class RemoteFolder:
    """An object store replaces an object at once by itself."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def write(self, name: str, content: bytes) -> None:
        files, path = self._open(name)
        files.pipe_file(path, content)

    def read(self, name: str) -> bytes | None:
        files, path = self._open(name)
        try:
            content: bytes = files.cat_file(path)
        except FileNotFoundError:
            return None
        return content

    def _open(self, name: str) -> tuple[Any, str]:
        # Here and not above: a run without a report needs no fsspec, and gcsfs takes a second to import.
        import fsspec  # type: ignore[import-untyped, unused-ignore]

        files, path = fsspec.core.url_to_fs(f"{self._url}/{name}")
        return files, path
