"""Packs a folder of code for `--code`: the same files give the same bytes, whoever packs them, when and where.

No file that a program may need is left out silently: what cannot be packed is an error that says what to do.
"""

import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tpu_training_operator.api.constants import LARGEST_CODE, LARGEST_CODE_ARCHIVE, MOST_CODE_FILES
from tpu_training_operator.cli.errors import CommandError
from tpu_training_operator.cli.ignore_files import IGNORE_FILES, IgnoreFile, is_ignored, parse_ignore_file

# Of no use on another machine.
_NEVER = {".git", ".hg", ".svn", "__pycache__"}
_ENVIRONMENT = "pyvenv.cfg"
_MOST_SHOWN = 5
_LONGEST_NAME, _LONGEST_PART = 1024, 255
_LEAVE_OUT = "leave it out with a line in .gitignore or .tpujobignore"


class CannotPack(CommandError):
    """The folder is too large, or holds something that workers would refuse."""


@dataclass(frozen=True)
class Packed:
    """`sizes`: of the files by their names, in the archive's order."""

    archive: bytes
    sizes: dict[str, int]

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.archive).hexdigest()

    def has_module(self, entrypoint: str) -> bool:
        top = entrypoint.partition(":")[0].partition(".")[0]
        return any(name == f"{top}.py" or name.startswith(f"{top}/") for name in self.sizes)


def pack(folder: Path) -> Packed:
    """Raises CannotPack, and OSError if a file cannot be read."""
    if not folder.is_dir():
        raise CannotPack(f"--code {folder}: {'not a folder' if folder.exists() else 'there is no such folder'}")
    sizes, total, problems = dict[str, int](), 0, list[str]()
    for name in _files(folder):
        if (problem := _problem(folder, name)) is not None:
            problems.append(f"--code {folder}: {name!a} {problem}; {_LEAVE_OUT}")
            continue
        sizes[name] = (folder / name).stat().st_size
        total += sizes[name]
        if len(sizes) > MOST_CODE_FILES or total > LARGEST_CODE:
            raise CannotPack(_too_large(folder, sizes, total))
    if problems:
        more = len(problems) - _MOST_SHOWN
        raise CannotPack("\n".join([*problems[:_MOST_SHOWN], *([f"and {more} more"] if more > 0 else [])]))
    if not sizes:
        raise CannotPack(f"--code {folder}: it has no files, or ignore files leave out all of them")
    packed = _packed(folder, sorted(sizes))
    if len(packed.archive) > LARGEST_CODE_ARCHIVE:
        raise CannotPack(
            f"--code {folder}: packed it has {size_text(len(packed.archive))}, and at most"
            f" {size_text(LARGEST_CODE_ARCHIVE)} are taken; {largest(packed.sizes)}"
        )
    return packed


def size_text(size: int) -> str:
    """12 bytes, 3.4 KiB, 5.6 MiB"""
    if size < 1024:
        return f"{size} bytes"
    return f"{size / 1024:.1f} KiB" if size < 1024**2 else f"{size / 1024**2:.1f} MiB"


def largest(sizes: dict[str, int]) -> str:
    """What somebody who has to make the folder smaller wants to know."""
    first = sorted(sizes, key=lambda name: (-sizes[name], name))[:_MOST_SHOWN]
    shown = ", ".join(f"{ascii(name)[1:-1]} {size_text(sizes[name])}" for name in first)
    return f"the largest files: {shown}; leave files out with lines in .gitignore or .tpujobignore"


def _too_large(folder: Path, sizes: dict[str, int], total: int) -> str:
    if len(sizes) > MOST_CODE_FILES:
        tops: dict[str, int] = {}
        for name in sizes:
            top = name.partition("/")[0]
            tops[top] = tops.get(top, 0) + 1
        most = sorted(tops, key=lambda top: (-tops[top], top))[:_MOST_SHOWN]
        shown = ", ".join(f"{ascii(top)[1:-1]} has {tops[top]}" for top in most)
        return (
            f"--code {folder}: it has more than {MOST_CODE_FILES} files; so far {shown}; leave files out with lines in"
            " .gitignore or .tpujobignore"
        )
    return (
        f"--code {folder}: its files have more than {size_text(LARGEST_CODE)}: {size_text(total)} so far; data belong"
        f" in data.uri; {largest(sizes)}"
    )


def _packed(folder: Path, names: list[str]) -> Packed:
    plain, sizes = io.BytesIO(), dict[str, int]()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            content = (folder / name).read_bytes()
            member = tarfile.TarInfo(name)
            member.size = sizes[name] = len(content)
            member.mode = 0o755 if os.access(folder / name, os.X_OK) else 0o644
            tar.addfile(member, io.BytesIO(content))
    archive = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=archive, mtime=0) as file:
        file.write(plain.getbuffer())
    return Packed(archive.getvalue(), sizes)


def _problem(folder: Path, name: str) -> str | None:
    """Why the file cannot be packed; None if it can."""
    too_long = len(name) > _LONGEST_NAME or any(
        len(part.encode(errors="replace")) > _LONGEST_PART for part in name.split("/")
    )
    if too_long or not name.isprintable() or "\\" in name:
        return "has a name that cannot be unpacked everywhere"
    if not (folder / name).is_symlink():
        return None if (folder / name).is_file() else "is neither a file nor a folder"
    try:
        target = (folder / name).resolve(strict=True)
    except (OSError, RuntimeError):
        # RuntimeError: Python before 3.13, for links in a circle.
        return "is a link to nothing"
    if not target.is_relative_to(folder.resolve()):
        return f"is a link to {target}, outside of the folder"
    return None if target.is_file() else "is a link to a folder; a link to a file is packed as that file"


def _files(folder: Path) -> Iterator[str]:
    """Everything below that is not a folder and not ignored, with names as in the archive. Links are not followed."""
    root = _repository(folder)
    prefix = "" if root == folder.resolve() else f"{folder.resolve().relative_to(root).as_posix()}/"
    above: list[IgnoreFile] = []
    parts = prefix.split("/")[:-1]
    if (root / ".git" / "info" / "exclude").is_file():
        above.append(_read(root / ".git" / "info" / "exclude", ""))
    for depth in range(len(parts)):
        above += _ignore_files(root.joinpath(*parts[:depth]), "".join(f"{part}/" for part in parts[:depth]))
    yield from _walk(folder, prefix, len(prefix), above)


def _walk(directory: Path, prefix: str, cut: int, above: list[IgnoreFile]) -> Iterator[str]:
    rules = [*above, *_ignore_files(directory, prefix)]
    with os.scandir(directory) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        path, is_directory = prefix + entry.name, entry.is_dir(follow_symlinks=False)
        if entry.name in _NEVER or is_ignored(rules, path, is_directory=is_directory):
            continue
        if not is_directory:
            yield path[cut:]
        elif not Path(entry.path, _ENVIRONMENT).exists():
            yield from _walk(Path(entry.path), f"{path}/", cut, rules)


def _repository(folder: Path) -> Path:
    """The top of the folder's git repository, whose ignore files count; else the folder itself."""
    here = folder.resolve()
    return next((place for place in (here, *here.parents) if (place / ".git").exists()), here)


def _ignore_files(directory: Path, prefix: str) -> list[IgnoreFile]:
    return [_read(directory / name, prefix) for name in IGNORE_FILES if (directory / name).is_file()]


def _read(path: Path, prefix: str) -> IgnoreFile:
    return parse_ignore_file(prefix, path.read_text(encoding="utf-8", errors="surrogateescape"))
