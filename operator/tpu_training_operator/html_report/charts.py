"""The charts of the page: loss, evaluations, throughput, learning rate and where the time went."""

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
"""Points of a curve: a page cannot show more, and the file stays small."""

SMALL_COLUMNS = 120
"""The same for a chart that shares its row with others."""

DOTTED_EVALUATIONS = 40
"""Evaluations up to which each has a dot: it shows when they were made."""

LOSSES = ("loss", "evaluation_loss", "eval_loss", "val_loss", "validation_loss")
"""Metrics that are drawn beside the training's loss; a task cannot call its own "loss", a loop of the user's can."""

P = TypeVar("P")


def loss_chart(measured: Measurements) -> Element:
    """The loss of every step, and the evaluated loss if there is one. There must be one that can be drawn."""
    losses, name = loss_columns(measured), evaluated_loss(measured)
    curves = [Curve("training", "training", _line_parts(losses))]
    if name is not None:
        curves.append(_evaluation_curve(measured, name, "evaluation", "evaluation"))
    title, axis, broken = "Loss over steps", loss_axis(measured), _broken_spans(losses)
    return draw(Plot(title, _x_axis(measured), axis, curves, broken, marks=restarts(measured)))


def loss_axis(measured: Measurements) -> Axis:
    span = [value for point in measured.losses for value in (point.low, point.high) if value is not None]
    name = evaluated_loss(measured)
    evaluated = [] if name is None else [each.metrics[name] for each in evaluations_of(measured, name)]
    return axis_of([*filter(drawable, span), *evaluated], logarithm=True)


def loss_columns(measured: Measurements) -> list[LossSpan]:
    return [_merge_losses(group) for group in _column_groups(measured.losses)]


def evaluated_loss(measured: Measurements) -> str | None:
    """The metric that is drawn beside the training's loss."""
    return next((name for name in LOSSES if evaluations_of(measured, name)), None)


def restarts(measured: Measurements) -> list[int]:
    """The steps after which later attempts began."""
    return [attempt.first for attempt in measured.attempts[1:]]


def drawable_points(points: Sequence[LossSpan]) -> list[LossSpan]:
    """Those with a value that can be drawn."""
    return [point for point in points if drawable(point.low) and drawable(point.high)]


def extent(points: Sequence[LossSpan]) -> str | None:
    """Least and greatest of the values that can be drawn, and where they are."""
    found = drawable_points(points)
    if not found:
        return None
    least, greatest = min(found, key=lambda each: each.low or 0.0), max(found, key=lambda each: each.high or 0.0)
    low = f"{number(least.low or 0.0)} ({_step_range(least.step, least.count)})"
    return f"Min {low}, max {number(greatest.high or 0.0)} ({_step_range(greatest.step, greatest.count)})"


def metric_chart(
    measured: Measurements, title: str, names: Mapping[str, str], best: Evaluation | None = None
) -> Element:
    """Metrics of the evaluations, by what they are called in the chart; each has a value that can be drawn.

    `best`: an evaluation that stands out, by the first of them.
    """
    values = [each.metrics[name] for name in names for each in evaluations_of(measured, name)]
    curves = [
        _evaluation_curve(measured, name, f"evaluation set-{number}" if number > 1 else "evaluation", label)
        for number, (name, label) in enumerate(names.items(), 1)
    ]
    marked = None if best is None else _evaluation_point(next(iter(names)), best)
    return draw(Plot(f"{title} over steps", _x_axis(measured), axis_of(values, ticks=4), curves, best=marked))


def logged_chart(measured: Measurements, logged: LoggedSeries) -> Element:
    """What the task has logged under one name, with at least one value that can be drawn."""
    columns = [_merge_losses(group) for group in _column_groups(logged.points, SMALL_COLUMNS)]
    span = [value for point in columns for value in (point.low, point.high) if value is not None]
    y = axis_of(filter(drawable, span), ticks=4)
    curve = Curve("training", logged.name, _line_parts(columns, logged.name))
    return draw(Plot(f"{logged.name} over steps", _x_axis(measured), y, [curve], _broken_spans(columns)))


def evaluations_of(measured: Measurements, name: str) -> list[Evaluation]:
    """The evaluations whose metric of that name can be drawn."""
    return [each for each in measured.evaluations if drawable(each.metrics.get(name))]


def throughput_chart(measured: Measurements, global_batch: int) -> Element | None:
    """Examples per second; includes compilations and checkpoints, but not evaluations. None without a curve: a single
    stretch is mostly compilation."""
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
    """The learning rate as it was set; None if it is not known: a loop of the user's own need not tell it."""
    rates = {each.step: each.learning_rate for each in measured.stretches if drawable(each.learning_rate)}
    rates |= {each.step: each.rate for each in measured.rates.points if drawable(each.rate)}
    if len(rates) < 2:
        return None
    steps = sorted(rates)
    # The first and the last step whatever is left out between them.
    shown = [group[0] for group in _column_groups(steps[:-1], SMALL_COLUMNS)] + steps[-1:]
    points = [_point(step, rates[step], f"step {count(step)}: {number(rates[step])}") for step in shown]
    y = axis_of([point.y for point in points], ticks=4, from_zero=True)
    curve = Curve("rate", "learning rate", [points])
    return draw(Plot("Learning rate over steps", _x_axis(measured), y, [curve]))


def norm_chart(measured: Measurements) -> Element | None:
    """The norm of the gradients before clipping; None without a curve."""
    points = [
        _point(each.step, each.gradient_norm, f"{_step_range(each.step, each.steps)}: {number(each.gradient_norm)}")
        for each in _stretch_columns(measured, SMALL_COLUMNS)
        if each.gradient_norm is not None and drawable(each.gradient_norm)
    ]
    if len(points) < 2:
        return None
    y = axis_of([point.y for point in points], ticks=4, from_zero=True)
    return draw(Plot("Gradient norm over steps", _x_axis(measured), y, [Curve("rate", "gradient norm", [points])]))


def split_bar(split: Mapping[str, tuple[str, float]]) -> Element:
    """One bar, cut in proportion to the seconds of each phase, which has a name, too."""
    whole = sum(seconds for _, seconds in split.values())
    left, pieces = 0.0, []
    for phase, (name, seconds) in split.items():
        width = WIDTH * seconds / whole
        pieces.append(bar(f"phase {phase}", left, width, f"{name}: {duration(seconds)}, {share(seconds / whole)}"))
        left += width
    told = ", ".join(f"{name} {share(seconds / whole)}" for name, seconds in split.values())
    size = f"0 0 {WIDTH} {HEIGHT}"
    return tag(
        "svg",
        pieces,
        class_="split",
        role="img",
        aria_label=f"Time by phase: {told}",
        viewBox=size,
        preserveAspectRatio="none",
    )


def drawable(value: float | None) -> bool:
    """Finite, and so is the difference between any two."""
    return value is not None and abs(value) < 1e300


def _column_groups(points: Sequence[P], limit: int = COLUMNS) -> list[Sequence[P]]:
    """At most `limit` groups of neighbours."""
    each = -(-len(points) // limit) or 1
    return [points[start : start + each] for start in range(0, len(points), each)]


def _merge_losses(group: Sequence[LossSpan]) -> LossSpan:
    steps, broken = sum(each.count for each in group), sum(each.broken for each in group)
    finite = [each for each in group if each.mean is not None and each.low is not None and each.high is not None]
    if not finite:
        return LossSpan(step=group[-1].step, count=steps, mean=None, low=None, high=None, broken=broken)
    # Each term is divided first: the sum of losses near the largest float would overflow.
    mean = math.fsum((each.mean or 0.0) * ((each.count - each.broken) / (steps - broken)) for each in finite)
    low, high = min(each.low or 0.0 for each in finite), max(each.high or 0.0 for each in finite)
    return LossSpan(step=group[-1].step, count=steps, mean=min(max(mean, low), high), low=low, high=high, broken=broken)


def _stretch_columns(measured: Measurements, limit: int = COLUMNS) -> list[Stretch]:
    return [
        Stretch(
            step=group[-1].step,
            steps=sum(each.steps for each in group),
            seconds=sum(each.seconds for each in group),
            split={"evaluate": sum(each.split.get("evaluate", 0.0) for each in group)},
            learning_rate=group[-1].learning_rate,
            gradient_norm=_mean_norm(group),
        )
        for group in _column_groups(measured.stretches, limit)
    ]


def _mean_norm(group: Sequence[Stretch]) -> float | None:
    known = [(each.gradient_norm, each.steps) for each in group if each.gradient_norm is not None]
    steps = sum(count for _, count in known)
    return sum(norm * (count / steps) for norm, count in known) if known else None


def _x_axis(measured: Measurements) -> Axis:
    """The same for every chart of a page: from the first known step to the last."""
    first = measured.losses[0].step - measured.losses[0].count if measured.losses else 0
    known = [point.step for point in measured.losses[-1:]] + [each.step for each in measured.evaluations[-1:]]
    return step_axis(first, max(known, default=1))


def _line_parts(losses: Sequence[LossSpan], name: str = "loss") -> list[list[Point]]:
    """The line ends at a column without a finite value and starts again after it."""
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
    """From which step to which there are values that are not finite, neighbouring columns together."""
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
    found = evaluations_of(measured, name)
    return Curve(kind, label, [[_evaluation_point(name, each) for each in found]], DOTTED_EVALUATIONS)


def _evaluation_point(name: str, evaluation: Evaluation) -> Point:
    value = evaluation.metrics[name]
    return _point(evaluation.step, value, f"step {count(evaluation.step)}: evaluated {name} {number(value)}")


def _point(step: int, value: float, text: str) -> Point:
    return Point(step, value, value, value, text)


def _step_range(step: int, steps: int) -> str:
    return f"step {count(step)}" if steps == 1 else f"steps {count(step - steps + 1)} to {count(step)}"
