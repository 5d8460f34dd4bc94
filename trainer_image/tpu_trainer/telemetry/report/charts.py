"""What the report draws: the loss, the evaluations, the throughput, the learning rate and where the time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TypeVar

from markupsafe import Markup

from tpu_trainer.clock import Phase
from tpu_trainer.telemetry.history import Evaluation, Loss, Recorded, Stretch
from tpu_trainer.telemetry.report.axis import Axis, axis_of, step_axis
from tpu_trainer.telemetry.report.plot import HEIGHT, WIDTH, Curve, Plot, Point, draw
from tpu_trainer.telemetry.report.words import count, duration, number, share

COLUMNS = 240
"""Points of a curve: finer than that a page cannot show, and the file stays small."""

P = TypeVar("P", Loss, Stretch)


def loss_chart(recorded: Recorded) -> Markup | None:
    """The loss of every step, with the evaluated loss where there is one; None before the first step."""
    if not recorded.losses:
        return None
    losses, evaluated = columns(recorded.losses), evaluations_of(recorded, "loss")
    curves = [Curve("training", _unbroken(losses))]
    if evaluated:
        curves.append(Curve("evaluation", [[_evaluated("loss", e) for e in evaluated]], dots=True))
    broken = [point.step for point in losses if point.broken]
    return draw(Plot("Loss over steps", _steps(recorded), loss_axis(recorded), curves, broken=broken))


def merged(recorded: Recorded) -> bool:
    """A point of the loss curve stands for several steps."""
    return any(point.count > 1 for point in columns(recorded.losses))


def loss_axis(recorded: Recorded) -> Axis:
    span = [value for point in recorded.losses for value in (point.low, point.high) if drawable(value)]
    evaluated = [e.metrics["loss"] for e in evaluations_of(recorded, "loss")]
    return axis_of([*(value for value in span if value is not None), *evaluated], logarithm=True)


def metric_chart(recorded: Recorded, name: str) -> Markup:
    """One metric of the evaluations, which has at least one value that can be drawn."""
    found = evaluations_of(recorded, name)
    y = axis_of([e.metrics[name] for e in found], ticks=4)
    curve = Curve("evaluation", [[_evaluated(name, e) for e in found]], dots=len(found) <= COLUMNS // 4)
    return draw(Plot(f"{name} over steps", _steps(recorded), y, [curve]))


def evaluations_of(recorded: Recorded, name: str) -> list[Evaluation]:
    """Those whose metric of that name can be drawn."""
    return [evaluation for evaluation in recorded.evaluations if drawable(evaluation.metrics.get(name))]


def throughput_chart(recorded: Recorded, global_batch: int) -> Markup | None:
    """Examples per second of every stretch; evaluations are not counted, compilations and checkpoints are."""
    points = [
        _at(
            stretch.step,
            rate,
            f"{_up_to(stretch.step, stretch.steps)}: {number(rate)} examples/s, "
            f"{duration(training_seconds(stretch) / stretch.steps)} per step",
        )
        for stretch in columns(recorded.stretches)
        for rate in [global_batch * stretch.steps / max(training_seconds(stretch), 1e-9)]
    ]
    if not points:
        return None
    y = axis_of([p.y for p in points] + [recorded.examples_per_second or 0.0], ticks=4, from_zero=True)
    title = "Examples per second over steps"
    curve = Curve("throughput", [points])
    return draw(Plot(title, _steps(recorded), y, [curve], level=recorded.examples_per_second))


def rate_chart(recorded: Recorded) -> Markup | None:
    """The learning rate as it was set."""
    stretches = columns(recorded.stretches)
    if not stretches:
        return None
    points = [
        Point(
            s.step,
            s.learning_rate,
            s.learning_rate,
            s.learning_rate,
            f"step {count(s.step)}: {number(s.learning_rate)}",
        )
        for s in stretches
    ]
    y = axis_of([point.y for point in points], ticks=4, from_zero=True)
    return draw(Plot("Learning rate over steps", _steps(recorded), y, [Curve("rate", [points])]))


def split_bar(split: Mapping[Phase, float]) -> Markup:
    """One bar, cut in proportion to the seconds; the table beside it has the numbers."""
    whole = sum(split.values())
    left, pieces = 0.0, []
    for phase, seconds in split.items():
        width = WIDTH * seconds / whole if whole else 0.0
        if width:
            text = f"{phase.value}: {duration(seconds)}, {share(seconds / whole)}"
            pieces.append(
                Markup(
                    '<rect class="phase {}" x="{:.2f}" y="0" width="{:.2f}" height="{}"><title>{}</title></rect>'
                ).format(phase.value, left, width, HEIGHT, text)
            )
        left += width
    start = Markup(
        '<svg class="split" role="img" aria-label="Time by phase" viewBox="0 0 {} {}" preserveAspectRatio="none">'
    ).format(WIDTH, HEIGHT)
    return start + Markup("").join(pieces) + Markup("</svg>")


def columns(points: Sequence[P]) -> list[P]:
    """At most COLUMNS points, neighbours merged."""
    each = -(-len(points) // COLUMNS) or 1
    return [
        reduce(lambda earlier, later: earlier.then(later), points[start : start + each])
        for start in range(0, len(points), each)
    ]


def training_seconds(stretch: Stretch) -> float:
    """Wall time of a stretch without its evaluations."""
    return stretch.seconds - stretch.split.get(Phase.EVALUATE, 0.0)


def drawable(value: float | None) -> bool:
    """Finite, and so is the difference of any two."""
    return value is not None and abs(value) < 1e300


def _steps(recorded: Recorded) -> Axis:
    """The same for every chart of a page: from the first step that is known to the last."""
    first = recorded.losses[0].step - recorded.losses[0].count if recorded.losses else 0
    known = (recorded.losses[-1:], recorded.evaluations[-1:])
    return step_axis(first, max([point.step for points in known for point in points], default=1))


def _unbroken(losses: Sequence[Loss]) -> list[list[Point]]:
    """The line ends where a column has no finite loss, and begins anew behind it."""
    parts: list[list[Point]] = [[]]
    for loss in losses:
        if loss.mean is None or loss.low is None or loss.high is None:
            parts.append([])
            continue
        spread = f" ({number(loss.low)} to {number(loss.high)})" if loss.low < loss.high else ""
        broken = f", {count(loss.broken)} not finite" if loss.broken else ""
        text = f"{_up_to(loss.step, loss.count)}: loss {number(loss.mean)}{spread}{broken}"
        parts[-1].append(Point(loss.step, loss.mean, loss.low, loss.high, text))
    return parts


def _evaluated(name: str, evaluation: Evaluation) -> Point:
    value = evaluation.metrics[name]
    return _at(evaluation.step, value, f"step {count(evaluation.step)}: evaluated {name} {number(value)}")


def _at(step: int, value: float, text: str) -> Point:
    return Point(step, value, value, value, text)


def _up_to(step: int, steps: int) -> str:
    return f"step {count(step)}" if steps == 1 else f"steps {count(step - steps + 1)} to {count(step)}"
