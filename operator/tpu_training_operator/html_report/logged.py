"""The section of what the task logs in training: a chart for each name, and a table."""

from xml.etree.ElementTree import Element

from tpu_training_operator.html_report import charts
from tpu_training_operator.html_report.blocks import figure, section, table
from tpu_training_operator.html_report.formatting import count, number
from tpu_training_operator.html_report.history import Logged, Measured
from tpu_training_operator.html_report.markup import tag

MOST_CHARTS = 12
"""Charts of logged values; the table has all of them."""


def logged_values(measured: Measured) -> Element | None:
    if not measured.logged:
        return None
    # A single value is not a curve.
    drawn = [logged for logged in measured.logged if len(charts.known(logged.points)) > 1]
    figures = [figure(logged.name, charts.logged_chart(measured, logged)) for logged in drawn[:MOST_CHARTS]]
    lost = any(point.broken for logged in measured.logged for point in logged.points)
    heads = ["Name", "Last", "Min", "Max", *(["Not finite"] if lost else [])]
    rows = [_row(logged, lost) for logged in measured.logged]
    return section(
        "logged",
        "Logged in training",
        tag("div", figures, class_="small") if figures else None,
        table(heads, rows, right=range(1, len(heads)), class_="metrics"),
    )


def _row(logged: Logged, lost: bool) -> Element:
    """`lost`: some of the values, by this name or another, are not finite."""
    known = charts.known(logged.points)
    least = number(min(point.low or 0.0 for point in known)) if known else "–"
    greatest = number(max(point.high or 0.0 for point in known)) if known else "–"
    last = logged.points[-1] if logged.points else None
    newest = "–" if last is None else "not finite" if last.mean is None else number(last.mean)
    broken = sum(point.broken for point in logged.points)
    texts = (newest, least, greatest, *([count(broken) if broken else "–"] if lost else []))
    return tag("tr", tag("th", logged.name, scope="row"), (tag("td", text, class_="right") for text in texts))
