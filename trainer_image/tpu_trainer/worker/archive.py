"""Unpacks an untrusted .tar.gz: regular files and directories, below one directory.

The hash says that an archive is the one that was submitted, not that it is harmless: whoever may create jobs chooses
both. So names, kinds, counts and sizes are checked here, not by the tar reader, and a file is created only where there
is none. Without links in the directory, no name can lead out of it.
"""

from __future__ import annotations

import gzip
import io
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from tpu_contract.protocol import LARGEST_CODE, MOST_CODE_FILES
from tpu_contract.words import cut

_PIECE = 1 << 20
# Each file adds its header, and the padding of its last block.
_BESIDE_FILES = 1024 * (MOST_CODE_FILES + 20) * 2
_LONGEST_NAME = 1024
_LONGEST_QUOTE = 200
# tarfile raises these for headers that make no sense; nothing else reads or seeks here.
_UNREADABLE = (tarfile.TarError, EOFError, ValueError, OSError, LookupError, OverflowError, RecursionError)


class BadArchiveError(ValueError):
    """The archive is damaged, too large, or holds something that does not belong in it; the text says which."""


def unpack(archive: bytes, directory: Path) -> int:
    """Unpacks `archive` into `directory`, which must be empty; returns the number of files.

    Raises:
        BadArchiveError: what has been unpacked must not be used.
        OSError: the files cannot be written.
    """
    with tempfile.TemporaryFile(dir=directory) as plain:
        _inflate(archive, plain)
        files = 0
        for count, (tar, member) in enumerate(_entries(plain), 1):
            if count > MOST_CODE_FILES:
                raise BadArchiveError(f"it has more than {MOST_CODE_FILES} entries")
            files += _place(tar, member, directory)
    if not files:
        raise BadArchiveError("it has no files")
    return files


def _inflate(archive: bytes, plain: IO[bytes]) -> None:
    """Writes the decompressed archive to `plain` piece by piece, because a small archive may become terabytes."""
    most, written = LARGEST_CODE + _BESIDE_FILES, 0
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(archive)) as packed:
            while piece := packed.read(_PIECE):
                written += len(piece)
                if written > most:
                    raise BadArchiveError(f"its files take more than {LARGEST_CODE} bytes")
                plain.write(piece)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadArchiveError(f"it is not a .tar.gz file: {error}") from error
    plain.seek(0)


def _entries(plain: IO[bytes]) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    try:
        tar = tarfile.TarFile(fileobj=plain)
        while (member := tar.next()) is not None:
            yield tar, member
    except _UNREADABLE as error:
        raise BadArchiveError(f"it is not a tar archive, or damaged: {error}") from error
    # After the first entry, tarfile mistakes damage for the end of the archive.
    plain.seek(tar.offset)
    while piece := plain.read(_PIECE):
        if piece.strip(b"\0"):
            raise BadArchiveError("it is damaged: there is more after the end of the tar archive")


def _place(tar: tarfile.TarFile, member: tarfile.TarInfo, directory: Path) -> bool:
    """Unpacks one entry; returns whether it is a file."""
    target = directory / _checked_path(member)
    try:
        if member.isdir():
            target.mkdir(parents=True, exist_ok=True)
            return False
        if not member.isreg() or member.issparse() or member.size < 0:
            raise BadArchiveError(f"{_quote(member.name)} is {_kind(member)}; only files and directories are unpacked")
        target.parent.mkdir(parents=True, exist_ok=True)
        content = tar.extractfile(member)
        assert content is not None
        with content, target.open("xb") as file:
            shutil.copyfileobj(content, file, _PIECE)
    except tarfile.TarError as error:
        raise BadArchiveError(f"it is cut off in {_quote(member.name)}") from error
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise BadArchiveError(f"it has {_quote(member.name)} twice, or as a file and as a directory") from error
    target.chmod(0o755 if member.mode & 0o100 else 0o644)
    return True


def _checked_path(member: tarfile.TarInfo) -> PurePosixPath:
    name, path = member.name, PurePosixPath(member.name)
    # `tar -C folder .` begins with the folder itself.
    if path.is_absolute() or ".." in path.parts or not (path.parts or member.isdir()):
        raise BadArchiveError(f"the name {_quote(name)} leads out of the directory")
    # A lone surrogate, which stands for a byte that is not UTF-8, is not printable.
    too_long = len(name) > _LONGEST_NAME or any(len(part.encode(errors="replace")) > 255 for part in path.parts)
    if too_long or not name.isprintable() or "\\" in name:
        raise BadArchiveError(f"the name {_quote(name)} cannot be unpacked everywhere")
    return path


def _kind(member: tarfile.TarInfo) -> str:
    if member.issym() or member.islnk():
        return f"a link to {_quote(member.linkname)}"
    kinds = {tarfile.CHRTYPE: "a device", tarfile.BLKTYPE: "a device", tarfile.FIFOTYPE: "a named pipe"}
    return kinds.get(member.type, "a sparse file" if member.issparse() else "of an unknown kind")


def _quote(name: str) -> str:
    return ascii(cut(name, _LONGEST_QUOTE))
