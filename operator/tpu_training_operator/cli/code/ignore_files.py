"""Applies .gitignore and .tpujobignore files by git's rules (gitignore(5)).

Only the text of these files decides: unlike git, this does not know which ignored files are tracked.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

# In the order in which they apply: the later file overrides.
GIT_IGNORE, OUR_IGNORE = ".gitignore", ".tpujobignore"

_STAR, _FOLDERS, _ALL = "[^/]*", "(?:.*/)?", ".*"
_WILDCARDS = frozenset("*?[")
_CLASSES = {
    "alnum": "a-zA-Z0-9",
    "alpha": "a-zA-Z",
    "blank": " \\t",
    "digit": "0-9",
    "lower": "a-z",
    "space": r"\s",
    "upper": "A-Z",
    "xdigit": "0-9a-fA-F",
}


@dataclass(frozen=True)
class Pattern:
    """One line of an ignore file. `is_anchored`: it matches paths below its file's directory; otherwise it matches
    names in any directory below. `is_literal`: it has no wildcards."""

    matches: re.Pattern[str]
    is_anchored: bool
    keeps: bool
    only_directories: bool
    is_literal: bool

    def applies(self, path: str, *, is_directory: bool) -> bool:
        """Whether the pattern matches `path`, which is relative to its file's directory."""
        if self.only_directories and not is_directory:
            return False
        return self.matches.fullmatch(path if self.is_anchored else path.rpartition("/")[2]) is not None


@dataclass(frozen=True)
class IgnoreFile:
    """A parsed file. `directory`: where it is, with a slash at the end unless it is empty. `is_ours`: it is a
    .tpujobignore."""

    directory: str
    patterns: tuple[Pattern, ...]
    is_ours: bool = False


def parse_ignore_file(directory: str, text: str, *, is_ours: bool = False) -> IgnoreFile:
    patterns = (_pattern(line.removesuffix("\r")) for line in text.removeprefix("\ufeff").split("\n"))
    return IgnoreFile(directory, tuple(pattern for pattern in patterns if pattern is not None), is_ours)


def is_ignored(files: Sequence[IgnoreFile], path: str, *, is_directory: bool) -> bool:
    """Whether the last pattern that matches the path leaves it out. `files`: the ignore files of all directories above
    it, the topmost first. The caller must not look into directories that are left out."""
    for file in reversed(files):
        below = path.removeprefix(file.directory)
        for pattern in reversed(file.patterns):
            if pattern.applies(below, is_directory=is_directory):
                return not pattern.keeps
    return False


def is_asked_for(files: Sequence[IgnoreFile], path: str, *, is_directory: bool) -> bool:
    """Whether a .tpujobignore names the path in a line such as `!.env`."""
    ours = ((path.removeprefix(file.directory), pattern) for file in files if file.is_ours for pattern in file.patterns)
    return any(
        pattern.keeps and pattern.is_literal and pattern.applies(below, is_directory=is_directory)
        for below, pattern in ours
    )


def _pattern(line: str) -> Pattern | None:
    text = _without_trailing_spaces(line)
    if not text or text.startswith("#"):
        return None
    keeps = text.startswith("!")
    text = text.removeprefix("!") if keeps else text
    only_directories = text.endswith("/")
    text = text.removesuffix("/")
    is_anchored = "/" in text
    expression = _expression(text.removeprefix("/"), is_anchored)
    if not text or expression is None:
        return None
    is_literal = not _WILDCARDS & set(text)
    return Pattern(re.compile(expression, re.DOTALL), is_anchored, keeps, only_directories, is_literal)


def _without_trailing_spaces(line: str) -> str:
    stripped = line.rstrip(" ")
    backslashes = len(stripped) - len(stripped.rstrip("\\"))
    # "\ " at the end is a space that counts.
    return f"{stripped} " if backslashes % 2 and stripped != line else stripped


def _expression(glob: str, is_anchored: bool) -> str | None:
    """Translates the pattern into a regular expression; None if it can match nothing."""
    parts: list[str] = []
    at = 0
    while at < len(glob):
        character = glob[at]
        if character == "*":
            end = at + len(glob[at:]) - len(glob[at:].lstrip("*"))
            alone = (at == 0 or glob[at - 1] == "/") and glob[end : end + 1] in ("", "/")
            if is_anchored and end - at > 1 and alone:
                across = _FOLDERS if glob[end : end + 1] else _ALL
                parts += [] if across == _FOLDERS and parts[-1:] == [_FOLDERS] else [across]
                at = end + 1
                continue
            parts.append(_STAR)
            at = end
            continue
        if character == "[":
            bracket, end = _bracket(glob, at)
            if bracket is None:
                return None
            parts.append(bracket)
            at = end
            continue
        if character == "\\":
            at += 1
            if at == len(glob):
                return None
            character = glob[at]
            parts.append(re.escape(character))
        else:
            parts.append("[^/]" if character == "?" else re.escape(character))
        at += 1
    within_names = _first_fits(parts, _STAR, "[^/]*?", ends=("/", _FOLDERS, _ALL))
    return "".join(_first_fits(within_names, _FOLDERS, "(?:[^/]*/)*?", ends=(_ALL,)))


def _first_fits(parts: Sequence[str], wildcard: str, shortest: str, ends: Sequence[str]) -> list[str]:
    """Returns the parts of the expression without backtracking into a wildcard that another one follows before one of
    `ends`: such a wildcard takes the first match, and the later one takes the rest. With a dozen wildcards,
    backtracking would not end."""
    fitted: list[str] = []
    at = 0
    while at < len(parts):
        part, at = parts[at], at + 1
        if part == wildcard:
            following = next((index for index in range(at, len(parts)) if parts[index] in (wildcard, *ends)), None)
            if following is not None and parts[following] == wildcard:
                part, at = f"(?>{shortest}{''.join(parts[at:following])})", following
        fitted.append(part)
    return fitted


def _bracket(glob: str, start: int) -> tuple[str | None, int]:
    """Returns the expression for `[...]`, and where it ends; None if the bracket never closes."""
    at = start + 1
    negated = glob[at : at + 1] in ("!", "^") and at < len(glob)
    at += negated
    members, first = "", True
    while at < len(glob) and (first or glob[at] != "]"):
        first = False
        if glob.startswith("[:", at) and (end := glob.find(":]", at)) > 0:
            if (kind := _CLASSES.get(glob[at + 2 : end])) is None:
                return None, at
            members, at = members + kind, end + 2
            continue
        low, at = _member(glob, at)
        if low is None:
            return None, at
        if glob[at : at + 1] == "-" and glob[at + 1 : at + 2] not in ("", "]"):
            high, at = _member(glob, at + 1)
            if high is None:
                return None, at
            if low <= high:
                members += f"{re.escape(low)}-{re.escape(high)}"
            continue
        members += re.escape(low)
    if at >= len(glob):
        return None, at
    # An empty range matches nothing.
    expression = f"(?!/)[{'^' if negated else ''}{members}]" if members else "[^/]" if negated else "(?!)"
    return expression, at + 1


def _member(glob: str, at: int) -> tuple[str | None, int]:
    if glob[at] == "\\":
        at += 1
    return (glob[at], at + 1) if at < len(glob) else (None, at)
