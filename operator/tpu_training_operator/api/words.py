"""Counts and measured numbers as text."""

import math
from typing import Any

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def count(number: int, noun: str) -> str:
    """1 worker, 4 workers"""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def every(number: int, noun: str) -> str:
    """ "the worker is", "all 4 workers are"."""
    return f"the {noun} is" if number == 1 else f"all {number} {noun}s are"


def span(seconds: int) -> str:
    """90 s, 10 min, 24 h: in the largest unit that leaves no rest."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds % length == 0:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def number_text(value: Any) -> str | None:
    """A number to six digits, for a status, which cannot hold floats. "nan" and "inf" are kept: users must see them.
    None for anything but a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return f"{value:.6g}" if math.isfinite(value) else str(value)
    except OverflowError:
        # An integer too large for a float.
        return None


def duration(seconds: float) -> str:
    """4s, 2m10s, 1h03m, 3d04h: at most two units."""
    whole = max(0, round(seconds))
    if whole < _MINUTE:
        return f"{whole}s"
    if whole < _HOUR:
        return f"{whole // _MINUTE}m{whole % _MINUTE:02}s"
    if whole < _DAY:
        return f"{whole // _HOUR}h{whole % _HOUR // _MINUTE:02}m"
    return f"{whole // _DAY}d{whole % _DAY // _HOUR:02}h"
