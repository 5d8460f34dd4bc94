"""The sections of metrics: evaluations, with a line for each validation set, and values that the task logs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from tpu_training_operator.html_report import charts
from tpu_training_operator.html_report.formatting import count, number, plural
from tpu_training_operator.html_report.history import (
    Evaluation,
    LoggedSeries,
    Measurements,
    RecordedRunSpec,
    WatchedMetric,
)
from tpu_training_operator.html_report.markup import Content, figure, key, section, table, tag

MOST_CHARTS = 12
"""Charts in a section; its table has all metrics."""

MOST_SETS = 6
"""The most validation sets in one chart: more colours could not be distinguished."""


@dataclass(frozen=True)
class Panel:
    """One chart. `names`: the label of each metric."""

    title: str
    names: Mapping[str, str]


def evaluations(measured: Measurements, spec: RecordedRunSpec) -> Element | None:
    names = metrics_of(measured)
    if not names:
        return None
    # The evaluated loss is drawn beside the training's, and a single value is not a curve.
    beside = charts.evaluated_loss(measured)
    drawn = [name for name in names if name != beside and len(charts.evaluations_of(measured, name)) > 1]
    figures = [_figure(measured, spec, panel) for panel in panels(drawn)[:MOST_CHARTS]]
    return section(
        "evaluations",
        "Evaluations",
        tag("div", figures, class_="small") if figures else None,
        table(
            ["Metric", "Last", "Min", "at step", "Max", "at step"],
            [_row(measured, name) for name in names],
            right=(1, 2, 4),
            wide=(3, 5),
            class_="metrics",
        ),
        *(tag("p", text, class_="note") for text in _consequences(measured, spec)),
    )


def metrics_of(measured: Measurements) -> list[str]:
    """Returns the names of all metrics, in the task's order."""
    return list(dict.fromkeys(name for evaluation in measured.evaluations for name in evaluation.metrics))


def panels(names: Sequence[str]) -> list[Panel]:
    """Groups the metrics into charts. Names before a slash are validation sets; they share a metric's chart."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition("/")[2] or name, []).append(name)
    return [panel for metric, group in groups.items() for panel in _panels(metric, group)]


def _panels(metric: str, group: Sequence[str]) -> list[Panel]:
    if 1 < len(group) <= MOST_SETS:
        return [Panel(metric, {name: name.partition("/")[0] for name in group})]
    return [Panel(name, {name: name}) for name in group]


def best_of(measured: Measurements, watched: WatchedMetric) -> Evaluation | None:
    """Returns the first of the best evaluations; None without a value."""
    candidates = charts.evaluations_of(measured, watched.metric)
    choose = max if watched.highest else min
    return choose(candidates, key=lambda evaluation: evaluation.metrics[watched.metric], default=None)


def _figure(measured: Measurements, spec: RecordedRunSpec, panel: Panel) -> Element:
    watched = next((metric for metric in spec.watched if [metric.metric] == [*panel.names]), None)
    best = None if watched is None else best_of(measured, watched)
    drawing = charts.metric_chart(measured, panel.title, panel.names, best)
    keys = [
        key("evaluation" if number == 1 else f"evaluation set-{number}", label)
        for number, label in enumerate(panel.names.values(), 1)
    ]
    if best is not None:
        return figure(panel.title, drawing, tag("p", key("best", "best"), class_="keys"))
    return figure(panel.title, drawing, tag("p", keys, class_="keys") if len(keys) > 1 else None)


def _row(measured: Measurements, name: str) -> Element:
    known = charts.evaluations_of(measured, name)
    last = [evaluation for evaluation in measured.evaluations if name in evaluation.metrics][-1]
    extremes: list[Element] = []
    for choose in (min, max):
        extreme = choose(known, key=lambda evaluation: evaluation.metrics[name], default=None)
        extremes.append(tag("td", number(extreme.metrics[name]) if extreme else "–", class_="right"))
        extremes.append(tag("td", count(extreme.step) if extreme else "–", class_="wide"))
    newest = tag("td", _value(last.metrics[name]), class_="right")
    return tag("tr", tag("th", name, scope="row"), newest, extremes)


def _value(value: float) -> Content:
    return number(value) if charts.drawable(value) else tag("b", number(value), class_="bad")


def _consequences(measured: Measurements, spec: RecordedRunSpec) -> Iterator[str]:
    """Yields what follows from the metrics that the run watches."""
    for watched in spec.watched:
        if (best := best_of(measured, watched)) is None:
            continue
        keeps = spec.checkpoint is not None and watched is spec.checkpoint.keep_best
        consequence = "the checkpoint of that step is kept" if keeps else _end(spec)
        value = number(best.metrics[watched.metric])
        yield f"Best {watched.metric}: {value} at step {count(best.step)}; {consequence}."


def _end(spec: RecordedRunSpec) -> str:
    assert spec.stop_early is not None
    by = f" by more than {number(spec.stop_early.min_delta)}" if spec.stop_early.min_delta else ""
    return f"the training ends after {plural(spec.stop_early.patience, 'evaluation')} in a row that are not better{by}"


def logged_values(measured: Measurements) -> Element | None:
    if not measured.logged:
        return None
    # A single value is not a curve.
    drawn = [logged for logged in measured.logged if len(charts.drawable_points(logged.points)) > 1]
    figures = [figure(logged.name, charts.logged_chart(measured, logged)) for logged in drawn[:MOST_CHARTS]]
    lost = any(point.broken for logged in measured.logged for point in logged.points)
    heads = ["Name", "Last", "Min", "Max", *(["Not finite"] if lost else [])]
    rows = [_logged_row(logged, lost) for logged in measured.logged]
    return section(
        "logged",
        "Logged in training",
        tag("div", figures, class_="small") if figures else None,
        table(heads, rows, right=range(1, len(heads)), class_="metrics"),
    )


def _logged_row(logged: LoggedSeries, lost: bool) -> Element:
    """Makes a row. `lost`: whether the table has a column for values that are not finite."""
    known = charts.drawable_points(logged.points)
    least = number(min(point.low or 0.0 for point in known)) if known else "–"
    greatest = number(max(point.high or 0.0 for point in known)) if known else "–"
    last = logged.points[-1] if logged.points else None
    newest = "–" if last is None else "not finite" if last.mean is None else number(last.mean)
    broken = sum(point.broken for point in logged.points)
    texts = (newest, least, greatest, *([count(broken) if broken else "–"] if lost else []))
    return tag("tr", tag("th", logged.name, scope="row"), (tag("td", text, class_="right") for text in texts))
