"""Packs a folder of code for `--code`. The same files always give the same bytes.

No file that a program may need is left out silently: a file that cannot be packed is an error that says what to do.
"""

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tpu_contract.protocol import LARGEST_CODE, LARGEST_CODE_ARCHIVE, MOST_CODE_FILES
from tpu_training_operator.cli.code.ignore_files import (
    GIT_IGNORE,
    OUR_IGNORE,
    IgnoreFile,
    UnusableLine,
    is_asked_for,
    is_ignored,
    parse_ignore_file,
)
from tpu_training_operator.cli.code.secret_files import is_secret
from tpu_training_operator.cli.common.errors import CommandError

# Useless on another machine.
_NEVER = {".git", ".hg", ".svn", "__pycache__"}
_ENVIRONMENT = "pyvenv.cfg"
_MOST_SHOWN = 5
_LONGEST_NAME, _LONGEST_PART = 1024, 255
_LEAVE_OUT = "leave it out with a line in .gitignore or .tpujobignore"


class CannotPack(CommandError):
    """The folder is too large, or holds something that workers would refuse."""


@dataclass(frozen=True)
class PackedCode:
    """A packed folder. `sizes`: file sizes by name, in the archive's order. `secrets`: names of files that were
    left out because they look like secrets."""

    archive: bytes
    sizes: dict[str, int]
    secrets: tuple[str, ...] = ()

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.archive).hexdigest()

    def has_module(self, entrypoint: str) -> bool:
        top = entrypoint.partition(":")[0].partition(".")[0]
        return any(name == f"{top}.py" or name.startswith(f"{top}/") for name in self.sizes)


def pack(folder: Path) -> PackedCode:
    """Packs the folder. Raises CannotPack, and OSError if a file cannot be read."""
    if not folder.is_dir():
        raise CannotPack(f"--code {folder}: {'not a folder' if folder.exists() else 'there is no such folder'}")
    sizes, total, problems, secrets = dict[str, int](), 0, dict[str, str](), list[str]()
    for name, looks_secret in _files(folder):
        if looks_secret:
            secrets.append(name)
        elif (problem := _problem(folder, name)) is not None:
            problems[name] = problem
        else:
            sizes[name] = (folder / name).stat().st_size
            total += sizes[name]
            if len(sizes) > MOST_CODE_FILES or total > LARGEST_CODE:
                raise CannotPack(_too_large(folder, sizes, total))
    problems |= _links_to_omitted_files(folder, sizes)
    if problems:
        lines = [f"--code {folder}: {name!a} {problems[name]}; {_LEAVE_OUT}" for name in sorted(problems)]
        more = len(lines) - _MOST_SHOWN
        raise CannotPack("\n".join([*lines[:_MOST_SHOWN], *([f"and {more} more"] if more > 0 else [])]))
    if not sizes:
        raise CannotPack(f"--code {folder}: it has no files, or ignore files leave out all of them")
    packed = _build_archive(folder, sorted(sizes), tuple(sorted(secrets)))
    if len(packed.archive) > LARGEST_CODE_ARCHIVE:
        raise CannotPack(
            f"--code {folder}: the archive has {size_text(len(packed.archive))}, and the limit is"
            f" {size_text(LARGEST_CODE_ARCHIVE)}; {largest(packed.sizes)}"
        )
    return packed


def size_text(size: int) -> str:
    """Returns for example: 12 bytes, 3.4 KiB, 5.6 MiB."""
    if size < 1024:
        return f"{size} bytes"
    return f"{size / 1024:.1f} KiB" if size < 1024**2 else f"{size / 1024**2:.1f} MiB"


def largest(sizes: dict[str, int]) -> str:
    """Names the largest files, for a user who has to make the folder smaller."""
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


def _build_archive(folder: Path, names: list[str], secrets: tuple[str, ...]) -> PackedCode:
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
    return PackedCode(archive.getvalue(), sizes, secrets)


def _problem(folder: Path, name: str) -> str | None:
    """Returns why the file cannot be packed; None if it can."""
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


def _links_to_omitted_files(folder: Path, names: Collection[str]) -> dict[str, str]:
    """Returns a problem for each link whose target is left out, by its name. Packing the link would pack its target."""
    top = folder.resolve()
    targets = {name: (folder / name).resolve() for name in names if (folder / name).is_symlink()}
    return {
        name: f"is a link to {target}, which is left out"
        for name, target in targets.items()
        if target.relative_to(top).as_posix() not in names
    }


def _files(folder: Path) -> Iterator[tuple[str, bool]]:
    """Yields every file below that is not ignored, by its name in the archive, and whether it looks like a secret. A
    folder that looks like a secret is yielded, too. Links are not followed."""
    root = _repository(folder)
    prefix = "" if root == folder.resolve() else f"{folder.resolve().relative_to(root).as_posix()}/"
    above = [_read(path, "") for path in _global_ignore_files(root) if path.is_file()]
    parts = prefix.split("/")[:-1]
    if (root / ".git" / "info" / "exclude").is_file():
        above.append(_read(root / ".git" / "info" / "exclude", ""))
    for depth in range(len(parts)):
        above += _ignore_files(root.joinpath(*parts[:depth]), "".join(f"{part}/" for part in parts[:depth]))
    yield from _walk(folder, prefix, above)


def _walk(folder: Path, above_folder: str, rules_above: list[IgnoreFile]) -> Iterator[tuple[str, bool]]:
    """Yields as `_files`. `above_folder`: the folder's path in its repository, with a slash at the end unless empty."""
    waiting = [(folder, above_folder, rules_above)]
    while waiting:
        directory, prefix, above = waiting.pop()
        rules = [*above, *_ignore_files(directory, prefix)]
        with os.scandir(directory) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
        for entry in entries:
            path, is_directory = prefix + entry.name, entry.is_dir(follow_symlinks=False)
            name = path.removeprefix(above_folder)
            if entry.name in _NEVER or is_ignored(rules, path, is_directory=is_directory):
                continue
            if is_secret(path, is_directory=is_directory) and not is_asked_for(rules, path, is_directory=is_directory):
                yield f"{name}/" if is_directory else name, True
            elif not is_directory or len(name) > _LONGEST_NAME:
                yield name, False
            elif not Path(entry.path, _ENVIRONMENT).exists():
                waiting.append((Path(entry.path), f"{path}/", rules))


def _global_ignore_files(root: Path) -> list[Path]:
    """Returns the path of the user's ignore file for all repositories."""
    if git := shutil.which("git"):
        answer = subprocess.run(  # noqa: S603 - a question to git about its settings
            [git, "config", "--type=path", "--get", "core.excludesFile"],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
        if answer.returncode == 0 and answer.stdout.strip():
            return [root / answer.stdout.strip()]
    settings = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return [Path(settings).expanduser() / "git" / "ignore"]


def _repository(folder: Path) -> Path:
    """Returns the top of the folder's git repository, whose ignore files count; else the folder itself."""
    here = folder.resolve()
    return next((place for place in (here, *here.parents) if (place / ".git").exists()), here)


def _ignore_files(directory: Path, prefix: str) -> list[IgnoreFile]:
    return [_read(directory / name, prefix) for name in (GIT_IGNORE, OUR_IGNORE) if (directory / name).is_file()]


def _read(path: Path, prefix: str) -> IgnoreFile:
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    try:
        return parse_ignore_file(prefix, text, is_ours=path.name == OUR_IGNORE)
    except UnusableLine as error:
        raise CannotPack(f"{path}: {error}") from error
