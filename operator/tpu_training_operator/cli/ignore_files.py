"""What .gitignore and .tpujobignore files leave out, by git's rules (gitignore(5)).

Only the text of these files decides: unlike git, this does not know which ignored files are tracked all the same.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

IGNORE_FILES = (".gitignore", ".tpujobignore")
"""In the order in which they apply: the later one has the last word."""

_STAR, _ACROSS = "[^/]*", ("(?:.*/)?", ".*")
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
    """`whole`: it matches paths from its file's directory on; otherwise names in any directory below."""

    matches: re.Pattern[str]
    whole: bool
    keeps: bool
    only_directories: bool


@dataclass(frozen=True)
class IgnoreFile:
    """`directory`: where it lies, with a slash at the end unless it is empty."""

    directory: str
    patterns: tuple[Pattern, ...]


def parse_ignore_file(directory: str, text: str) -> IgnoreFile:
    found = (_pattern(line.removesuffix("\r")) for line in text.removeprefix("\ufeff").split("\n"))
    return IgnoreFile(directory, tuple(pattern for pattern in found if pattern is not None))


def is_ignored(files: Sequence[IgnoreFile], path: str, *, is_directory: bool) -> bool:
    """Whether the path is left out, by the last pattern that matches it. `files`: those of all directories above it,
    the topmost first. The caller does not look into directories that are left out."""
    name = path.rpartition("/")[2]
    for file in reversed(files):
        below = path.removeprefix(file.directory)
        for pattern in reversed(file.patterns):
            if pattern.only_directories and not is_directory:
                continue
            if pattern.matches.fullmatch(below if pattern.whole else name):
                return not pattern.keeps
    return False


def _pattern(line: str) -> Pattern | None:
    text = _without_trailing_spaces(line)
    if not text or text.startswith("#"):
        return None
    keeps = text.startswith("!")
    text = text.removeprefix("!") if keeps else text
    only_directories = text.endswith("/")
    text = text.removesuffix("/")
    whole = "/" in text
    expression = _expression(text.removeprefix("/"), whole)
    if not text or expression is None:
        return None
    return Pattern(re.compile(expression, re.DOTALL), whole, keeps, only_directories)


def _without_trailing_spaces(line: str) -> str:
    stripped = line.rstrip(" ")
    backslashes = len(stripped) - len(stripped.rstrip("\\"))
    # "\ " at the end is a space that counts.
    return f"{stripped} " if backslashes % 2 and stripped != line else stripped


def _expression(glob: str, whole: bool) -> str | None:
    """As a regular expression; None if the pattern is one that matches nothing."""
    parts: list[str] = []
    at = 0
    while at < len(glob):
        character = glob[at]
        if character == "*":
            end = at + len(glob[at:]) - len(glob[at:].lstrip("*"))
            alone = (at == 0 or glob[at - 1] == "/") and glob[end : end + 1] in ("", "/")
            if whole and end - at > 1 and alone:
                parts.append(_ACROSS[0] if glob[end : end + 1] else _ACROSS[1])
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
    return "".join(_linear(parts))


def _linear(parts: Sequence[str]) -> Iterator[str]:
    """A star that another one follows in the same name takes the first place that fits: the later one can have the
    rest. Trying all places would take forever for a pattern with a dozen stars."""
    stops = [index for index, part in enumerate(parts) if part in (_STAR, "/", *_ACROSS)]
    at = 0
    while at < len(parts):
        following = next((stop for stop in stops if stop > at), None)
        if parts[at] == _STAR and following is not None and parts[following] == _STAR:
            yield f"(?>[^/]*?{''.join(parts[at + 1 : following])})"
            at = following
        else:
            yield parts[at]
            at += 1


def _bracket(glob: str, start: int) -> tuple[str | None, int]:
    """The expression of `[...]`, and where it ends; None if it never does."""
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
