"""Finds the largest batch per replica that fits, in few compilations: for a large model each takes minutes.

Memory grows about linearly with the batch, so a line through the known sizes predicts the border. A batch a little
below it is likely to fit, and one a little above it is not: if both turn out so, the border is known well enough. If
not, since the compiler may save memory near the limit, another line is drawn through all known sizes, and in the end
the rest is halved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ROWS = 8
MANY = 8 * ROWS
"""Examples from which only multiples of ROWS are tried, since a core holds rows in groups of eight."""

MOST = 1 << 24
PRECISION = 16
MOST_GUESSES = 5


@dataclass(frozen=True)
class Need:
    """Bytes that a batch needs; None if the compiler refused without a number."""

    fits: bool
    size: int | None


@dataclass(frozen=True)
class Largest:
    """fits: the largest batch that fitted, 0 if not even one example does. refused: the smallest that did not fit,
    None if there was none up to MOST."""

    fits: int
    refused: int | None


def largest(ask: Callable[[int], Need], begin: int, limit: int | None, fixed: int) -> Largest:
    """Returns the border, known to a sixteenth or to one step of `_unit`; begins with the batch `begin`.

    limit: the bytes of a core, if known. fixed: the bytes that do not depend on the batch.
    """
    low, high, guesses = 0, MOST + 1, 0
    points: dict[int, int] = {0: fixed}
    size: int | None = max(1, begin)
    while size is not None:
        need = ask(size)
        low, high = (size, high) if need.fits else (low, size)
        if need.size is not None:
            points[size] = need.size
        guess = _crossing(points, limit) if guesses < MOST_GUESSES else None
        guesses += 1
        size = _next(low, high, guess)
    return Largest(low, None if high > MOST else high)


def _crossing(points: dict[int, int], limit: int | None) -> int | None:
    """Returns the batch at which a line through the two largest known batches reaches the limit."""
    if limit is None or len(points) < 2:
        return None
    (before, less), (size, more) = sorted(points.items())[-2:]
    if more <= less:
        return None
    return int(before + (limit - less) * (size - before) / (more - less))


def _next(low: int, high: int, guess: int | None) -> int | None:
    """Returns the next batch to try, between `low` and `high`; None if they are near enough. `guess`: where the border
    may be."""
    enough = _enough(low)
    if high - low <= enough:
        return None
    if guess is None:
        return _round((low + high) // 2 if high <= MOST else low * 2, low, high)
    below = guess - _enough(guess) // 2
    if below < low + _unit(low):
        # The largest batch that fits is near the border. If this one does not fit, the search ends.
        below = low + enough
    return _round(below if below < high else (low + high) // 2, low, high)


def _unit(size: int) -> int:
    return ROWS if size >= MANY else 1


def _enough(low: int) -> int:
    """Returns how much larger than a fitting batch the next one may be."""
    return max(_unit(low), low // PRECISION)


def _round(size: int, low: int, high: int) -> int:
    size = size // _unit(size) * _unit(size)
    return min(max(size, low + _unit(low)), high - 1)
