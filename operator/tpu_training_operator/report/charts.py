"""The charts of the page: loss, evaluations, throughput, learning rate and where the time went."""

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar
from xml.etree.ElementTree import Element

from tpu_training_operator.report.formatting import count, duration, number, share
from tpu_training_operator.report.history import Evaluation, Logged, Losses, Measured, Stretch
from tpu_training_operator.report.markup import tag
from tpu_training_operator.report.plot import HEIGHT, WIDTH, Axis, Curve, Plot, Point, axis_of, bar, draw, step_axis

COLUMNS = 240
"""Points of a curve: a page cannot show more, and the file stays small."""

P = TypeVar("P")


def loss_chart(measured: Measured) -> Element:
    """The loss of every step, and the evaluated loss if there is one. There must be a loss."""
    losses, evaluated = loss_columns(measured), evaluations_of(measured, "loss")
    curves = [Curve("training", _unbroken(losses))]
    if evaluated:
        curves.append(Curve("evaluation", [[_evaluated("loss", each) for each in evaluated]], dots=True))
    broken = [point.step for point in losses if point.broken]
    return draw(Plot("Loss over steps", _steps(measured), loss_axis(measured), curves, broken=broken))


def loss_axis(measured: Measured) -> Axis:
    span = [value for point in measured.losses for value in (point.low, point.high) if value is not None]
    evaluated = [each.metrics["loss"] for each in evaluations_of(measured, "loss")]
    return axis_of([*filter(drawable, span), *evaluated], logarithm=True)


def loss_columns(measured: Measured) -> list[Losses]:
    return [_merged_losses(group) for group in _columns(measured.losses)]


def metric_chart(measured: Measured, name: str) -> Element:
    """One metric of the evaluations, with at least one value that can be drawn."""
    found = evaluations_of(measured, name)
    y = axis_of([each.metrics[name] for each in found], ticks=4)
    curve = Curve("evaluation", [[_evaluated(name, each) for each in found]], dots=len(found) <= COLUMNS // 4)
    return draw(Plot(f"{name} over steps", _steps(measured), y, [curve]))


def logged_chart(measured: Measured, logged: Logged) -> Element:
    """What the task has logged under one name, with at least one value that can be drawn."""
    columns = [_merged_losses(group) for group in _columns(logged.points)]
    span = [value for point in columns for value in (point.low, point.high) if value is not None]
    y = axis_of(filter(drawable, span), ticks=4)
    broken = [point.step for point in columns if point.broken]
    curve = Curve("training", _unbroken(columns, logged.name))
    return draw(Plot(f"{logged.name} over steps", _steps(measured), y, [curve], broken=broken))


def evaluations_of(measured: Measured, name: str) -> list[Evaluation]:
    """The evaluations whose metric of that name can be drawn."""
    return [each for each in measured.evaluations if drawable(each.metrics.get(name))]


def throughput_chart(measured: Measured, global_batch: int) -> Element:
    """Examples per second; includes compilations and checkpoints, but not evaluations. There must be a stretch."""
    points = []
    for stretch in _stretch_columns(measured):
        seconds = max(stretch.training_seconds, 1e-9)
        rate = global_batch * stretch.steps / seconds
        text = f"{_steps_up_to(stretch.step, stretch.steps)}: {number(rate)} examples/s"
        points.append(_at(stretch.step, rate, f"{text}, {duration(seconds / stretch.steps)} per step"))
    y = axis_of([*(p.y for p in points), measured.examples_per_second or 0.0], ticks=4, from_zero=True)
    curve, level = Curve("throughput", [points]), measured.examples_per_second
    return draw(Plot("Examples per second over steps", _steps(measured), y, [curve], level=level))


def has_rates(measured: Measured) -> bool:
    """Whether the learning rate is known; a loop of the user's own need not tell it."""
    return bool(measured.stretches) and all(drawable(each.learning_rate) for each in measured.stretches)


def rate_chart(measured: Measured) -> Element:
    """The learning rate as it was set, which must be known."""
    points = [
        _at(each.step, each.learning_rate, f"step {count(each.step)}: {number(each.learning_rate)}")
        for each in _stretch_columns(measured)
    ]
    y = axis_of([point.y for point in points], ticks=4, from_zero=True)
    return draw(Plot("Learning rate over steps", _steps(measured), y, [Curve("rate", [points])]))


def norm_chart(measured: Measured) -> Element | None:
    """The norm of the gradients before clipping; None if it was not measured."""
    points = [
        _at(each.step, each.gradient_norm, f"{_steps_up_to(each.step, each.steps)}: {number(each.gradient_norm)}")
        for each in _stretch_columns(measured)
        if each.gradient_norm is not None and drawable(each.gradient_norm)
    ]
    if not points:
        return None
    y = axis_of([point.y for point in points], ticks=4, from_zero=True)
    return draw(Plot("Gradient norm over steps", _steps(measured), y, [Curve("rate", [points])]))


def split_bar(split: Mapping[str, float]) -> Element:
    """One bar, cut in proportion to the seconds of each phase."""
    whole = sum(split.values())
    left, pieces = 0.0, []
    for phase, seconds in split.items():
        if seconds > 0:
            width = WIDTH * seconds / whole
            text = f"{phase}: {duration(seconds)}, {share(seconds / whole)}"
            pieces.append(bar(f"phase {phase}", left, width, text))
            left += width
    size = f"0 0 {WIDTH} {HEIGHT}"
    return tag(
        "svg",
        pieces,
        class_="split",
        role="img",
        aria_label="Time by phase",
        viewBox=size,
        preserveAspectRatio="none",
    )


def drawable(value: float | None) -> bool:
    """Finite, and so is the difference between any two."""
    return value is not None and abs(value) < 1e300


def _columns(points: Sequence[P]) -> list[Sequence[P]]:
    """At most COLUMNS groups of neighbours."""
    each = -(-len(points) // COLUMNS) or 1
    return [points[start : start + each] for start in range(0, len(points), each)]


def _merged_losses(group: Sequence[Losses]) -> Losses:
    steps, broken = sum(each.count for each in group), sum(each.broken for each in group)
    finite = [each for each in group if each.mean is not None and each.low is not None and each.high is not None]
    if not finite:
        return Losses(step=group[-1].step, count=steps, mean=None, low=None, high=None, broken=broken)
    # Each term is divided first: the sum of losses near the largest float would overflow.
    mean = math.fsum((each.mean or 0.0) * ((each.count - each.broken) / (steps - broken)) for each in finite)
    low, high = min(each.low or 0.0 for each in finite), max(each.high or 0.0 for each in finite)
    return Losses(step=group[-1].step, count=steps, mean=min(max(mean, low), high), low=low, high=high, broken=broken)


def _stretch_columns(measured: Measured) -> list[Stretch]:
    return [
        Stretch(
            step=group[-1].step,
            steps=sum(each.steps for each in group),
            seconds=sum(each.seconds for each in group),
            split={"evaluate": sum(each.split.get("evaluate", 0.0) for each in group)},
            learning_rate=group[-1].learning_rate,
            gradient_norm=_mean_norm(group),
        )
        for group in _columns(measured.stretches)
    ]


def _mean_norm(group: Sequence[Stretch]) -> float | None:
    known = [(each.gradient_norm, each.steps) for each in group if each.gradient_norm is not None]
    steps = sum(count for _, count in known)
    return sum(norm * (count / steps) for norm, count in known) if known else None


def _steps(measured: Measured) -> Axis:
    """The same for every chart of a page: from the first known step to the last."""
    first = measured.losses[0].step - measured.losses[0].count if measured.losses else 0
    known = [point.step for point in measured.losses[-1:]] + [each.step for each in measured.evaluations[-1:]]
    return step_axis(first, max(known, default=1))


def _unbroken(losses: Sequence[Losses], name: str = "loss") -> list[list[Point]]:
    """The line ends at a column without a finite value and starts again after it."""
    parts: list[list[Point]] = [[]]
    for loss in losses:
        if loss.mean is None or loss.low is None or loss.high is None:
            parts.append([])
            continue
        spread = f" ({number(loss.low)} to {number(loss.high)})" if loss.low < loss.high else ""
        broken = f", {count(loss.broken)} not finite" if loss.broken else ""
        text = f"{_steps_up_to(loss.step, loss.count)}: {name} {number(loss.mean)}{spread}{broken}"
        parts[-1].append(Point(loss.step, loss.mean, loss.low, loss.high, text))
    return parts


def _evaluated(name: str, evaluation: Evaluation) -> Point:
    value = evaluation.metrics[name]
    return _at(evaluation.step, value, f"step {count(evaluation.step)}: evaluated {name} {number(value)}")


def _at(step: int, value: float, text: str) -> Point:
    return Point(step, value, value, value, text)


def _steps_up_to(step: int, steps: int) -> str:
    return f"step {count(step)}" if steps == 1 else f"steps {count(step - steps + 1)} to {count(step)}"
