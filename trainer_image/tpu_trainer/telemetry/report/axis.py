"""Axes of the charts: from values to places, and the round numbers that label them. Used by `plot`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SPAN_FOR_LOGARITHM = 30
"""Largest over smallest value from which a curve is drawn on a logarithmic axis: below it a linear one shows more."""

SMALLEST_SPAN = 1e-290
"""Between values that are apart at all; below it a fifth of the span may not be a number any more."""


@dataclass(frozen=True)
class Axis:
    """low < high; ticks lie between them."""

    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one; values outside are held at the ends."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return min(1.0, max(0.0, (value - low) / (high - low)))


def axis_of(values: Iterable[float], ticks: int = 5, from_zero: bool = False, logarithm: bool = False) -> Axis:
    """An axis that holds all the values, which are finite; some axis where there are none.

    `from_zero`: begins at 0. `logarithm`: logarithmic if the values are positive and far apart.
    """
    found = list(values)
    low, high = (min(found), max(found)) if found else (0.0, 1.0)
    if logarithm and low > 0 and high / low >= SPAN_FOR_LOGARITHM:
        return _logarithmic(low, high)
    if from_zero:
        low = min(low, 0.0)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), SMALLEST_SPAN):
        # One value: it stands in the middle, or, where it is 0, at the bottom.
        margin = abs(high) / 2 or 1.0
        low, high = (low if from_zero else low - margin), high + margin
    return _linear(low, high, ticks)


def step_axis(first: int, last: int) -> Axis:
    """Steps, exactly from `first` to `last`, ticks at whole numbers."""
    # Without 2.5, which is no number of steps.
    size = max(1.0, _round_size((max(last, first + 1) - first) / 6, (1, 2, 5, 10)))
    start = math.ceil(first / size)
    ticks = [tick * size for tick in range(start, math.floor(last / size) + 1)]
    return Axis(first, max(last, first + 1), tuple(ticks))


def _linear(low: float, high: float, ticks: int) -> Axis:
    """Widened to whole ticks, so that the curve does not touch the frame."""
    size = _round_size((high - low) / ticks)
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return Axis(first * size, last * size, tuple(tick * size for tick in range(first, last + 1)))


def _logarithmic(low: float, high: float) -> Axis:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = math.ceil((last - first) / 6)
    powers = [10.0**power for power in range(first, last + 1, every)]
    return Axis(low / 1.2, high * 1.2, tuple(p for p in powers if low / 1.2 <= p <= high * 1.2), logarithmic=True)


def _round_size(size: float, factors: Sequence[float] = (1, 2, 2.5, 5, 10)) -> float:
    """The next of the factors times a power of ten that is not smaller."""
    power = 10.0 ** math.floor(math.log10(size))
    return next(factor * power for factor in factors if factor * power >= size * (1 - 1e-9))
