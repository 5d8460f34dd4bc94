"""Judges from the losses of all steps whether the loss of a run has fallen, and whether it has risen above its start.

A single loss is mostly noise, so the order of the losses is tested and not their size: if nothing is learned, every
order is equally likely, whatever the distribution of the noise. The two tests are Kendall's of a trend (Mann 1945,
Econometrica 13, 245-259) over all steps, and that of Mann and Whitney (1947, Ann. Math. Statist. 18, 50-60) of the
first against the last steps, for a loss that has fallen at once and then stays.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from tpu_contract.protocol import MOST_LOSSES

MOST_POINTS = 1024
"""Neighbouring points are merged once there are so many: the memory is constant. Even, so that all of them pair up."""

FIRST, LAST = 16, 64
"""The most losses that are kept one by one, from the start and from the end."""

EARLY = 4
"""The most losses of the start that are compared with those of the end: a loss may fall within a few steps."""

SHARE = 4
"""The means of the first and the last of this many parts are reported."""

RISEN = 5
"""Only a rise whose median over this many steps in a row is high is one: batches that are hard come one by one. It is
higher than all losses before, too: however the noise is distributed, it makes such a record only a few times."""

NOISY = 6.0
"""A rise is larger than this many standard deviations of a single loss, at the start, before the rise, and at the end:
the noise of a healthy training may grow as the model grows certain. With both, flat losses of any length rise in less
than 1 % of simulated runs."""

MATERIAL = 0.1
"""A rise is larger than this share of the whole fall: momentum may lift the loss a little before it falls."""


@dataclass(frozen=True)
class Mean:
    """The mean of `count` losses; `error`: its standard error, None if unknown."""

    value: float
    error: float | None
    count: int


@dataclass(frozen=True)
class Rise:
    """The loss was at `start`, and after the warm-up at `peak` around `step`. Both are medians of RISEN steps."""

    start: float
    peak: float
    step: int


@dataclass(frozen=True)
class _Point:
    count: int
    total: float
    squares: float

    def plus(self, other: _Point) -> _Point:
        return _Point(self.count + other.count, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> Mean:
        value = self.total / self.count
        if self.count < 2:
            return Mean(value, None, self.count)
        variance = max(0.0, self.squares - self.total * value) / (self.count - 1)
        return Mean(value, math.sqrt(variance / self.count), self.count)


class LossTrend:
    """Collects the losses of one run from its first step on; leaves out those that are not finite.

    `warm_up`: the steps of the warm-up, in which the loss may rise. count: the finite losses; broken: the others.
    """

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up
        self._points: list[_Point] = []
        self._size = 1
        self._open: _Point | None = None
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=LAST)
        self._recent: deque[float] = deque(maxlen=FIRST + RISEN)
        self._highest = -math.inf
        self._rise: Rise | None = None
        self._step = 0
        self.count = 0
        self.broken = 0

    def add(self, losses: Iterable[float]) -> None:
        for loss in losses:
            self._step += 1
            if math.isfinite(loss):
                self._add(loss)
            else:
                self.broken += 1

    @property
    def is_constant(self) -> bool:
        """Whether all losses are equal: a task without a loss of its own returns such."""
        return all(point.mean.value == self._points[0].mean.value and not point.mean.error for point in self._all)

    @property
    def first(self) -> Mean | None:
        return self._part(slice(None, self._quarter))

    @property
    def last(self) -> Mean | None:
        return self._part(slice(len(self._all) - self._quarter, None))

    @property
    def curve(self) -> Iterator[tuple[int, float, float]]:
        """Yields the last step, the mean loss and its standard error of at most MOST_LOSSES ranges. The first ranges
        are the shortest: there the loss falls fastest, and a rung with a larger batch has few steps."""
        bounds = [round(len(self._all) * (part / MOST_LOSSES) ** 2) for part in range(MOST_LOSSES + 1)]
        step = 0
        for begin, end in pairwise(dict.fromkeys(bounds)):
            if (mean := self._part(slice(begin, end))) is not None:
                step += mean.count
                # One loss does not show its own noise.
                error = _deviation(self._first) if mean.error is None and self.count > 1 else mean.error or 0.0
                if math.isfinite(mean.value) and math.isfinite(error):
                    yield step, mean.value, error

    @property
    def errors_fallen(self) -> float | None:
        """How many standard errors the loss has fallen, by the clearer of the two tests; negative if it has risen, None
        without losses. For a loss in random order more than LOSS_FALLS has a probability below 0.01."""
        if self.count < 2:
            return None
        first, last = self._first[: min(EARLY, self.count // SHARE)], [*self._last][-max(1, self.count // SHARE) :]
        ends = _mann_whitney(first, last)
        return max(_kendall([point.mean.value for point in self._points]), ends)

    @property
    def rise(self) -> Rise | None:
        """How the loss has risen above its first value after the warm-up; None if it has not, or only within the
        noise."""
        found = self._rise
        if found is None:
            return None
        noise = _deviation([*self._last][-max(RISEN, self.count // SHARE) :])
        fall = found.start - min(point.mean.value for point in self._points)
        return found if found.peak - found.start > max(NOISY * noise, MATERIAL * fall) else None

    @property
    def _all(self) -> list[_Point]:
        return self._points if self._open is None else [*self._points, self._open]

    @property
    def _quarter(self) -> int:
        return math.ceil(len(self._all) / SHARE)

    def _part(self, which: slice) -> Mean | None:
        points = self._all[which]
        if not points:
            return None
        whole, *rest = points
        for point in rest:
            whole = whole.plus(point)
        return whole.mean

    def _add(self, loss: float) -> None:
        self.count += 1
        if len(self._first) < FIRST:
            self._first.append(loss)
        self._last.append(loss)
        self._recent.append(loss)
        self._look_for_rise()
        point = _Point(1, loss, loss * loss)
        self._open = point if self._open is None else self._open.plus(point)
        if self._open.count < self._size:
            return
        self._points.append(self._open)
        self._open = None
        if len(self._points) == MOST_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [one.plus(other) for one, other in pairs]
            self._size *= 2

    def _look_for_rise(self) -> None:
        """Notes the last RISEN losses, if they are the highest rise so far: above all losses before them, and above the
        first by more than the noise that was known before them."""
        before, last = [*self._recent][:-RISEN], [*self._recent][-RISEN:]
        if len(before) < RISEN:
            return
        self._highest = max(self._highest, *before)
        start, peak = median(self._first[:RISEN]), median(last)
        highest = self._highest if self._rise is None else max(self._highest, self._rise.peak)
        if peak <= highest or self._step - RISEN < self._warm_up:
            return
        noise = max(_deviation(before), _deviation(self._first[: self.count - RISEN]))
        if peak - start > NOISY * noise:
            self._rise = Rise(start, peak, self._step - RISEN // 2)


def _kendall(values: Sequence[float]) -> float:
    """Returns by how many standard deviations more pairs fall than rise; with the correction for continuity."""
    pairs, before = 0, list[float]()
    for value in values:
        pairs += len(before) - bisect_right(before, value) - bisect_left(before, value)
        insort(before, value)
    count = len(values)
    return _standardized(pairs, count * (count - 1) * (2 * count + 5) / 18)


def _mann_whitney(first: Sequence[float], last: Sequence[float]) -> float:
    """Returns by how many standard deviations more losses of `first` are above those of `last` than below."""
    later = sorted(last)
    pairs = sum(bisect_left(later, value) + bisect_right(later, value) - len(later) for value in first)
    return _standardized(pairs, len(first) * len(last) * (len(first) + len(last) + 1) / 3)


def _standardized(pairs: int, variance: float) -> float:
    if abs(pairs) <= 1 or variance <= 0:
        return 0.0
    return (pairs - math.copysign(1, pairs)) / math.sqrt(variance)


def _deviation(losses: Sequence[float]) -> float:
    """Returns the standard deviation of a single loss, from the differences of neighbours: neither a trend nor a few
    spikes change it much. Of losses with few values the median may be 0, and the mean is not."""
    differences = [abs(later - earlier) for earlier, later in pairwise(losses)]
    # The factors hold for the normal distribution.
    return (1.4826 * median(differences) or 1.2533 * fmean(differences)) / math.sqrt(2)
