"""JSON of the API server, by orjson, which is several times as fast as the standard library.

What orjson refuses goes to the more lenient standard library: a lone surrogate or a NaN, which some proxy or aggregated
API let through, must not make a page of objects unreadable. Three differences remain. An integer of more than 64 bits
becomes a float, a number too large for that is refused or infinite, and a NaN or an infinity is sent as null, because
JSON has neither.

The API server accepts values that are nested ten thousand levels deep, and Python's parsers about one thousand. One
such object must not make the others unreadable either, so a text replaces what is nested too deeply.
"""

import json
import re
from typing import Any

import orjson

_DEEPEST = 200
_TOO_DEEP = b'"nested too deeply to be read"'
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)


def decode(text: bytes | bytearray) -> Any:
    """Parses JSON. Raises ValueError if it is none."""
    try:
        return orjson.loads(text)
    except ValueError:
        try:
            return json.loads(text)
        except RecursionError:
            return json.loads(_prune(text))


def _prune(text: bytes | bytearray) -> bytes:
    """Returns the text without values that are nested more than _DEEPEST levels deep."""
    result, begin, depth = bytearray(), 0, 0
    for token in _STRING_OR_BRACKET.finditer(text):
        bracket = token[0]
        if bracket in (b"[", b"{"):
            if depth == _DEEPEST:
                result += text[begin : token.start()] + _TOO_DEEP
            depth += 1
        elif bracket in (b"]", b"}"):
            depth -= 1
            if depth == _DEEPEST:
                begin = token.end()
    if depth > _DEEPEST:
        raise ValueError("cut off within a value that is nested too deeply")
    return bytes(result + text[begin:])


def encode(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value).encode()
