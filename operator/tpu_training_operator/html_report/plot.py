"""Draws curves as SVG with labels beside them.

The drawing stretches to the width of the page, while lines and labels, which are plain HTML, keep their size, so that a
chart is legible on a phone and on paper. Colours are classes of `report.css`.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.etree.ElementTree import Element

from tpu_training_operator.html_report.formatting import number
from tpu_training_operator.html_report.markup import tag

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
    """A point of a curve. `low` and `high`: the range of the values that were merged into it; `text`: its tooltip."""

    x: float
    y: float
    low: float
    high: float
    text: str = ""


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
        first, last = points[0], points[-1]
        low, high = min(point.low for point in points), max(point.high for point in points)
        ends = f"{number(first.y)} at {x_name} {number(first.x)}, {number(last.y)} at {x_name} {number(last.x)}"
        return f"{self.name}: {ends}; min {number(low)}, max {number(high)}"


@dataclass(frozen=True)
class Plot:
    """A chart to draw. `title`: for screen readers; `broken`: spans of x whose values have no place on the y axis;
    `level`: a dashed horizontal line; `marks`: vertical lines; `best`: a point to mark; `x_name`: the x axis' name."""

    title: str
    x: Axis
    y: Axis
    curves: Sequence[Curve]
    broken: Sequence[tuple[float, float]] = ()
    level: float | None = None
    marks: Sequence[float] = ()
    best: Point | None = None
    x_name: str = "step"

    @property
    def summary(self) -> str:
        return ". ".join([self.title, *(curve.summary_over(self.x_name) for curve in self.curves)])


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


def draw(plot: Plot) -> Element:
    """Draws the plot as a <div>."""
    drawing = tag(
        "svg",
        (_path("grid", f"M0 {_y(plot, tick)}H{WIDTH}") for tick in plot.y.ticks),
        None if plot.level is None else _path("level", f"M0 {_y(plot, plot.level)}H{WIDTH}"),
        (_path("mark", f"M{_x(plot, x)} 0V{HEIGHT}") for x in plot.marks),
        (path for span in plot.broken for path in _broken_marks(plot, *span)),
        (path for curve in plot.curves for path in _curve(plot, curve)),
        None if plot.best is None else _path("best", f"M{_x(plot, plot.best.x)} {_y(plot, plot.best.y)}h0"),
        _tooltips(plot),
        role="img",
        aria_label=plot.summary,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
    )
    rows = (
        tag("span", number(tick), class_="y", style=f"top:{100 * (1 - plot.y.place(tick)):.2f}%")
        for tick in plot.y.ticks
    )
    columns = (
        tag("span", number(tick), class_="x", style=f"left:{100 * plot.x.place(tick):.2f}%") for tick in plot.x.ticks
    )
    return tag(
        "div",
        tag("div", drawing, rows, class_="frame"),
        tag("div", columns, tag("span", plot.x_name, class_="name"), class_="columns"),
        class_="plot",
    )


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


def _curve(plot: Plot, curve: Curve) -> Iterator[Element]:
    parts = [part for part in curve.parts if part]
    bands = "".join(_band(plot, part) for part in parts if any(point.low < point.high for point in part))
    lines = "".join("M" + "L".join(f"{_x(plot, point.x)} {_y(plot, point.y)}" for point in part) for part in parts)
    few = len(curve.points) <= curve.dotted
    dots = "".join(f"M{_x(plot, p.x)} {_y(plot, p.y)}h0" for part in parts for p in part if few or len(part) == 1)
    for layer, path in (("band", bands), ("line", lines), ("dot", dots)):
        if path:
            yield _path(f"{layer} {curve.kind}", path)


def _band(plot: Plot, part: Sequence[Point]) -> str:
    """Returns a path from left to right along the high values, and back along the low ones."""
    there = [f"{_x(plot, point.x)} {_y(plot, point.high)}" for point in part]
    back = [f"{_x(plot, point.x)} {_y(plot, point.low)}" for point in reversed(part)]
    return "M" + "L".join(there + back) + "Z"


def _broken_marks(plot: Plot, first: float, last: float) -> Iterator[Element]:
    left, right = _x(plot, first), _x(plot, last)
    if left != right:
        yield _path("lost", f"M{left} 0H{right}V{HEIGHT}H{left}Z")
    yield _path("broken", f"M{left} 0H{right}")


def _tooltips(plot: Plot) -> Iterator[Element]:
    """Yields a column with each point's tooltip; it has the whole height and reaches half-way to the neighbours."""
    points = sorted((point for curve in plot.curves for point in curve.points if point.text), key=lambda p: p.x)
    middles = [WIDTH * plot.x.place((a.x + b.x) / 2) for a, b in pairwise(points)]
    for point, (left, right) in zip(points, pairwise([0.0, *middles, float(WIDTH)]), strict=False):
        yield bar("target", left, max(0.0, right - left), point.text)


def bar(kind: str, left: float, width: float, text: str) -> Element:
    """Makes a rectangle over the whole height, with a tooltip."""
    return tag("rect", tag("title", text), class_=kind, x=f"{left:.2f}", width=f"{width:.2f}", height=str(HEIGHT))


def _path(kind: str, path: str) -> Element:
    return tag("path", class_=kind, d=path)


def _x(plot: Plot, value: float) -> str:
    return f"{WIDTH * plot.x.place(value):.1f}"


def _y(plot: Plot, value: float) -> str:
    return f"{HEIGHT * (1 - plot.y.place(value)):.1f}"
