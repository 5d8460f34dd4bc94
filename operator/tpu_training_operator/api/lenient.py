"""Reads what can be read of a status that another version of the operator has written.

Unknown fields are no trouble, and for unknown words each field has an answer of its own. What remains are texts and
lists that are longer than this version allows, fields of another type, and fields that it needs and the other version
no longer writes. The first are cut; the others are left out with the smallest part that can be without them.
"""

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

T = TypeVar("T")

# Each round removes what the last one complained of, and a part that lost a field may be complained of next.
_MOST_ROUNDS = 16


def read_what_can_be(model: TypeAdapter[T], body: Any) -> T:
    given = body if isinstance(body, dict) else {}
    for _ in range(_MOST_ROUNDS):
        try:
            return model.validate_python(given)
        except ValidationError as error:
            given = copy.deepcopy(given)
            # From the back, so that the earlier positions in a list stay what they are.
            for problem in reversed(error.errors(include_url=False)):
                _leave_out(given, problem)
    return model.validate_python({name: part for name, part in given.items() if _is_readable(model, {name: part})})


def _is_readable(model: TypeAdapter[Any], body: Mapping[str, Any]) -> bool:
    try:
        model.validate_python(body)
    except ValidationError:
        return False
    return True


def _leave_out(body: dict[str, Any], problem: ErrorDetails) -> None:
    """Cuts or removes the part that the problem is about; if a field is missing, what it is missing from."""
    path = problem["loc"]
    place: Any = body
    inside: list[tuple[Any, int | str]] = []
    for step in path:
        if not _is_in(step, place):
            break
        inside.append((place, step))
        place = place[step]
    # Shorter still: another problem has removed it.
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
