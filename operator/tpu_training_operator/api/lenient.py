"""Reads what can be read of a status that another version of the operator has written.

Models drop unknown fields, and each field decides what an unknown word means. This module cuts texts and lists that are
longer than this version allows. A field of another type is left out, and so is the smallest part that lacks a field
which this version needs.
"""

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

T = TypeVar("T")

# Each round removes what the validation rejected, and a part that has lost a field may be rejected in the next round.
_MOST_ROUNDS = 16


def read_leniently(model: TypeAdapter[T], body: Any) -> T:
    rest = body if isinstance(body, dict) else {}
    for _ in range(_MOST_ROUNDS):
        try:
            return model.validate_python(rest)
        except ValidationError as error:
            rest = copy.deepcopy(rest)
            # From the back, so that earlier positions in a list stay valid.
            for problem in reversed(error.errors(include_url=False)):
                _leave_out(rest, problem)
    return model.validate_python({name: part for name, part in rest.items() if _is_readable(model, {name: part})})


def _is_readable(model: TypeAdapter[Any], body: Mapping[str, Any]) -> bool:
    try:
        model.validate_python(body)
    except ValidationError:
        return False
    return True


def _leave_out(body: dict[str, Any], problem: ErrorDetails) -> None:
    """Cuts or removes the part that the problem is about; if a field is missing, the part that lacks it."""
    path = problem["loc"]
    place: Any = body
    inside: list[tuple[Any, int | str]] = []
    for step in path:
        if not _is_in(step, place):
            break
        inside.append((place, step))
        place = place[step]
    # Another problem has already removed the part.
    if not inside or len(inside) < len(path) - 1:
        return
    above, last = inside[-1]
    most = problem.get("ctx", {}).get("max_length")
    if len(inside) == len(path) and isinstance(most, int) and isinstance(above[last], str | list):
        above[last] = above[last][:most]
    else:
        del above[last]


def _is_in(step: int | str, place: Any) -> bool:
    if isinstance(place, dict):
        return step in place
    return isinstance(place, list) and isinstance(step, int) and step < len(place)
