"""Measured numbers as a status shows them: texts, since an API object holds no floats. Used for what workers report,
on the way and at their end."""

import math
from typing import Any


def number_text(value: Any) -> str | None:
    """A number to six digits, "nan" and "inf" included: they are what a person must see. None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return f"{value:.6g}" if math.isfinite(value) else str(value)
    except OverflowError:
        # An integer beyond every float.
        return None
