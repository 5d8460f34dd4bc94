"""Draws the page's charts: loss, evaluations, throughput, learning rate, gradient norm and time by phase."""

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar
from xml.etree.ElementTree import Element

from tpu_training_operator.html_report.formatting import count, duration, number, share
from tpu_training_operator.html_report.history import Evaluation, LoggedSeries, LossSpan, Measurements, Stretch
from tpu_training_operator.html_report.markup import tag
from tpu_training_operator.html_report.plot import (
    HEIGHT,
    WIDTH,
    Axis,
    Curve,
    Plot,
    Point,
    axis_of,
    bar,
    draw,
    step_axis,
)

COLUMNS = 240
"""The most points of a curve: a page cannot show more, and the file stays small."""

SMALL_COLUMNS = 120
"""The most points of a curve in a chart that shares its row with others."""

DOTTED_EVALUATIONS = 40
"""The most evaluations of which each has a dot, to show when they were made."""

LOSSES = ("loss", "evaluation_loss", "eval_loss", "val_loss", "validation_loss")
"""Names of the metric that is drawn beside the training's loss. A task cannot use "loss", but a user's own loop can."""

P = TypeVar("P")


def loss_chart(measured: Measurements) -> Element:
    """Draws the loss of every step, and the evaluated loss if there is one. At least one loss must be drawable."""
    losses, name = loss_columns(measured), evaluated_loss(measured)
    curves = [Curve("training", "training", _line_parts(losses))]
    if name is not None:
        curves.append(_evaluation_curve(measured, name, "evaluation", "evaluation"))
    title, axis, broken = "Loss over steps", loss_axis(measured), _broken_spans(losses)
    return draw(Plot(title, _x_axis(measured), axis, curves, broken, marks=restarts(measured)))


def loss_axis(measured: Measurements) -> Axis:
    span = [value for point in measured.losses for value in (point.low, point.high) if value is not None]
    name = evaluated_loss(measured)
    evaluated = [] if name is None else [e.metrics[name] for e in evaluations_of(measured, name)]
    return axis_of([*filter(drawable, span), *evaluated], logarithm=True)


def loss_columns(measured: Measurements) -> list[LossSpan]:
    return [_merge_losses(group) for group in _column_groups(measured.losses)]


def evaluated_loss(measured: Measurements) -> str | None:
    """Returns the name of the metric that is drawn beside the training's loss."""
    return next((name for name in LOSSES if evaluations_of(measured, name)), None)


def restarts(measured: Measurements) -> list[int]:
    """Returns the steps after which later attempts began."""
    return [attempt.first for attempt in measured.attempts[1:]]


def drawable_points(points: Sequence[LossSpan]) -> list[LossSpan]:
    """Returns the points with a value that can be drawn."""
    return [point for point in points if drawable(point.low) and drawable(point.high)]


def extent(points: Sequence[LossSpan]) -> str | None:
    """Describes the least and the greatest drawable value, and their steps; None if there is none."""
    known = drawable_points(points)
    if not known:
        return None
    least, greatest = min(known, key=lambda point: point.low or 0.0), max(known, key=lambda point: point.high or 0.0)
    low = f"{number(least.low or 0.0)} ({_step_range(least.step, least.count)})"
    return f"Min {low}, max {number(greatest.high or 0.0)} ({_step_range(greatest.step, greatest.count)})"


def metric_chart(
    measured: Measurements, title: str, names: Mapping[str, str], best: Evaluation | None = None
) -> Element:
    """Draws metrics of the evaluations, each with at least one drawable value. `names`: their labels in the chart.

    `best`: an evaluation to mark, on the first metric's curve.
    """
    values = [evaluation.metrics[name] for name in names for evaluation in evaluations_of(measured, name)]
    curves = [
        _evaluation_curve(measured, name, f"evaluation set-{number}" if number > 1 else "evaluation", label)
        for number, (name, label) in enumerate(names.items(), 1)
    ]
    marked = None if best is None else _evaluation_point(next(iter(names)), best)
    return draw(Plot(f"{title} over steps", _x_axis(measured), axis_of(values, ticks=4), curves, best=marked))


def logged_chart(measured: Measurements, logged: LoggedSeries) -> Element:
    """Draws the values that the task logs under one name; at least one must be drawable."""
    columns = [_merge_losses(group) for group in _column_groups(logged.points, SMALL_COLUMNS)]
    span = [value for point in columns for value in (point.low, point.high) if value is not None]
    y = axis_of(filter(drawable, span), ticks=4)
    curve = Curve("training", logged.name, _line_parts(columns, logged.name))
    return draw(Plot(f"{logged.name} over steps", _x_axis(measured), y, [curve], _broken_spans(columns)))


def evaluations_of(measured: Measurements, name: str) -> list[Evaluation]:
    """Returns the evaluations whose metric of that name can be drawn."""
    return [evaluation for evaluation in measured.evaluations if drawable(evaluation.metrics.get(name))]


def throughput_chart(measured: Measurements, global_batch: int) -> Element | None:
    """Draws the examples per second, with compilations and checkpoints and without evaluations. None for a single
    stretch, which is mostly compilation."""
    if len(measured.stretches) < 2:
        return None
    points = []
    for stretch in _stretch_columns(measured):
        seconds = max(stretch.training_seconds, 1e-9)
        rate = global_batch * stretch.steps / seconds
        text = f"{_step_range(stretch.step, stretch.steps)}: {number(rate)} examples/s"
        points.append(_point(stretch.step, rate, f"{text}, {duration(seconds / stretch.steps)} per step"))
    y = axis_of([*(p.y for p in points), measured.examples_per_second or 0.0], ticks=4, from_zero=True)
    curve, level, marks = Curve("throughput", "training", [points]), measured.examples_per_second, restarts(measured)
    return draw(Plot("Examples per second over steps", _x_axis(measured), y, [curve], level=level, marks=marks))


def rate_chart(measured: Measurements) -> Element | None:
    """Draws the learning rate as it was set; None if fewer than two values are known."""
    rates = {stretch.step: stretch.learning_rate for stretch in measured.stretches if drawable(stretch.learning_rate)}
    rates |= {point.step: point.rate for point in measured.rates.points if drawable(point.rate)}
    if len(rates) < 2:
        return None
    steps = sorted(rates)
    # The first and the last step are always shown.
    shown = [group[0] for group in _column_groups(steps[:-1], SMALL_COLUMNS)] + steps[-1:]
    points = [_point(step, rates[step], f"step {count(step)}: {number(rates[step])}") for step in shown]
    y = axis_of([point.y for point in points], ticks=4, from_zero=True)
    curve = Curve("rate", "learning rate", [points])
    return draw(Plot("Learning rate over steps", _x_axis(measured), y, [curve]))


def norm_chart(measured: Measurements) -> Element | None:
    """Draws the norm of the gradients before clipping; None if fewer than two values are known."""
    points = [
        _point(
            stretch.step,
            stretch.gradient_norm,
            f"{_step_range(stretch.step, stretch.steps)}: {number(stretch.gradient_norm)}",
        )
        for stretch in _stretch_columns(measured, SMALL_COLUMNS)
        if stretch.gradient_norm is not None and drawable(stretch.gradient_norm)
    ]
    if len(points) < 2:
        return None
    y = axis_of([point.y for point in points], ticks=4, from_zero=True)
    return draw(Plot("Gradient norm over steps", _x_axis(measured), y, [Curve("rate", "gradient norm", [points])]))


def split_bar(split: Mapping[str, tuple[str, float]]) -> Element:
    """Draws one bar, divided in proportion to the phases' seconds. `split`: each phase's name and seconds."""
    total = sum(seconds for _, seconds in split.values())
    left, pieces = 0.0, []
    for phase, (name, seconds) in split.items():
        width = WIDTH * seconds / total
        pieces.append(bar(f"phase {phase}", left, width, f"{name}: {duration(seconds)}, {share(seconds / total)}"))
        left += width
    shares = ", ".join(f"{name} {share(seconds / total)}" for name, seconds in split.values())
    size = f"0 0 {WIDTH} {HEIGHT}"
    return tag(
        "svg",
        pieces,
        class_="split",
        role="img",
        aria_label=f"Time by phase: {shares}",
        viewBox=size,
        preserveAspectRatio="none",
    )


def drawable(value: float | None) -> bool:
    """Whether the value is finite, and small enough that differences are finite, too."""
    return value is not None and abs(value) < 1e300


def _column_groups(points: Sequence[P], limit: int = COLUMNS) -> list[Sequence[P]]:
    """Divides the points into at most `limit` groups of neighbours."""
    size = -(-len(points) // limit) or 1
    return [points[start : start + size] for start in range(0, len(points), size)]


def _merge_losses(group: Sequence[LossSpan]) -> LossSpan:
    steps, broken = sum(point.count for point in group), sum(point.broken for point in group)
    finite = [point for point in group if point.mean is not None and point.low is not None and point.high is not None]
    if not finite:
        return LossSpan(step=group[-1].step, count=steps, mean=None, low=None, high=None, broken=broken)
    # Each term is divided first: the sum of losses near the largest float would overflow.
    mean = math.fsum((point.mean or 0.0) * ((point.count - point.broken) / (steps - broken)) for point in finite)
    low, high = min(point.low or 0.0 for point in finite), max(point.high or 0.0 for point in finite)
    return LossSpan(step=group[-1].step, count=steps, mean=min(max(mean, low), high), low=low, high=high, broken=broken)


def _stretch_columns(measured: Measurements, limit: int = COLUMNS) -> list[Stretch]:
    return [
        Stretch(
            step=group[-1].step,
            steps=sum(stretch.steps for stretch in group),
            seconds=sum(stretch.seconds for stretch in group),
            split={"evaluate": sum(stretch.split.get("evaluate", 0.0) for stretch in group)},
            learning_rate=group[-1].learning_rate,
            gradient_norm=_mean_norm(group),
        )
        for group in _column_groups(measured.stretches, limit)
    ]


def _mean_norm(group: Sequence[Stretch]) -> float | None:
    known = [(stretch.gradient_norm, stretch.steps) for stretch in group if stretch.gradient_norm is not None]
    steps = sum(count for _, count in known)
    return sum(norm * (count / steps) for norm, count in known) if known else None


def _x_axis(measured: Measurements) -> Axis:
    """Returns the x axis of every chart: from the first known step to the last."""
    first = measured.losses[0].step - measured.losses[0].count if measured.losses else 0
    known = [point.step for point in measured.losses[-1:]] + [
        evaluation.step for evaluation in measured.evaluations[-1:]
    ]
    return step_axis(first, max(known, default=1))


def _line_parts(losses: Sequence[LossSpan], name: str = "loss") -> list[list[Point]]:
    """Divides the losses into lines: one ends where no value is finite, and the next starts after it."""
    parts: list[list[Point]] = [[]]
    for loss in losses:
        if loss.mean is None or loss.low is None or loss.high is None:
            parts.append([])
            continue
        spread = f" ({number(loss.low)} to {number(loss.high)})" if loss.low < loss.high else ""
        broken = f", {count(loss.broken)} not finite" if loss.broken else ""
        text = f"{_step_range(loss.step, loss.count)}: {name} {number(loss.mean)}{spread}{broken}"
        parts[-1].append(Point(loss.step, loss.mean, loss.low, loss.high, text))
    return parts


def _broken_spans(losses: Sequence[LossSpan]) -> list[tuple[float, float]]:
    """Returns the first and last step of each span with values that are not finite; neighbouring spans are merged."""
    spans: list[tuple[float, float]] = []
    follows = False
    for loss in losses:
        if loss.broken and follows:
            spans[-1] = (spans[-1][0], loss.step)
        elif loss.broken:
            spans.append((loss.step - loss.count + 1, loss.step))
        follows = bool(loss.broken)
    return spans


def _evaluation_curve(measured: Measurements, name: str, kind: str, label: str) -> Curve:
    points = [_evaluation_point(name, evaluation) for evaluation in evaluations_of(measured, name)]
    return Curve(kind, label, [points], DOTTED_EVALUATIONS)


def _evaluation_point(name: str, evaluation: Evaluation) -> Point:
    value = evaluation.metrics[name]
    return _point(evaluation.step, value, f"step {count(evaluation.step)}: evaluated {name} {number(value)}")


def _point(step: int, value: float, text: str) -> Point:
    return Point(step, value, value, value, text)


def _step_range(step: int, steps: int) -> str:
    return f"step {count(step)}" if steps == 1 else f"steps {count(step - steps + 1)} to {count(step)}"
