"""A curve of any length in constant memory: neighbours are merged as it grows. Used by `history`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

LIMIT = 2000
"""Points kept at most; even, so that all of them find a partner. A page cannot show more of them side by side."""


class Series(Generic[T]):
    """Points in the order in which they came; each stands for `stride` that were added, the last for up to as many.

    All points stand for equally many, so that early and late parts of a run are told equally finely.
    """

    def __init__(self, merge: Callable[[T, T], T], points: Sequence[T] = (), stride: int = 1) -> None:
        """`merge` makes one point of an earlier and the next one. `points`, `stride`: a series to go on with."""
        self._merge = merge
        self._points = list(points)
        self.stride = stride
        self._room = 0

    @property
    def points(self) -> tuple[T, ...]:
        return tuple(self._points)

    def add(self, point: T) -> None:
        if self._room:
            self._points[-1] = self._merge(self._points[-1], point)
            self._room -= 1
            return
        if len(self._points) >= LIMIT:
            self._halve()
        self._points.append(point)
        self._room = self.stride - 1

    def _halve(self) -> None:
        pairs = zip(self._points[::2], self._points[1::2], strict=True)
        self._points = [self._merge(earlier, later) for earlier, later in pairs]
        self.stride *= 2
