"""Applies .gitignore and .tpujobignore files by git's rules (gitignore(5)), as pathspec reads their lines.

Only the text of these files decides: unlike git, this does not know which ignored files are tracked.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pathspec.patterns.gitignore import GitIgnorePatternError
from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

# In the order in which they apply: the later file overrides.
GIT_IGNORE, OUR_IGNORE = ".gitignore", ".tpujobignore"

_MOST_STARS, _MOST_STARS_OF_NAME = 6, 3
"""pathspec's regular expressions try every way to divide a path among the stars of a line."""


class UnusableLine(ValueError):
    """A line that could take hours to match, or that pathspec reads differently than git."""


@dataclass(frozen=True)
class Pattern:
    """One line of an ignore file. `is_literal`: it has no wildcards."""

    expression: re.Pattern[str]
    keeps: bool
    is_literal: bool

    def applies(self, path: str, *, is_directory: bool) -> bool:
        """Returns whether the pattern matches `path` itself, which is relative to its file's directory. A match of a
        directory above it does not count."""
        # pathspec marks the end of the matched file or directory with a group, except in lines such as `src/**`.
        if not self.expression.groups:
            return self.expression.search(path) is not None
        path += "/" * is_directory
        return any(match.end() == len(path) for match in self.expression.finditer(path))


@dataclass(frozen=True)
class IgnoreFile:
    """A parsed file. `directory`: where it is, with a slash at the end unless it is empty. `is_ours`: it is a
    .tpujobignore."""

    directory: str
    patterns: tuple[Pattern, ...]
    is_ours: bool = False


def parse_ignore_file(directory: str, text: str, *, is_ours: bool = False) -> IgnoreFile:
    """Raises UnusableLine."""
    patterns = (_pattern(line.removesuffix("\r")) for line in text.removeprefix("\ufeff").split("\n"))
    return IgnoreFile(directory, tuple(pattern for pattern in patterns if pattern is not None), is_ours)


def is_ignored(files: Sequence[IgnoreFile], path: str, *, is_directory: bool) -> bool:
    """Returns whether the last pattern that matches the path leaves it out. `files`: the ignore files of all
    directories above it, the topmost first. The caller must not look into directories that are left out."""
    for file in reversed(files):
        below = path.removeprefix(file.directory)
        for pattern in reversed(file.patterns):
            if pattern.applies(below, is_directory=is_directory):
                return not pattern.keeps
    return False


def is_asked_for(files: Sequence[IgnoreFile], path: str, *, is_directory: bool) -> bool:
    """Returns whether a .tpujobignore names the path in a line such as `!.env`."""
    ours = ((path.removeprefix(file.directory), pattern) for file in files if file.is_ours for pattern in file.patterns)
    return any(
        pattern.keeps and pattern.is_literal and pattern.applies(below, is_directory=is_directory)
        for below, pattern in ours
    )


def _pattern(line: str) -> Pattern | None:
    # To git three stars are two, and two such directories are one.
    line = re.sub(r"(\*\*/)+", "**/", re.sub(r"\*{3,}", "**", line))
    stars = [len(re.findall(r"\*+", name)) for name in line.split("/")]
    if not line.startswith("#"):
        if sum(stars) > _MOST_STARS or max(stars) > _MOST_STARS_OF_NAME:
            most = f"{_MOST_STARS_OF_NAME} in a name and {_MOST_STARS} in all"
            raise UnusableLine(f"the line {line[:40]!a} has too many stars; write it with at most {most}")
        if "[:" in line:
            raise UnusableLine(f"the line {line[:40]!a} has a class of characters; write it as a range such as [a-z]")
    try:
        parsed = GitIgnoreSpecPattern(line)
    except (GitIgnorePatternError, re.error):
        # It can match nothing, as in git.
        return None
    if parsed.include is None or parsed.regex is None:
        return None
    return Pattern(parsed.regex, not parsed.include, not set("*?[") & set(line))
