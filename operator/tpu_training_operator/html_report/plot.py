"""Places curves in a drawing: SVG with labels beside it, as `page.html` draws it.

The drawing stretches to the width of the page, while lines and labels, which are plain HTML, keep their size, so that a
chart is legible on a phone and on paper. Colours are classes of `report.css`.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tpu_training_operator.html_report.formatting import number

WIDTH, HEIGHT = 1000, 300
"""The size in the drawing's coordinates, not in pixels."""

LOGARITHMIC_FROM = 30
"""The ratio of the largest to the smallest value from which an axis is logarithmic."""

FEW = 12
"""The most points of a curve of which each has a dot: with so few, a line alone would mislead."""

MOST_TICKS = 7
"""The most labels of a logarithmic axis."""

SMALLEST_SPAN = 1e-290
"""The smallest span between values that counts; a fifth of a smaller one may be too small for a float."""


@dataclass(frozen=True)
class Axis:
    """One axis, where low < high; the ticks are between them."""

    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Returns the value's place, from 0 at the low end to 1 at the high end; values outside are clipped."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return min(1.0, max(0.0, (value - low) / (high - low)))


@dataclass(frozen=True)
class Point:
    """A point of a curve, and its tooltip. `spread`: the range of the values that were merged into it."""

    x: float
    y: float
    text: str = ""
    spread: tuple[float, float] | None = None

    @property
    def low(self) -> float:
        return self.spread[0] if self.spread else self.y

    @property
    def high(self) -> float:
        return self.spread[1] if self.spread else self.y


@dataclass(frozen=True)
class Curve:
    """One line, in unbroken parts. `kind`: its CSS class; `name`: what it shows, in words; `dotted`: the most points of
    which each has a dot."""

    kind: str
    name: str
    parts: Sequence[Sequence[Point]]
    dotted: int = FEW

    @property
    def points(self) -> list[Point]:
        return [point for part in self.parts for point in part]

    def summary_over(self, x_name: str) -> str:
        """Describes the curve for screen readers."""
        points = self.points
        if not points:
            return f"{self.name}: no value"
        ends = ", ".join(f"{number(point.y)} at {x_name} {number(point.x)}" for point in (points[0], points[-1]))
        low, high = min(point.low for point in points), max(point.high for point in points)
        return f"{self.name}: {ends}; min {number(low)}, max {number(high)}"


@dataclass(frozen=True)
class Plot:
    """A chart. `title`: for screen readers; `legend`: classes and texts of its keys; `broken`: spans of x whose values
    have no place on the y axis; `level`: a dashed horizontal line; `marks`: vertical lines; `best`: a point to mark;
    `x_name`: the x axis' name; `labels`: points whose text stands beside them."""

    title: str
    x: Axis
    y: Axis
    curves: Sequence[Curve]
    legend: Sequence[tuple[str, str]] = ()
    broken: Sequence[tuple[float, float]] = ()
    level: float | None = None
    marks: Sequence[float] = ()
    best: Point | None = None
    x_name: str = "step"
    labels: Sequence[Point] = ()

    @property
    def summary(self) -> str:
        return ". ".join([self.title, *(curve.summary_over(self.x_name) for curve in self.curves)])

    def paths(self) -> Iterator[tuple[str, str]]:
        """Yields the drawing's paths in their order, each with its CSS class."""
        for tick in self.y.ticks:
            yield "grid", f"M0 {self._y(tick)}H{WIDTH}"
        if self.level is not None:
            yield "level", f"M0 {self._y(self.level)}H{WIDTH}"
        for mark in self.marks:
            yield "mark", f"M{self._x(mark)} 0V{HEIGHT}"
        for left, right in ((self._x(first), self._x(last)) for first, last in self.broken):
            if left != right:
                yield "lost", f"M{left} 0H{right}V{HEIGHT}H{left}Z"
            yield "broken", f"M{left} 0H{right}"
        for curve in self.curves:
            few = len(curve.points) <= curve.dotted
            parts = [part for part in curve.parts if part]
            bands = "".join(self._band(part) for part in parts if any(point.low < point.high for point in part))
            lines = "".join("M" + "L".join(map(self._at, part)) for part in parts)
            dots = "".join(f"M{self._at(point)}h0" for part in parts for point in part if few or len(part) == 1)
            layers = {"band": bands, "line": lines, "dot": dots}
            yield from ((f"{layer} {curve.kind}", path) for layer, path in layers.items() if path)
        if self.best is not None:
            yield "best", f"M{self._at(self.best)}h0"

    def tooltips(self) -> Iterator[tuple[float, float, str]]:
        """Yields each point's tooltip, and the left side and width of its column, which reaches half-way to the
        neighbours."""
        points = sorted((point for curve in self.curves for point in curve.points if point.text), key=lambda p: p.x)
        middles = [WIDTH * self.x.place((a.x + b.x) / 2) for a, b in pairwise(points)]
        for point, (left, right) in zip(points, pairwise([0.0, *middles, float(WIDTH)]), strict=False):
            yield left, max(0.0, right - left), point.text

    def _band(self, part: Sequence[Point]) -> str:
        """Returns a path from left to right along the high values, and back along the low ones."""
        there = [f"{self._x(point.x)} {self._y(point.high)}" for point in part]
        back = [f"{self._x(point.x)} {self._y(point.low)}" for point in reversed(part)]
        return "M" + "L".join(there + back) + "Z"

    def _at(self, point: Point) -> str:
        return f"{self._x(point.x)} {self._y(point.y)}"

    def _x(self, value: float) -> str:
        return f"{WIDTH * self.x.place(value):.1f}"

    def _y(self, value: float) -> str:
        return f"{HEIGHT * (1 - self.y.place(value)):.1f}"


def drawable(value: float | None) -> bool:
    """Returns whether the value is finite, and small enough that differences are finite, too."""
    return value is not None and abs(value) < 1e300


def axis_over(curves: Iterable[Curve], level: float | None = None, **options: Any) -> Axis:
    """Returns a y axis that holds the curves' drawable values and the level. `options`: those of `axis_of`."""
    values = [value for curve in curves for point in curve.points for value in (point.low, point.high)]
    return axis_of(filter(drawable, values if level is None else [*values, level]), **options)


def axis_of(values: Iterable[float], ticks: int = 5, from_zero: bool = False, logarithm: bool = False) -> Axis:
    """Returns an axis that holds all the values, which must be finite; without values, from 0 to 1.

    `logarithm`: makes it logarithmic if the values are positive and far apart.
    """
    numbers = list(values)
    low, high = (min(numbers), max(numbers)) if numbers else (0.0, 1.0)
    if logarithm and low > 0 and high / low >= LOGARITHMIC_FROM:
        return _logarithmic(low, high)
    if from_zero:
        low = min(low, 0.0)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), SMALLEST_SPAN):
        # A single value is drawn in the middle, or at the bottom if it is 0.
        margin = abs(high) / 2 or 1.0
        low, high = (low if from_zero else low - margin), high + margin
    # Widened to whole ticks, so that the curve does not touch the frame.
    size = _round_size((high - low) / ticks)
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return Axis(first * size, last * size, tuple(tick * size for tick in range(first, last + 1)))


def step_axis(first: int, last: int) -> Axis:
    """Returns an axis from exactly `first` to `last`, with ticks at whole numbers."""
    last = max(last, first + 1)
    size = max(1.0, _round_size((last - first) / 6, (1, 2, 5, 10)))
    ticks = range(math.ceil(first / size), math.floor(last / size) + 1)
    return Axis(first, last, tuple(tick * size for tick in ticks))


def _logarithmic(low: float, high: float) -> Axis:
    """Returns a logarithmic axis, widened to whole ticks, with as many of them as fit."""
    first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1
    ticks: list[float] = []
    for factors in ((1, 2, 5), (1, 3), (1,)):
        every = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
        # The smallest floats have no power of ten below them.
        below = max((tick for tick in every if 0 < tick <= low), default=low)
        above = min(tick for tick in every if tick >= high)
        ticks = [tick for tick in every if below <= tick <= above]
        if len(ticks) <= MOST_TICKS:
            break
    return Axis(below, above, tuple(ticks[:: math.ceil(len(ticks) / MOST_TICKS)]), logarithmic=True)


def _round_size(size: float, factors: Sequence[float] = (1, 2, 2.5, 5, 10)) -> float:
    """Returns the smallest product of a factor and a power of ten that is at least `size`."""
    power = 10.0 ** math.floor(math.log10(size))
    return next(factor * power for factor in factors if factor * power >= size * (1 - 1e-9))
