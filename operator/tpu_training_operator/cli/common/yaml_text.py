"""Reads YAML as kubectl does. The text is not trusted: it is refused before parsing if its aliases would expand to more
than an API server takes."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tpu_training_operator.api.validation import Problem
from tpu_training_operator.cli.common.errors import BadInput

_LARGEST_FILE = 16 * 1024**2
# An API server takes 3 MiB.
_LARGEST_DOCUMENT = 3 * 1024**2
# No Kubernetes object is nested as deeply. libyaml crashes the process at about ten thousand levels.
_DEEPEST = 200
# libyaml, if present, reads the same documents ten times faster.
_SafeLoader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Numbers as kubectl reads them; PyYAML reads 1e-3 as text, because YAML 1.1 requires a dot and a sign.
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
# kubectl reads 1:30 as text. PyYAML follows YAML 1.1 and reads a number in base 60, which takes minutes if it is long.
_NO_NUMBER = re.compile(r"[-+]?[0-9][0-9_]*(:[0-9]+)+(\.[0-9_]*)?$|[-+]?0[bx]_*$")


class _Loader(_SafeLoader):  # type: ignore[misc]
    """Accepts what kubectl accepts, and refuses a key that is given twice, as kubectl does."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._checked: set[int] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Refuses repeated keys. PyYAML calls this before it makes a mapping, and again for each one that merges it."""
        if id(node) not in self._checked:
            self._checked.add(id(node))
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
                seen.add(key.value if isinstance(key, yaml.ScalarNode) else "")
        super().flatten_mapping(node)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
for _first in "-+0123456789":
    # PyYAML takes the first resolver that matches.
    _Loader.yaml_implicit_resolvers[_first].insert(0, ("tag:yaml.org,2002:str", _NO_NUMBER))


def read_text(path: Path) -> str:
    """Reads the file, or standard input for `-`. Raises BadInput."""
    try:
        if path == Path("-"):
            text = sys.stdin.read(_LARGEST_FILE + 1)
        else:
            with path.open(encoding="utf-8") as file:
                text = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise BadInput(path, [Problem("", (error.strerror or str(error)).lower())]) from None
    except UnicodeDecodeError as error:
        problem = f"not a UTF-8 text file, from byte {error.start + 1} on; save it as UTF-8"
        raise BadInput(path, [Problem("", problem)]) from None
    if len(text) > _LARGEST_FILE:
        raise BadInput(path, [Problem("", f"has more than {_LARGEST_FILE} characters")])
    return text


def load(text: str) -> Any:
    """Parses the only document. Raises yaml.YAMLError, and ValueError for an impossible number or date."""
    _check(text)
    return yaml.load(text, _Loader)  # noqa: S506 - a safe loader


def load_all(text: str) -> Iterator[Any]:
    """Parses all documents. Raises as `load` does."""
    _check(text)
    yield from yaml.load_all(text, _Loader)


def _check(text: str) -> None:
    """Raises ConstructorError if the text is too deep, too large with all aliases followed, or contains itself."""
    known: dict[str, int] = {}
    open_: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, _SafeLoader):
        anchor: str | None = getattr(event, "anchor", None)
        if isinstance(event, yaml.DocumentStartEvent):
            known, open_ = {}, [(None, 0)]
        elif isinstance(event, yaml.CollectionStartEvent):
            known.pop(anchor or "", None)
            open_.append((anchor, 1))
            if len(open_) > _DEEPEST:
                raise _refusal(event, f"nested more than {_DEEPEST} levels deep")
        elif isinstance(event, yaml.ScalarEvent | yaml.AliasEvent | yaml.CollectionEndEvent):
            if isinstance(event, yaml.AliasEvent):
                # An unknown anchor is either still open, or the composer refuses it.
                if anchor in (name for name, _ in open_) and anchor not in known:
                    raise _refusal(event, f"*{anchor} contains itself")
                size = known.get(anchor or "", 0)
            elif isinstance(event, yaml.ScalarEvent):
                size = 1 + len(event.value)
            else:
                anchor, size = open_.pop()
            if anchor is not None:
                known[anchor] = size
            above, sum_ = open_[-1]
            open_[-1] = above, sum_ + size
            if sum_ + size > _LARGEST_DOCUMENT:
                raise _refusal(event, f"has more than {_LARGEST_DOCUMENT} characters with all aliases followed")


def _refusal(event: Any, problem: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, event.start_mark)


# What libyaml says, in the order in which it is looked for, and what is usually wrong.
_CAUSES = {
    "tab": "indent with spaces",
    "unhashable": "{{ ... }} is for a program that fills templates in, such as helm template",
    "expected ':'": "the line, or the one before, has no ': ' (a colon and a space) after its name, or a quote is open",
    "mapping values": "put text with ': ' into quotes, and begin the fields of one level in the same column",
    "expected key": "begin the fields of one level in the same column, and close quotes and brackets",
    "expected ','": "close the bracket, or put text with brackets into quotes",
    "end of stream": "close the quote or the bracket",
    "alias": "put text that begins with * into quotes",
    "constructor": "put text that begins with ! into quotes",
    "start any token": "put text that begins with this character into quotes",
}


def explain(error: yaml.MarkedYAMLError, text: str) -> str:
    """Says what is wrong with the text and where, and how to mend it."""
    mark, problem = error.problem_mark, str(error.problem)
    if mark is None:
        return f"not valid YAML: {problem}"
    line = (text.splitlines() or [""])[min(mark.line, text.count("\n") - 1)]
    if "\t" in line[: mark.column + 1]:
        problem = "a tab"
    elif "\xa0" in text:
        problem = "a no-break space, which only looks like a space"
    cause = next((f"; {cause}" for words, cause in _CAUSES.items() if words in problem), "")
    return f"line {mark.line + 1}, column {mark.column + 1}: not valid YAML: {problem}{cause}"
