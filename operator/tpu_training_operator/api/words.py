"""Counts and measured numbers as text."""

import math
from typing import Any

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def count(number: int, noun: str) -> str:
    """Returns a number with its noun: 1 worker, 4 workers."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def every(number: int, noun: str) -> str:
    """Returns a subject with its verb: the worker is, all 4 workers are."""
    return f"the {noun} is" if number == 1 else f"all {number} {noun}s are"


def span(seconds: int) -> str:
    """Returns a time in the largest unit that divides it: 90 s, 10 min, 24 h."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds % length == 0:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def number_text(value: Any) -> str | None:
    """Returns a number to six digits, for a status, which cannot hold floats; None for anything else. Keeps "nan" and
    "inf", because users must see them."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return f"{value:.6g}" if math.isfinite(value) else str(value)
    except OverflowError:
        # An integer too large for a float.
        return None


def read_number(text: str | None) -> float | None:
    """Returns the number that a status or a report has as text; None for anything else."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def duration(seconds: float) -> str:
    """Returns a time in at most two units: 4s, 2m10s, 1h03m, 3d04h."""
    total = max(0, round(seconds))
    if total < _MINUTE:
        return f"{total}s"
    if total < _HOUR:
        return f"{total // _MINUTE}m{total % _MINUTE:02}s"
    if total < _DAY:
        return f"{total // _HOUR}h{total % _HOUR // _MINUTE:02}m"
    return f"{total // _DAY}d{total % _DAY // _HOUR:02}h"
