"""The whole report as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from tpu_trainer.clock import Phase
from tpu_trainer.contract import ExitCode
from tpu_trainer.outcome import Outcome
from tpu_trainer.spec import RunSpec
from tpu_trainer.telemetry.history import Attempt, Recorded, total
from tpu_trainer.telemetry.report import charts
from tpu_trainer.telemetry.report.recipe import recipe_rows
from tpu_trainer.telemetry.report.summary import metrics, noise_sentence, tiles
from tpu_trainer.telemetry.report.words import count, duration, number, plural, share

METRICS = 12
"""Metrics with a chart of their own; the table has all of them."""

ENDINGS = {
    ExitCode.Succeeded: ("well", "Succeeded"),
    ExitCode.Preempted: ("pause", "Stopped on request"),
    ExitCode.UserError: ("bad", "Failed in the task's code"),
    ExitCode.NotFinite: ("bad", "Loss not finite"),
    ExitCode.PeerLost: ("bad", "Lost a peer"),
    ExitCode.InternalError: ("bad", "Failed in the trainer"),
    ExitCode.Hung: ("bad", "Hung"),
    ExitCode.StorageFailed: ("bad", "Storage failed"),
    ExitCode.Diverged: ("bad", "Replicas diverged"),
    ExitCode.StorageDenied: ("bad", "Storage denied"),
    ExitCode.BadSpec: ("bad", "Refused the run spec"),
}
"""How a run ended: the class that colours it, and the words."""

PHASES = {
    Phase.START: ("Start", "imports, meeting the other hosts, placing the model, reading a checkpoint"),
    Phase.INPUT: ("Waiting for input", "the next batch was not ready"),
    Phase.HOST: ("Host", "Python: the task's code, and tracing its steps"),
    Phase.DEVICE: ("Device", "waiting for results: compiling, computing, exchanging gradients with the peers"),
    Phase.CHECKPOINT: ("Checkpoints", "as far as the training waited for them"),
    Phase.EVALUATE: ("Evaluation", "going through the evaluation set"),
}


def render_report(
    recorded: Recorded, spec: RunSpec, outcome: Outcome | None, environment: Mapping[str, str], written: datetime
) -> str:
    """An HTML document that loads nothing. `outcome`: None while the run goes on. environment: what, and its version.

    `recorded.attempts` ends with the present attempt.
    """
    split = total([attempt.split for attempt in recorded.attempts])
    shown = tiles(recorded, spec)
    state, ending = ENDINGS[outcome.code] if outcome else ("running", "Running")
    return _template().render(
        spec=spec,
        recorded=recorded,
        state=state,
        ending=ending,
        endings=_endings(recorded.attempts),
        message=outcome.message if outcome else "",
        written=written,
        environment=environment,
        tiles=shown,
        tile_columns=_columns(len(shown)),
        loss=charts.loss_chart(recorded),
        merged=charts.merged(recorded),
        loss_axis=charts.loss_axis(recorded),
        broken=sum(point.broken for point in recorded.losses),
        loss_evaluated=bool(charts.evaluations_of(recorded, "loss")),
        metrics=metrics(recorded),
        metric_charts=[(name, charts.metric_chart(recorded, name)) for name in _charted(recorded)],
        throughput=charts.throughput_chart(recorded, spec.batch.total),
        rate_chart=charts.rate_chart(recorded),
        split=split,
        split_bar=charts.split_bar(split),
        phases=PHASES,
        recipe=recipe_rows(spec),
        noise=noise_sentence(recorded, spec),
        count=count,
        duration=duration,
        number=number,
        plural=plural,
        share=share,
    )


def _endings(attempts: Sequence[Attempt]) -> list[str]:
    """How each attempt ended, in words. One that left no word was killed, or lost its machine."""
    known = {code.name: words for code, (_, words) in ENDINGS.items()}
    before = [known.get(attempt.outcome or "", "Without a word") for attempt in attempts[:-1]]
    return [*before, known.get(attempts[-1].outcome or "", "Running")]


def _charted(recorded: Recorded) -> list[str]:
    """The metrics with a chart; the evaluated loss stands beside the training's."""
    names = {name: None for evaluation in recorded.evaluations for name in evaluation.metrics}
    # One value is no curve, and stands in the table.
    drawn = (name for name in names if name != "loss" and len(charts.evaluations_of(recorded, name)) > 1)
    return list(drawn)[:METRICS]


def _columns(tiles: int) -> int:
    """Of at most five, as many as leave the last row fullest."""
    rows = -(-tiles // 5)
    return -(-tiles // rows)


@cache
def _template() -> Template:
    loader = PackageLoader("tpu_trainer.telemetry.report", "")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html")
