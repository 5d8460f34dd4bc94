"""How fast steps are made. Kept by `doctor` in the loop's thread, read by `hang` from its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

_KEPT = 64


class Pace:
    """`steps`: how many this process has made; `last`: the number of the last one in the run, None before that."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.steps = 0
        self.last: int | None = None
        self._now = now
        self._since = now()
        # Overwritten in a circle and never resized, so that the other thread may read it at any time.
        self._seconds: list[float] = [0.0] * _KEPT

    def step_done(self, step: int) -> None:
        moment = self._now()
        self._seconds[self.steps % _KEPT] = moment - self._since
        self._since, self.last = moment, step
        self.steps += 1

    @property
    def median_seconds(self) -> float:
        """Of the newest steps, 64 at most; 0 before the first."""
        count = min(self.steps, _KEPT)
        return median(self._seconds[:count]) if count else 0.0
