"""What a release is made from: the tracked files of one commit, and that commit's time.

Whatever else lies in the working tree must not get into an artifact, so everything is made from a copy.
"""

import os
import re
import runpy
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from release.errors import ReleaseError

CHART = Path("charts") / "tpu-training-operator"
_VERSION = Path("operator") / "tpu_training_operator" / "version.py"


@dataclass(frozen=True)
class Source:
    """A copy of the tracked files. tree: the copy. tag: the version as charts and images have it. epoch: the time that
    every artifact bears, in seconds. changed: whether it differs from the commit."""

    tree: Path
    version: str
    tag: str
    commit: str
    epoch: int
    changed: bool

    def read(self, path: str | Path) -> str:
        return (self.tree / path).read_text(encoding="utf-8")

    def tracked(self, folder: Path) -> list[Path]:
        """Returns the files below a folder of the tree, sorted, relative to it."""
        root = self.tree / folder
        return sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file())


def copy(repository: Path, into: Path, *, allow_changes: bool) -> Source:
    """Copies the tracked files as they are now. Raises ReleaseError."""
    commit = _git(repository, "rev-parse", "HEAD").strip()
    changes = _git(repository, "status", "--porcelain", "--untracked-files=no").splitlines()
    if changes and not allow_changes:
        some = "\n".join(changes[:10])
        raise ReleaseError(
            f"the working tree is not the commit {commit[:12]}:\n{some}\n"
            "commit the changes, or say CHANGES=allowed to try a release out"
        )
    for entry in _git(repository, "ls-files", "--stage", "-z").split("\0"):
        if entry:
            attributes, _, name = entry.partition("\t")
            _copy_file(repository, into, Path(name), mode=0o755 if attributes.startswith("100755") else 0o644)
    epoch = _epoch(repository)
    versions = runpy.run_path(str(into / _VERSION))
    version = versions["of_tree"](repository)
    tag = versions["tag"](version)
    # The copy has no git to ask.
    _replace(into / _VERSION, "DECLARED = .*", f'DECLARED = "{version}"')
    _replace(into / CHART / "Chart.yaml", "(version|appVersion): .*", rf"\1: {tag}")
    return Source(into, version, tag, commit, epoch, bool(changes))


def _replace(file: Path, line: str, by: str) -> None:
    text = file.read_text(encoding="utf-8")
    file.write_text(re.sub(f"^{line}$", by, text, flags=re.MULTILINE), encoding="utf-8")


def _copy_file(repository: Path, into: Path, name: Path, mode: int) -> None:
    """Copies with git's own two modes: the umask of the clone would get into the archives."""
    target = into / name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(repository / name, target, follow_symlinks=False)
        target.chmod(mode)
    except FileNotFoundError as error:
        raise ReleaseError(f"{name}: git tracks this file, and it is not there; restore it or commit that") from error


def _epoch(repository: Path) -> int:
    """Returns SOURCE_DATE_EPOCH as the reproducible-builds specification has it, else the time of the commit."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    text = _git(repository, "log", "-1", "--format=%ct").strip() if given is None else given
    # A wheel is a zip file, whose times begin in 1980 and end in 2107.
    if not re.fullmatch(r"\d{1,10}", text) or not 315532800 <= int(text) < 4354819200:
        raise ReleaseError(f"SOURCE_DATE_EPOCH: {text!r} is no time from 1980 to 2107 in seconds, such as 1767225600")
    return int(text)


def _git(repository: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ReleaseError("`git` is not on PATH; a release is made from a git clone") from error
    if done.returncode != 0:
        raise ReleaseError(f"git {arguments[0]} in {repository}: {done.stderr.strip()}")
    return done.stdout
