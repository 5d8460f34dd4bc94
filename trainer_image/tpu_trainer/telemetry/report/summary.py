"""The run in a few numbers: tiles at the top, the table of metrics, what the noise scale means. Used by `page`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from tpu_trainer.clock import Phase
from tpu_trainer.spec import RunSpec
from tpu_trainer.telemetry.history import Recorded, total
from tpu_trainer.telemetry.report.charts import drawable, training_seconds
from tpu_trainer.telemetry.report.words import count, duration, number, plural, share

HEADLINES = 2
"""Metrics of the last evaluation among the key numbers: the first ones the task gives."""


@dataclass(frozen=True)
class Tile:
    """One key number: what it is, the number, and what it compares to."""

    name: str
    value: str
    note: str


@dataclass(frozen=True)
class Metric:
    """One metric of the evaluations: its last value, the least and the greatest of the finite ones."""

    name: str
    last: str
    least: str
    greatest: str


def tiles(recorded: Recorded, spec: RunSpec) -> list[Tile]:
    """Most wanted first; a number that the run does not have has no tile."""
    attempts = recorded.attempts
    seconds = sum(total([attempt.split for attempt in attempts]).values())
    return [
        Tile("Steps", count(attempts[-1].last), f"of {count(spec.train_steps)}"),
        *_losses(recorded),
        *_speed(recorded, spec),
        Tile("Time", duration(seconds), plural(len(attempts), "attempt")),
    ]


def _losses(recorded: Recorded) -> Iterator[Tile]:
    losses = [(point.step, point.mean) for point in recorded.losses if point.mean is not None]
    if losses:
        (step, last), (_, first) = losses[-1], losses[0]
        note = f"from {number(first)}" if len(losses) > 1 else f"at step {count(step)}"
        yield Tile("Training loss", number(last), note)
    for evaluation in recorded.evaluations[-1:]:
        for name, value in list(evaluation.metrics.items())[:HEADLINES]:
            yield Tile(name, number(value), f"evaluated at step {count(evaluation.step)}")


def _speed(recorded: Recorded, spec: RunSpec) -> Iterator[Tile]:
    rate = recorded.examples_per_second
    if rate is not None:
        yield Tile("Examples per second", number(rate), f"{number(rate / spec.slice.replicas)} per replica")
    if recorded.stretches:
        step = statistics.median(training_seconds(stretch) / stretch.steps for stretch in recorded.stretches)
        yield Tile("Step time", duration(step), "median")
    trained = sum(training_seconds(stretch) for stretch in recorded.stretches)
    if trained > 0:
        waited = sum(stretch.split.get(Phase.INPUT, 0.0) for stretch in recorded.stretches)
        yield Tile("Waiting for input", share(waited / trained), "of the training time")
    if recorded.mfu is not None:
        yield Tile("Model flops utilisation", share(recorded.mfu), "of the slice's peak")
    if recorded.noise_scale is not None:
        yield Tile("Gradient noise scale", number(recorded.noise_scale), "examples")


def metrics(recorded: Recorded) -> list[Metric]:
    """In the order of the last evaluation."""
    rows = []
    for evaluation in recorded.evaluations[-1:]:
        for name, last in evaluation.metrics.items():
            values = [each.metrics[name] for each in recorded.evaluations if drawable(each.metrics.get(name))]
            least, greatest = (number(min(values)), number(max(values))) if values else ("–", "–")
            rows.append(Metric(name, number(last), least, greatest))
    return rows


def noise_sentence(recorded: Recorded, spec: RunSpec) -> str | None:
    """What twice the slice would buy: steps to a given loss go as 1 + noise scale / batch (McCandlish et al. 2018)."""
    scale, batch = recorded.noise_scale, spec.batch.total
    if scale is None:
        return None
    fewer = (1 + scale / batch) / (1 + scale / (2 * batch))
    return (
        f"The gradient noise scale ({number(scale)} examples) is {number(scale / batch)} times the global batch: twice "
        f"the replicas, each with the same batch, would need {number(fewer)} times fewer steps to the same loss (2 is "
        "the most there can be, 1 is no gain)."
    )
