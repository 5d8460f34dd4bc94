"""The drawing of docs/scale.md: seconds over hosts for every contender, with the spread of the rounds."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element, indent, tostring

from bench.scale.stage import FLOOR, INDEXED, OPERATOR
from bench.svg import tag, text
from bench.trainer.compare import Spread
from tpu_training_operator.html_report.formatting import count
from tpu_training_operator.html_report.plot import Axis, axis_of

NAMES = {FLOOR: "bare client", INDEXED: "Indexed Job", OPERATOR: "this operator"}
PANELS = {"create": "From the job to all its pods", "restart": "From a failure to all new pods"}

WIDTH, HEIGHT = 420, 260
"""Of one panel's frame."""
_LEFT, _TOP, _GAP, _LEGEND = 52, 34, 96, 40
# The report's colours (report.css), by paper.
_STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #5b6168; }
.page { fill: #fdfdfc; }
.title { font-weight: 600; fill: #1b1d20; }
.grid { stroke: #d9dbdd; }
.line { fill: none; stroke-width: 2; }
.band { opacity: 0.18; }
.floor { stroke: #5b6168; } .indexed-job { stroke: #c25700; } .operator { stroke: #0068a8; }
.band.floor, .dot.floor { fill: #5b6168; } .band.indexed-job, .dot.indexed-job { fill: #c25700; }
.band.operator, .dot.operator { fill: #0068a8; }
.band { stroke: none; }
@media (prefers-color-scheme: dark) {
  .page { fill: #15171a; } text { fill: #a3aab2; } .title { fill: #e8eaed; } .grid { stroke: #33383e; }
  .floor { stroke: #a3aab2; } .indexed-job { stroke: #f4a259; } .operator { stroke: #62b5ee; }
  .band.floor, .dot.floor { fill: #a3aab2; } .band.indexed-job, .dot.indexed-job { fill: #f4a259; }
  .band.operator, .dot.operator { fill: #62b5ee; }
}
"""


@dataclass(frozen=True)
class Panel:
    """One frame whose upper left corner is at `left`; the curves by contender: hosts and seconds."""

    left: float
    x: Axis
    y: Axis
    curves: Mapping[str, Sequence[tuple[int, Spread]]]

    def at(self, hosts: float, seconds: float) -> str:
        return f"{self.left + WIDTH * self.x.place(hosts):.1f} {_TOP + HEIGHT * (1 - self.y.place(seconds)):.1f}"


def drawing(rounds: Sequence[Mapping[str, Any]]) -> str:
    gangs = [each for each in rounds if each["jobs"] == 1]
    curves = {kind: _curves(gangs, kind) for kind in PANELS}
    spreads = [spread for found in curves.values() for curve in found.values() for _, spread in curve]
    sizes = sorted({each["hosts"] for each in gangs})
    # The same axes for all panels.
    x = Axis(sizes[0] / 1.15, sizes[-1] * 1.15, tuple(sizes), logarithmic=True)
    y = axis_of([value for each in spreads for value in (each.least, each.greatest)], logarithm=True)
    panels = [
        _panel(title, Panel(_LEFT + index * (WIDTH + _GAP), x, y, curves[kind]))
        for index, (kind, title) in enumerate(PANELS.items())
    ]
    width, height = 2 * WIDTH + _GAP + _LEFT + 16, _TOP + HEIGHT + 34 + _LEGEND
    picture = tag(
        "svg",
        tag("title", "Seconds over hosts, both logarithmic"),
        tag("style", _STYLE),
        tag("rect", class_="page", width=str(width), height=str(height), rx="6"),
        (part for panel in panels for part in panel),
        _legend(height - 14),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        role="img",
    )
    indent(picture)
    return tostring(picture, encoding="unicode") + "\n"


def _curves(rounds: Sequence[Mapping[str, Any]], kind: str) -> dict[str, list[tuple[int, Spread]]]:
    found: dict[str, list[tuple[int, Spread]]] = {}
    for name in NAMES:
        for hosts in sorted({each["hosts"] for each in rounds}):
            same = (each[name][kind] for each in rounds if each["hosts"] == hosts and name in each)
            if values := [value for value in same if value is not None]:
                found.setdefault(name, []).append((hosts, Spread.of(values)))
    return found


def _panel(title: str, panel: Panel) -> Iterator[Element]:
    yield text(title, panel.left, _TOP - 14, class_="title")
    for tick in panel.y.ticks:
        start, end = panel.at(panel.x.low, tick), panel.at(panel.x.high, tick).split()[0]
        yield tag("path", class_="grid", d=f"M{start}H{end}")
        yield text(f"{tick:g} s", panel.left - 8, float(start.split()[1]) + 4, text_anchor="end")
    for hosts in panel.x.ticks:
        x = float(panel.at(hosts, panel.y.low).split()[0])
        yield text(count(int(hosts)), x, _TOP + HEIGHT + 20, text_anchor="middle")
    yield text("hosts", panel.left + WIDTH / 2, _TOP + HEIGHT + 38, text_anchor="middle")
    for name, curve in panel.curves.items():
        there = [panel.at(hosts, spread.greatest) for hosts, spread in curve]
        back = [panel.at(hosts, spread.least) for hosts, spread in reversed(curve)]
        yield tag("path", class_=f"band {name}", d=f"M{'L'.join(there + back)}Z")
        middle = [panel.at(hosts, spread.median) for hosts, spread in curve]
        yield tag("path", class_=f"line {name}", d=f"M{'L'.join(middle)}")
        for cx, cy in (place.split() for place in middle):
            yield tag("circle", class_=f"dot {name}", cx=cx, cy=cy, r="3")


def _legend(y: float) -> Iterable[Element]:
    for index, (name, words) in enumerate(NAMES.items()):
        x = _LEFT + 150 * index
        yield tag("path", class_=f"line {name}", d=f"M{x} {y - 4}h22")
        yield text(words, x + 30, y)
