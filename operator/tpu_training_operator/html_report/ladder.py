"""The section of the job's ladder: a row for every rung, and how the speed grew with the chips."""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from tpu_training_operator.html_report.formatting import count, number
from tpu_training_operator.html_report.markup import aside, key, section, table, tag
from tpu_training_operator.html_report.plot import Axis, Curve, Plot, Point, axis_of, draw


@dataclass(frozen=True)
class RungRow:
    """One rung, from the job's status. `efficiency`: examples per second per chip, divided by those of the rung before;
    None, like `rate`, if unknown. `failed`: the results of gates that failed."""

    slice: str
    chips: int
    batch: int
    learning_rate: str
    steps: int
    verdict: str
    rate: float | None = None
    efficiency: float | None = None
    failed: Sequence[str] = ()


def ladder(rungs: Sequence[RungRow]) -> Element | None:
    """Shows the rungs; None for a job without a ladder."""
    if not rungs:
        return None
    heads = ["Rung", "Slice", "Chips", "Batch", "Learning rate", "Steps", "Examples/s", "Efficiency", "Verdict"]
    rows = [_row(place, rung) for place, rung in enumerate(rungs, 1)]
    return section(
        "ladder",
        "The ladder",
        table(heads, rows, right=(2, 3, 4, 5, 6, 7), apart=(8,), class_="ladder"),
        _growth(rungs),
        tag(
            "p",
            "Efficiency: examples per second per chip, divided by those of the rung before. The last rung is the job.",
            class_="note",
        ),
    )


def _row(place: int, rung: RungRow) -> Element:
    numbers = (
        count(rung.chips),
        count(rung.batch),
        rung.learning_rate,
        count(rung.steps),
        "" if rung.rate is None else number(rung.rate),
        "" if rung.efficiency is None else number(rung.efficiency),
    )
    return tag(
        "tr",
        tag("th", str(place), scope="row"),
        tag("td", rung.slice),
        (tag("td", value, class_="right") for value in numbers),
        tag("td", rung.verdict, (aside(f" {words}") for words in rung.failed), class_="apart"),
    )


def _growth(rungs: Sequence[RungRow]) -> Element | None:
    """Draws examples per second over chips, and a line at the first rung's pace per chip."""
    measured = [(rung, rung.rate) for rung in rungs if rung.rate is not None and rung.rate > 0 and rung.chips > 0]
    if len({rung.chips for rung, _ in measured}) < 2:
        return None
    first, pace = measured[0][0], measured[0][1] / measured[0][0].chips
    actual = [_point(rung.chips, rate, f"{rung.slice}: {number(rate)} examples/s") for rung, rate in measured]
    ideal = [_point(chips, pace * chips) for chips in sorted({rung.chips for rung, _ in measured})]
    x = _chips_axis([rung.chips for rung, _ in measured])
    y = axis_of([point.y for point in (*actual, *ideal)], ticks=4, from_zero=True)
    curves = [Curve("evaluation", "at the pace of the first rung", [ideal]), Curve("throughput", "measured", [actual])]
    keys = tag(
        "p",
        key("throughput", "examples per second"),
        key("evaluation", f"at the pace of {first.slice}, {number(pace)} per chip"),
        class_="keys",
    )
    return tag("div", keys, draw(Plot("Examples per second over chips", x, y, curves, x_name="chips")))


def _point(chips: int, rate: float, text: str = "") -> Point:
    return Point(chips, rate, rate, rate, text)


def _chips_axis(chips: Sequence[int]) -> Axis:
    """Returns an axis from 0, with a tick at every rung's chips."""
    return Axis(0.0, float(max(chips)), tuple(sorted({float(number) for number in chips})))
