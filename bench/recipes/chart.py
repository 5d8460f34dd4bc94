"""The drawing of docs/scaling.md: what each rule loses over the factor, a panel for each task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, indent, tostring

from bench.recipes.tasks import RULES, TASKS
from bench.recipes.verdict import FAR, Cell
from bench.svg import tag, text
from tpu_training_operator.html_report.plot import Axis

COLUMNS, WIDTH, HEIGHT = 3, 250, 150
"""Panels in a row, and the size of a panel's frame."""
_LEFT, _TOP, _ACROSS, _DOWN, _LEGEND = 50, 40, 62, 74, 34
_LOST = Axis(-1, 5, (0, 1, FAR, 5))
"""In tolerances. A line that leaves the frame has lost more."""
_COLOURS = {
    "Unscaled": ("#8a9096", "#8f979f"),
    "SquareRoot": ("#00795a", "#45c79d"),
    "Linear": ("#c25700", "#f4a259"),
    "Auto": ("#0068a8", "#62b5ee"),
    "Auto, noise scale": ("#7a4fc4", "#b79af0"),
    "SameLoss": ("#1b1d20", "#e8eaed"),
    "AdaScale": ("#a2467b", "#e08fbb"),
}
"""By paper: light, dark."""


def _style() -> str:
    light, dark = (
        " ".join(f".{_kind(rule)} {{ stroke: {each[paper]}; fill: {each[paper]}; }}" for rule, each in _COLOURS.items())
        for paper in (0, 1)
    )
    return f"""
text {{ font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #5b6168; }}
.page {{ fill: #fdfdfc; }}
.title {{ font-weight: 600; fill: #1b1d20; }}
.grid {{ stroke: #d9dbdd; }}
.goal {{ fill: #00795a; opacity: 0.1; }}
{light}
path.line {{ fill: none; stroke-width: 1.75; stroke-linejoin: round; }}
path.auto {{ stroke-width: 3.5; }}
circle {{ stroke: none; }}
@media (prefers-color-scheme: dark) {{
  .page {{ fill: #15171a; }} text {{ fill: #a3aab2; }} .title {{ fill: #e8eaed; }} .grid {{ stroke: #33383e; }}
  .goal {{ fill: #45c79d; }}
  {dark}
  path.line {{ fill: none; }}
}}
"""


@dataclass(frozen=True)
class Panel:
    """The frame of a task, whose upper left corner is at `left`, `top`."""

    task: str
    number: int
    x: Axis

    @property
    def left(self) -> float:
        return _LEFT + self.number % COLUMNS * (WIDTH + _ACROSS)

    @property
    def top(self) -> float:
        return _TOP + self.number // COLUMNS * (HEIGHT + _DOWN)

    def across(self, factor: float) -> float:
        return self.left + WIDTH * self.x.place(factor)

    def down(self, lost: float) -> float:
        # Not clipped: the drawing is, so that a line leaves it in its direction.
        return self.top + HEIGHT * (lost - _LOST.low) / (_LOST.high - _LOST.low)


def drawing(found: Sequence[Cell]) -> str:
    names = list(dict.fromkeys(cell.task for cell in found))
    rules = [rule for rule in RULES if any(cell.rule == rule for cell in found)]
    factors = tuple(sorted({cell.factor for cell in found}))
    x = Axis(factors[0], factors[-1], factors, logarithmic=True)
    panels = [Panel(name, number, x) for number, name in enumerate(names)]
    rows = -(-len(panels) // COLUMNS)
    width = _LEFT + COLUMNS * (WIDTH + _ACROSS) - _ACROSS + 20
    height = _TOP + rows * (HEIGHT + _DOWN) + _LEGEND - 20
    picture = tag(
        "svg",
        tag("title", "What each rule loses against the tuned recipe, over the factor between the batches"),
        tag("style", _style()),
        tag("defs", (_frame(panel) for panel in panels)),
        tag("rect", class_="page", width=str(width), height=str(height), rx="6"),
        (part for panel in panels for part in _panel(panel, [cell for cell in found if cell.task == panel.task])),
        _legend(rules, height - 16),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        role="img",
    )
    indent(picture)
    return tostring(picture, encoding="unicode") + "\n"


def _frame(panel: Panel) -> Element:
    place = {"x": str(panel.left - 4), "y": str(panel.top - 2), "width": str(WIDTH + 8), "height": str(HEIGHT + 4)}
    return tag("clipPath", tag("rect", **place), id=f"frame{panel.number}")


def _panel(panel: Panel, found: Sequence[Cell]) -> Iterator[Element]:
    quality = TASKS[panel.task].quality
    yield text(TASKS[panel.task].title, panel.left, panel.top - 12, class_="title")
    band = {"x": str(panel.left), "y": str(panel.top), "width": str(WIDTH)}
    yield tag("rect", class_="goal", **band, height=f"{panel.down(1) - panel.top:.1f}")
    for tick in _LOST.ticks:
        y = panel.down(tick)
        yield tag("path", class_="grid", d=f"M{panel.left} {y:.1f}h{WIDTH}")
        value = tick * quality.tolerance * quality.scale
        yield text(f"−{value:g}" if value else "0", panel.left - 8, y + 4, text_anchor="end")
    for factor in panel.x.ticks:
        yield text(f"{factor:g}x", panel.across(factor), panel.top + HEIGHT + 20, text_anchor="middle")
    yield text(quality.unit, panel.left + WIDTH, panel.top - 12, text_anchor="end")
    curves = [_curve(panel, rule, [cell for cell in found if cell.rule == rule]) for rule in RULES]
    yield tag("g", (part for curve in curves for part in curve), clip_path=f"url(#frame{panel.number})")


def _curve(panel: Panel, rule: str, found: Sequence[Cell]) -> Iterator[Element]:
    places = [(panel.across(cell.factor), panel.down(cell.tolerances)) for cell in found]
    if not places:
        return
    yield tag("path", class_=f"line {_kind(rule)}", d="M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places))
    for x, y in places[1:]:
        yield tag("circle", class_=_kind(rule), cx=f"{x:.1f}", cy=f"{y:.1f}", r="2.5")


def _kind(rule: str) -> str:
    """Returns the rule's CSS class."""
    return rule.lower().replace(" ", "-").replace(",", "")


def _legend(rules: Sequence[str], y: float) -> Iterator[Element]:
    x = float(_LEFT)
    for rule in rules:
        yield tag("path", class_=f"line {_kind(rule)}", d=f"M{x} {y - 4}h22")
        yield text(rule, x + 30, y)
        x += 50 + 7.3 * len(rule)
    yield tag("rect", class_="goal", x=str(x), y=str(y - 14), width="22", height="16")
    yield text("the goal", x + 30, y)
