"""JSON by orjson, and what happens to texts and values that it refuses."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_training_operator.kube.encoding import decode, encode


def is_refused(text: bytes) -> bool:
    try:
        decode(text)
    except ValueError:
        return True
    return False


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(_VALUES.filter(lambda value: not _has_infinity(value)))
def test_what_is_sent_can_be_read(value: Any) -> None:
    assert decode(encode(value)) == value


@given(st.binary())
def test_a_text_is_read_as_the_standard_library_reads_it_or_refused(text: bytes) -> None:
    try:
        expected = json.loads(text)
    except ValueError:
        assert is_refused(text)
    else:
        assert decode(text) == expected or math.isnan(expected)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b"18446744073709551615", 2**64 - 1),
        (b"18446744073709551616", float(2**64)),
        (b"-9223372036854775809", -float(2**63)),
        (b"1e400", math.inf),
        (b"Infinity", math.inf),
        (rb'"\ud800"', "\ud800"),
        (b'"\xed\xa0\x80"', "\ud800"),
        (b'\xef\xbb\xbf"text"', "text"),
        (rb'"\u0000"', "\0"),
        (b'{"a": 1, "a": 2}', {"a": 2}),
    ],
)
def test_a_hostile_text_is_read(text: bytes, value: object) -> None:
    assert decode(text) == value
    assert decode(bytearray(text)) == value


@pytest.mark.parametrize(
    "text",
    [b"", b"\xff", b'"\xff"', b"{", b'{"a": 1} {}', b"9" * 5000, b'{"a":' * 5000],
    ids=["nothing", "no UTF-8", "no UTF-8 in a string", "cut off", "two", "too many digits", "cut off in the deep"],
)
def test_a_text_that_cannot_be_read_is_refused(text: bytes) -> None:
    assert is_refused(text)


@pytest.mark.parametrize("depth", [1100, 10_000, 100_000])
@pytest.mark.parametrize(("opens", "closes"), [(b"[", b"]"), (b'{"a]\\"[":', b"}")], ids=["lists", "maps"])
def test_an_object_that_is_nested_too_deeply_does_not_hide_the_others(opens: bytes, closes: bytes, depth: int) -> None:
    deep = opens * depth + b"1" + closes * depth
    found = decode(b'{"items": [{"name": "first [["}, ' + deep + b', {"name": "last }"}]}')["items"]
    assert (found[0], found[2]) == ({"name": "first [["}, {"name": "last }"})
    assert "nested too deeply to be read" in json.dumps(found[1])


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    "value", ["\ud800", 2**64, nested(300), {1: 2}], ids=["a surrogate", "a large number", "deep", "a number as key"]
)
def test_what_orjson_does_not_send_is_sent_as_before(value: object) -> None:
    assert encode({"key": value}) == json.dumps({"key": value}).encode()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_json_does_not_know_is_sent_as_null(value: float) -> None:
    assert encode([value]) == b"[null]"


def _has_infinity(value: Any) -> bool:
    if isinstance(value, float):
        return math.isinf(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(_has_infinity(one) for one in inner)
