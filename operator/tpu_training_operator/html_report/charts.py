"""Makes the page's charts: loss, metrics, throughput, learning rate, gradient norm, and the growth over a ladder.

Whatever a history has is a sequence of spans first. Neighbours are merged into as many columns as a page can show.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

from tpu_training_operator.api.status import RungStatus
from tpu_training_operator.api.words import read_number
from tpu_training_operator.html_report.formatting import count, duration, number, plural
from tpu_training_operator.html_report.history import Evaluation, History, Span, Watched
from tpu_training_operator.html_report.plot import FEW, Axis, Curve, Plot, Point, axis_over, drawable, step_axis

COLUMNS = 240
"""The most points of a curve: a page cannot show more, and the file stays small."""

SMALL_COLUMNS = 120
"""The most points of a curve in a chart that shares its row with others."""

DOTTED_EVALUATIONS = 40
"""The most evaluations of which each has a dot, to show when they were made."""

MOST_CHARTS = 12
"""Charts in a section; its table has all metrics."""

MOST_SETS = 6
"""The most validation sets in one chart: more colours could not be distinguished."""

LOSSES = ("loss", "evaluation_loss", "eval_loss", "val_loss", "validation_loss")
"""Names of the metric that is drawn beside the training's loss. A task cannot use "loss", but a user's own loop can."""

P = TypeVar("P")


def loss_plot(history: History) -> Plot | None:
    """Plots the loss of every step, and the evaluated loss if there is one. None if no loss can be drawn."""
    if not any(map(is_drawable, history.losses)):
        return None
    spans, evaluated = merge(history.losses), _evaluated_loss(history)
    curves = [_curve("training", "training", spans, "loss")]
    if evaluated is not None:
        curves.append(_metric_curve(history, evaluated, "evaluation", "evaluation"))
    y = axis_over(curves, logarithm=True)
    spread = ": mean and range" if any(span.count > 1 for span in spans) else ""
    marks, broken = _restarts(history), _broken_spans(spans)
    legend = [("training", f"training{spread}{', on a logarithmic axis' if y.logarithmic else ''}")]
    legend += [(curve.kind, curve.name) for curve in curves[1:]]
    legend += [("broken", "not finite")] if broken else []
    legend += [("mark", "a new attempt")] if marks else []
    return Plot("Loss over steps", _x_axis(history), y, curves, legend, broken, marks=marks)


def loss_note(history: History) -> str:
    """Describes the least and the greatest loss and their steps, and how many losses were not finite."""
    broken = sum(span.broken for span in history.losses)
    lost = f"The loss of {plural(broken, 'step')} was NaN or infinite" if broken else ""
    ends = extremes(history.losses)
    if ends is None:
        return f"{lost or 'No loss can be drawn'}, so there is no curve."
    (low, least), (high, greatest) = ends
    lost = f" {lost}: marked at the top, left out of the curve." if broken else ""
    return f"Min {number(low)} ({_steps(least)}), max {number(high)} ({_steps(greatest)}).{lost}"


def logged_plots(history: History) -> Iterator[tuple[str, Plot]]:
    """Plots the values that the task logs. A single value is not a curve."""
    drawn = [logged for logged in history.logged if sum(map(is_drawable, logged.points)) > 1]
    for logged in drawn[:MOST_CHARTS]:
        spans = merge(logged.points, SMALL_COLUMNS)
        curves = [_curve("training", logged.name, spans, logged.name)]
        y, title = axis_over(curves, ticks=4), f"{logged.name} over steps"
        yield logged.name, Plot(title, _x_axis(history), y, curves, broken=_broken_spans(spans))


def metric_plots(history: History) -> Iterator[tuple[str, Plot]]:
    """Plots the metrics of the evaluations. The evaluated loss is drawn beside the training's, and a single value is
    not a curve."""
    beside = _evaluated_loss(history)
    names = [name for name in history.metrics if name != beside and len(evaluations_of(history, name)) > 1]
    for title, labels in panels(names)[:MOST_CHARTS]:
        curves = [
            _metric_curve(history, name, f"evaluation set-{place}" if place > 1 else "evaluation", label)
            for place, (name, label) in enumerate(labels.items(), 1)
        ]
        watched = next((metric for metric in history.watched if [metric.metric] == [*labels]), None)
        best = None if watched is None else best_of(history, watched)
        legend = [(curve.kind, curve.name) for curve in curves] if len(curves) > 1 else []
        legend += [] if best is None else [("best", "best")]
        marked = None if watched is None or best is None else Point(best.step, best.metrics[watched.metric])
        y = axis_over(curves, ticks=4)
        yield title, Plot(f"{title} over steps", _x_axis(history), y, curves, legend, best=marked)


def panels(names: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """Groups the metrics into charts: each chart's title, and the label of each of its metrics.

    Names before a slash are validation sets; they share a metric's chart.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        metric = name.partition("/")[2] or name
        groups.setdefault(metric, []).append(name)
    charts: list[tuple[str, dict[str, str]]] = []
    for metric, group in groups.items():
        if 1 < len(group) <= MOST_SETS:
            charts.append((metric, {name: name.partition("/")[0] for name in group}))
        else:
            charts += [(name, {name: name}) for name in group]
    return charts


def throughput_plot(history: History) -> Plot | None:
    """Plots the examples per second, with compilations and checkpoints and without evaluations. None for a single
    stretch, which is mostly compilation."""
    if len(history.stretches) < 2:
        return None
    # The mean of seconds per step is weighted with the steps; that of examples per second would not be.
    times = [_span(each.step, each.training_seconds / each.steps, each.steps) for each in history.stretches]
    points = []
    for span in merge(times):
        seconds = max(span.mean or 0.0, 1e-9 / span.count)
        rate = history.global_batch / seconds
        text = f"{_steps(span)}: {number(rate)} examples/s, {duration(seconds)} per step"
        points.append(Point(span.step, rate, text))
    curves, level, marks = [Curve("throughput", "training", [points])], history.examples_per_second, _restarts(history)
    y = axis_over(curves, level or 0.0, ticks=4, from_zero=True)
    legend = [("throughput", "examples per second, without evaluations")]
    legend += [] if level is None else [("level", f"{number(level)} after compilation")]
    legend += [("mark", "a new attempt")] if marks else []
    title = "Examples per second over steps"
    return Plot(title, _x_axis(history), y, curves, legend, level=level, marks=marks)


def recipe_plots(history: History) -> Iterator[tuple[str, Plot]]:
    """Plots the learning rate as it was set, and the norm of the gradients; a single value is not a curve."""
    rates = {stretch.step: stretch.learning_rate for stretch in history.stretches}
    rates |= {point.step: point.rate for point in history.rates}
    known = [_span(step, rate) for step, rate in sorted(rates.items()) if drawable(rate)]
    # The first and the last step are always shown.
    shown = [group[0] for group in _groups(known[:-1], SMALL_COLUMNS)] + known[-1:]
    norms = merge([_span(each.step, each.gradient_norm, each.steps) for each in history.stretches], SMALL_COLUMNS)
    # Without the range of the means: it is not that of the norms.
    means = [_span(span.step, span.mean, span.count) for span in norms if span.mean is not None]
    for caption, spans in (("Learning rate", shown), ("Gradient norm, before clipping", means)):
        if len(spans) > 1:
            name, _, _ = caption.partition(",")
            curves = [_curve("rate", name.lower(), spans, name.lower())]
            y = axis_over(curves, ticks=4, from_zero=True)
            yield caption, Plot(f"{name} over steps", _x_axis(history), y, curves)


def growth_plot(rungs: Sequence[RungStatus]) -> Plot | None:
    """Plots examples per second over chips, and a line at the first rung's pace per chip."""
    known = [
        (rung, rate) for rung in rungs if (rate := read_drawable(rung.examples_per_second) or 0.0) > 0 < rung.chips
    ]
    chips = sorted({float(rung.chips) for rung, _ in known})
    if len(chips) < 2:
        return None
    first, rate = known[0]
    pace = rate / first.chips
    actual = [Point(rung.chips, rate, f"{rung.slice}: {number(rate)} examples/s") for rung, rate in known]
    ideal = [Point(number, pace * number) for number in chips]
    curves = [Curve("evaluation", "at the pace of the first rung", [ideal]), Curve("throughput", "measured", [actual])]
    x, y = Axis(0.0, chips[-1], tuple(chips)), axis_over(curves, ticks=4, from_zero=True)
    ideal_words = f"at the pace of {first.slice}, {number(pace)} per chip"
    legend = [("throughput", "examples per second"), ("evaluation", ideal_words)]
    return Plot("Examples per second over chips", x, y, curves, legend, x_name="chips")


def read_drawable(text: str | None) -> float | None:
    """Returns a number of a rung's status; None if it is unknown or cannot be drawn."""
    value = read_number(text)
    return value if drawable(value) else None


def best_of(history: History, watched: Watched) -> Evaluation | None:
    """Returns the first of the best evaluations; None without a value."""
    choose = max if watched.mode == "Max" else min
    candidates = evaluations_of(history, watched.metric)
    return choose(candidates, key=lambda evaluation: evaluation.metrics[watched.metric], default=None)


def evaluations_of(history: History, name: str) -> list[Evaluation]:
    """Returns the evaluations whose metric of that name can be drawn."""
    return [evaluation for evaluation in history.evaluations if drawable(evaluation.metrics.get(name))]


def extremes(spans: Sequence[Span]) -> tuple[tuple[float, Span], tuple[float, Span]] | None:
    """Returns the least and the greatest value that can be drawn, with their spans; None if there is none."""
    known = [(span.low or 0.0, span.high or 0.0, span) for span in spans if is_drawable(span)]
    if not known:
        return None
    low, _, least = min(known, key=lambda end: end[0])
    _, high, greatest = max(known, key=lambda end: end[1])
    return (low, least), (high, greatest)


def is_drawable(span: Span) -> bool:
    return drawable(span.low) and drawable(span.high)


def merge(spans: Sequence[Span], limit: int = COLUMNS) -> list[Span]:
    """Merges neighbours, so that at most `limit` spans are left."""
    return [_merge(group) for group in _groups(spans, limit)]


def _groups(items: Sequence[P], limit: int) -> list[Sequence[P]]:
    """Divides the items into at most `limit` groups of neighbours."""
    size = -(-len(items) // limit) or 1
    return [items[start : start + size] for start in range(0, len(items), size)]


def _merge(group: Sequence[Span]) -> Span:
    step, steps, broken = group[-1].step, sum(span.count for span in group), sum(span.broken for span in group)
    finite = [
        # A finite mean is that of one step at least, whatever the document says.
        (max(span.count - span.broken, 1), span.mean, span.low, span.high)
        for span in group
        if span.mean is not None and span.low is not None and span.high is not None
    ]
    if not finite:
        return Span(step, steps, None, None, None, broken)
    # Each term is divided first: the sum of losses near the largest float would overflow.
    total = sum(weight for weight, *_ in finite)
    mean = math.fsum(value * (weight / total) for weight, value, *_ in finite)
    low, high = min(low for *_, low, _ in finite), max(high for *_, high in finite)
    return Span(step, steps, min(max(mean, low), high), low, high, broken)


def _span(step: int, value: float | None, steps: int = 1) -> Span:
    value = value if drawable(value) else None
    return Span(step, steps, value, value, value, 0 if drawable(value) else steps)


def _curve(kind: str, name: str, spans: Sequence[Span], value_name: str, dotted: int = FEW) -> Curve:
    """Makes a curve; one part ends where no value is finite, and the next starts after it. `value_name`: what the
    tooltips call the value."""
    parts: list[list[Point]] = [[]]
    for span in spans:
        if span.mean is None or span.low is None or span.high is None:
            parts.append([])
            continue
        spread = f" ({number(span.low)} to {number(span.high)})" if span.low < span.high else ""
        broken = f", {count(span.broken)} not finite" if span.broken else ""
        text = f"{_steps(span)}: {value_name} {number(span.mean)}{spread}{broken}"
        parts[-1].append(Point(span.step, span.mean, text, (span.low, span.high)))
    return Curve(kind, name, parts, dotted)


def _metric_curve(history: History, name: str, kind: str, label: str) -> Curve:
    spans = [_span(evaluation.step, evaluation.metrics[name]) for evaluation in evaluations_of(history, name)]
    return _curve(kind, label, spans, f"evaluated {name}", DOTTED_EVALUATIONS)


def _evaluated_loss(history: History) -> str | None:
    """Returns the name of the metric that is drawn beside the training's loss."""
    return next((name for name in LOSSES if evaluations_of(history, name)), None)


def _restarts(history: History) -> list[int]:
    """Returns the steps after which later attempts began."""
    return [attempt.first for attempt in history.attempts[1:]]


def _x_axis(history: History) -> Axis:
    """Returns the x axis of every chart: from the first known step to the last."""
    first = history.losses[0].step - history.losses[0].count if history.losses else 0
    ends = [*(span.step for span in history.losses[-1:]), *(last.step for last in history.evaluations[-1:])]
    return step_axis(first, max(ends, default=1))


def _broken_spans(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Returns the first and last step of each stretch with values that are not finite; neighbours are merged."""
    marks: list[tuple[float, float]] = []
    follows = False
    for span in spans:
        if span.broken:
            first = marks.pop()[0] if follows else span.step - span.count + 1
            marks.append((first, span.step))
        follows = bool(span.broken)
    return marks


def _steps(span: Span) -> str:
    if span.count == 1:
        return f"step {count(span.step)}"
    return f"steps {count(span.step - span.count + 1)} to {count(span.step)}"
