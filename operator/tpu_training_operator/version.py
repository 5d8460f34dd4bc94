"""The version: that of a release, or between releases that of the next one with the commit, such as
0.2.0.dev0+g1234abc.

Needs Python alone, because setuptools asks for it in an empty environment. As a script it prints the version for make;
with --tag, the tag of the images and the version of the chart.
"""

import importlib.metadata
import subprocess
import sys
from functools import cache
from pathlib import Path

DECLARED = "0.2.0.dev0"
"""A release has no `.dev0`. The build of an image, and of a release, writes the commit here, too."""

_TREE = Path(__file__).parents[2]


@cache
def version() -> str:
    """Returns the version of this package, wherever it lies: in a clone, in an environment, in an image."""
    if (_TREE / "pyproject.toml").is_file():
        return of_tree(_TREE)
    try:
        return importlib.metadata.version("tpu-training-operator")
    except importlib.metadata.PackageNotFoundError:
        return DECLARED


def of_tree(tree: Path) -> str:
    """Returns the version of a source tree. Without git it is what the tree declares."""
    if not (tree / ".git").exists():
        return DECLARED
    # No tag counts: a commit is a release because it declares that.
    asked = ["git", "-C", str(tree), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=.dirty"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=False)  # noqa: S603 - a question to git
    except OSError:
        return DECLARED
    commit, dirty, _ = done.stdout.strip().partition(".dirty")
    if done.returncode != 0 or (".dev" not in DECLARED and not dirty):
        return DECLARED
    return f"{DECLARED}+g{commit[:7]}{dirty}"


def tag(version: str) -> str:
    """Returns the version as SemVer without `+`, which the tag of an image must not have: 0.2.0-dev.0.g1234abc."""
    release, dev, commit = version.replace(".dev", "-dev.").partition("+")
    return release + ("." if "-dev." in release else "-") * bool(dev) + commit


if __name__ == "__main__":
    print(tag(version()) if sys.argv[1:] == ["--tag"] else version())
