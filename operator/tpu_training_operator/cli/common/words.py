"""Durations and lists as people write them."""

from collections.abc import Sequence
from datetime import datetime

from tpu_training_operator.api.words import duration


def ago(moment: datetime, now: datetime) -> str:
    return f"{duration((now - moment).total_seconds())} ago"


def several(names: Sequence[str], most: int) -> str:
    """At most `most` of the names, and how many more there are."""
    left = len(names) - most
    return ", ".join(names[:most]) + (f" and {left} more" if left > 0 else "")
