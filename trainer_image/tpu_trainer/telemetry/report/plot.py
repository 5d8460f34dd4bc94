"""Draws curves as SVG with labels beside it, in markup that needs nothing from outside. Used by `charts`.

The drawing is stretched to the width of the page while its lines and the labels, which are plain HTML, keep their
size: a chart is as legible on a phone as on paper. Colours are classes; the page's style sheet knows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup, escape

from tpu_trainer.telemetry.report.axis import Axis
from tpu_trainer.telemetry.report.words import number

WIDTH, HEIGHT = 1000, 300
"""Of the drawing's own coordinates; a unit is no pixel."""


@dataclass(frozen=True)
class Point:
    """A column of a curve: `low` and `high` span what was merged into it. `text` is shown when one points at it."""

    x: float
    y: float
    low: float
    high: float
    text: str = ""


@dataclass(frozen=True)
class Curve:
    """Unbroken parts of one line; a part of one point is drawn as a dot. `kind`: the class that colours it."""

    kind: str
    parts: Sequence[Sequence[Point]]
    dots: bool = False


@dataclass(frozen=True)
class Plot:
    """`title` is read out instead of the drawing. broken: the x of what has no place on the y axis. level: a dashed
    line across."""

    title: str
    x: Axis
    y: Axis
    curves: Sequence[Curve]
    x_name: str = "step"
    broken: Sequence[float] = ()
    level: float | None = None


def draw(plot: Plot) -> Markup:
    """The plot as a <div>."""
    drawing = Markup("").join(
        [
            *(_path("grid", f"M0 {_y(plot, tick)}H{WIDTH}") for tick in plot.y.ticks),
            *(_path("level", f"M0 {_y(plot, level)}H{WIDTH}") for level in [plot.level] if level is not None),
            *(_curve(plot, curve) for curve in plot.curves),
            *(_path("broken", f"M{_x(plot, x)} 0V14") for x in plot.broken),
            *_targets(plot),
        ]
    )
    return Markup(
        '<div class="plot"><div class="frame"><svg role="img" aria-label="{title}" viewBox="0 0 {width} {height}" '
        'preserveAspectRatio="none">{drawing}</svg>{rows}</div>{columns}</div>'
    ).format(
        title=plot.title,
        width=WIDTH,
        height=HEIGHT,
        drawing=drawing,
        rows=Markup("").join(
            Markup('<span class="y" style="top:{:.2f}%">{}</span>').format(100 * (1 - plot.y.place(tick)), number(tick))
            for tick in plot.y.ticks
        ),
        columns=_column_labels(plot),
    )


def _column_labels(plot: Plot) -> Markup:
    labels = Markup("").join(
        Markup('<span class="x" style="left:{:.2f}%">{}</span>').format(100 * plot.x.place(tick), number(tick))
        for tick in plot.x.ticks
    )
    return Markup('<div class="columns">{}<span class="name">{}</span></div>').format(labels, plot.x_name)


def _curve(plot: Plot, curve: Curve) -> Markup:
    parts = [part for part in curve.parts if part]
    bands = "".join(_band(plot, part) for part in parts if any(point.low < point.high for point in part))
    lines = "".join(_line(plot, part) for part in parts)
    dots = "".join(
        f"M{_x(plot, p.x)} {_y(plot, p.y)}h0" for part in parts for p in part if curve.dots or len(part) == 1
    )
    layers = [("band", bands), ("line", lines), ("dot", dots)]
    return Markup("").join(_path(f"{layer} {curve.kind}", path) for layer, path in layers if path)


def _line(plot: Plot, part: Sequence[Point]) -> str:
    return "M" + "L".join(f"{_x(plot, point.x)} {_y(plot, point.y)}" for point in part)


def _band(plot: Plot, part: Sequence[Point]) -> str:
    """From left to right along the high values, and back along the low ones."""
    there = [f"{_x(plot, point.x)} {_y(plot, point.high)}" for point in part]
    back = [f"{_x(plot, point.x)} {_y(plot, point.low)}" for point in reversed(part)]
    return "M" + "L".join(there + back) + "Z"


def _targets(plot: Plot) -> list[Markup]:
    """Columns that show a point's text: each reaches half-way to its neighbours, and is as high as the plot."""
    points = sorted((p for curve in plot.curves for part in curve.parts for p in part if p.text), key=lambda p: p.x)
    middles = [WIDTH * plot.x.place((a.x + b.x) / 2) for a, b in pairwise(points)]
    edges = [0.0, *middles, float(WIDTH)]
    return [
        Markup('<rect class="target" x="{:.1f}" y="0" width="{:.1f}" height="{}"><title>{}</title></rect>').format(
            left, max(0.0, right - left), HEIGHT, point.text
        )
        for point, left, right in zip(points, edges, edges[1:], strict=False)
    ]


def _path(kind: str, path: str) -> Markup:
    return Markup('<path class="{}" d="{}"/>').format(escape(kind), path)


def _x(plot: Plot, value: float) -> str:
    return f"{WIDTH * plot.x.place(value):.1f}"


def _y(plot: Plot, value: float) -> str:
    return f"{HEIGHT * (1 - plot.y.place(value)):.1f}"
