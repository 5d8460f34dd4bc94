"""Durations and lists as people write them."""

from collections.abc import Sequence
from datetime import datetime

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


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


def ago(moment: datetime, now: datetime) -> str:
    return f"{duration((now - moment).total_seconds())} ago"


def several(names: Sequence[str], most: int) -> str:
    """At most `most` of the names, and how many more there are."""
    left = len(names) - most
    return ", ".join(names[:most]) + (f" and {left} more" if left > 0 else "")
