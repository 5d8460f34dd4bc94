"""Reads typed values out of parsed JSON and names the field when one is wrong. Used by `spec.parser` only.

Every error says where (the field's path), what would be right and what was found.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tpu_trainer.errors import BadSpecError

# The same pattern as in runspec-v1.schema.json. ASCII digits only: \d would also take other scripts' digits.
_DECIMAL = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


class Fields:
    """One JSON object and the path that leads to it ("" for the document)."""

    def __init__(self, value: object, path: str, known: Sequence[str]) -> None:
        if not isinstance(value, Mapping):
            raise BadSpecError(f"{path or 'the document'}: expected an object, got {_short(value)}")
        self._values: Mapping[str, Any] = value
        self._path = path
        for name in value:
            if name not in known:
                raise BadSpecError(f"{self.at(str(name))}: unknown field; known here: {', '.join(known)}")

    def at(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def has(self, name: str) -> bool:
        return name in self._values

    def child(self, name: str, known: Sequence[str]) -> Fields:
        return Fields(self._required(name), self.at(name), known)

    def children(self, name: str, known: Sequence[str], most: int) -> list[Fields]:
        value = self._required(name)
        if not isinstance(value, list) or len(value) > most or not all(isinstance(one, Mapping) for one in value):
            raise self.wrong(name, f"a list of at most {most} objects")
        return [Fields(one, f"{self.at(name)}[{place}]", known) for place, one in enumerate(value)]

    def text(self, name: str) -> str:
        value = self._required(name)
        if not isinstance(value, str) or not value:
            raise self.wrong(name, "a non-empty string")
        return value

    def words(self, name: str, longest: int) -> str:
        """Text for people, which may be empty."""
        value = self._required(name)
        if not isinstance(value, str) or len(value) > longest:
            raise self.wrong(name, f"a string of at most {longest} characters")
        return value

    def choice(self, name: str, allowed: Sequence[str]) -> str:
        value = self._required(name)
        if value not in allowed:
            raise self.wrong(name, " or ".join(f'"{one}"' for one in allowed))
        return str(value)

    def integer(self, name: str, minimum: int, maximum: float = math.inf) -> int:
        value = self._required(name)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            upper = "" if maximum == math.inf else f" and at most {maximum}"
            raise self.wrong(name, f"an integer of at least {minimum}{upper}")
        return value

    def integers(self, name: str, minimum: int) -> tuple[int, ...]:
        value = self._required(name)
        whole = isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
        if not whole or any(one < minimum for one in value):
            raise self.wrong(name, f"a list of integers of at least {minimum}")
        return tuple(value)

    def flag(self, name: str) -> bool:
        value = self._required(name)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def decimal(self, name: str) -> float:
        """A non-negative real number written as a string, as Kubernetes objects carry them."""
        value = self._required(name)
        if not isinstance(value, str) or not _DECIMAL.fullmatch(value) or math.isinf(float(value)):
            raise self.wrong(name, 'a decimal string such as "0.1" or "1e-4"')
        return float(value)

    def strings(self, name: str) -> dict[str, str]:
        value = self._required(name)
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object of strings")
        for key, entry in value.items():
            if not isinstance(entry, str):
                raise BadSpecError(f"{self.at(name)}.{key}: expected a string, got {_short(entry)}")
        return dict(value)

    def wrong(self, name: str, expected: str) -> BadSpecError:
        return BadSpecError(f"{self.at(name)}: expected {expected}, got {_short(self._values[name])}")

    def _required(self, name: str) -> Any:
        if name not in self._values:
            raise BadSpecError(f"{self.at(name)}: missing")
        return self._values[name]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
