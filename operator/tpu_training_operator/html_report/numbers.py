"""The key numbers at the top of the page, the most important first."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from tpu_training_operator.html_report import charts
from tpu_training_operator.html_report.formatting import count, duration, number, plural, share
from tpu_training_operator.html_report.history import Evaluation, Measurements, RecordedRunSpec
from tpu_training_operator.html_report.markup import tag
from tpu_training_operator.html_report.metrics import best_of

HEADLINES = 2
"""The most metrics of the last evaluation among the key numbers: first those that the run watches."""


@dataclass(frozen=True)
class Tile:
    """One key number, and a note to compare it with. `kind`: its CSS class."""

    name: str
    value: str
    note: str
    kind: str = ""


def key_numbers(measured: Measurements, spec: RecordedRunSpec, seconds: float) -> Element:
    """Shows the key numbers that the run has. `seconds`: of all attempts together."""
    attempts = measured.attempts
    tiles = [
        Tile("Steps", count(attempts[-1].last), f"of {count(spec.train_steps)}"),
        *_loss_tiles(measured),
        *_metric_tiles(measured, spec),
        *_speed_tiles(measured, spec),
    ]
    if seconds > 0:
        tiles.append(Tile("Time", duration(seconds), plural(len(attempts), "attempt")))
    # At most five columns, as many as fill the last row best, and at least four, so that few tiles do not grow wide.
    columns = max(4, -(-len(tiles) // -(-len(tiles) // 5)))
    return tag(
        "section",
        tag("dl", (_tile_element(tile) for tile in tiles), class_="tiles", style=f"--columns: {columns}"),
        id="numbers",
        aria_label="Key numbers",
    )


def _tile_element(tile: Tile) -> Element:
    value = tag("dd", tile.value, tag("small", tile.note), **({"class": tile.kind} if tile.kind else {}))
    return tag("div", tag("dt", tile.name), value)


def _loss_tiles(measured: Measurements) -> Iterator[Tile]:
    losses = [(point.step, point.mean) for point in measured.losses if point.mean is not None]
    if not measured.ends_finite:
        note = f"{number(losses[-1][1])} at step {count(losses[-1][0])}" if losses else "in any step"
        yield Tile("Training loss", "not finite", note, "bad")
    elif losses:
        (step, last), (_, first) = losses[-1], losses[0]
        note = f"from {number(first)}" if len(losses) > 1 else f"at step {count(step)}"
        yield Tile("Training loss", number(last), note)


def _metric_tiles(measured: Measurements, spec: RecordedRunSpec) -> Iterator[Tile]:
    best = {watched.metric: best_of(measured, watched) for watched in spec.watched}
    for last in measured.evaluations[-1:]:
        names = [name for name in dict.fromkeys([*best, *last.metrics]) if name in last.metrics]
        for name in names[:HEADLINES]:
            value = last.metrics[name]
            kind = "" if charts.drawable(value) else "bad"
            yield Tile(name, number(value), _comparison_note(last, name, best.get(name)), kind)


def _comparison_note(last: Evaluation, name: str, best: Evaluation | None) -> str:
    if best is None or best.metrics[name] == last.metrics[name]:
        return f"at step {count(last.step)}"
    return f"best {number(best.metrics[name])} at step {count(best.step)}"


def _speed_tiles(measured: Measurements, spec: RecordedRunSpec) -> Iterator[Tile]:
    rate = measured.examples_per_second
    if rate is not None:
        yield Tile("Examples per second", number(rate), f"{number(rate / spec.slice.replicas)} per replica")
    if measured.stretches:
        step = statistics.median(stretch.training_seconds / stretch.steps for stretch in measured.stretches)
        yield Tile("Step time", duration(step), "median")
    trained = sum(stretch.training_seconds for stretch in measured.stretches)
    if trained > 0 and spec.entrypoint is not None:
        waited = sum(stretch.split.get("input", 0.0) for stretch in measured.stretches)
        yield Tile("Waiting for input", share(waited / trained), "of the training time")
    if measured.mfu is not None:
        yield Tile("Model flops utilisation", share(measured.mfu), "of the slice's peak")
    if measured.noise_scale is not None:
        yield Tile("Gradient noise scale", number(measured.noise_scale), "examples")
