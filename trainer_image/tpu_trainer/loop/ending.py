"""Ends a run: writes the last checkpoint, words the outcome, and warns of what is missing from the result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from tpu_contract.protocol import MOST_METRICS, ExitCode
from tpu_contract.run_spec import RunSpec
from tpu_trainer.checkpoint.checkpointer import Checkpointer
from tpu_trainer.checkpoint.snapshot import weight_files
from tpu_trainer.contract.errors import StorageError, UserCodeError
from tpu_trainer.contract.findings import Finding
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.data.order import Position
from tpu_trainer.loop.context import RunContext
from tpu_trainer.loop.evaluation_policy import metric_rules
from tpu_trainer.loop.instruments import Instruments
from tpu_trainer.reporting.learning import Followed, find_unlearned
from tpu_trainer.reporting.loss_trend import LossTrend
from tpu_trainer.reporting.run_outputs import RunOutputs
from tpu_trainer.storage.store import DirectoryStore

if TYPE_CHECKING:
    from torch import Tensor, nn

_CHANGED_LATE = (
    "the weights were changed after the last evaluation (by evaluation_ends, or at the end of the fit): its metrics "
    "are not those of the weights that are saved. Change them in train_ends or on_train_end"
)


def save_result(step: int, position: Position, instruments: Instruments, *, again: bool = False) -> None:
    """Saves the weights as the hooks of the end have left them, unless the newest checkpoint has the same. `again`:
    saves them in any case.

    Raises:
        NotFiniteError, DivergedError: as `Instruments.save`.
    """
    last = step, instruments.weights()
    if instruments.evaluated not in (None, last):
        instruments.outputs.add_finding(Finding("Evaluation", step, _CHANGED_LATE))
    if again or instruments.saved != last:
        instruments.closing.ended = True
        instruments.save(step, position, now=False, closes=True)
    instruments.outputs.progress.say(f"the last weights have the checksum {last[1]}")


def write_weights(context: RunContext, step: int, model: nn.Module, average: Mapping[str, Tensor]) -> None:
    """Writes the weights of a run without checkpoints into the directory of its report, on the user's machine. A file
    that cannot be written whole is left out, with a warning."""
    directory, writes = context.environment.report_directory, context.outputs.is_reporter
    if directory is None or context.spec.checkpoint is not None or not (writes or context.backend.reads_together):
        return
    try:
        for name, content in weight_files(model, average):
            if writes:
                DirectoryStore(directory).put(name, content)
    except (StorageError, UserCodeError) as error:
        context.outputs.add_finding(Finding("Weights", step, f"the weights were not kept: {error}"))


def keep_last(step: int, position: Position, instruments: Instruments) -> None:
    """Waits for the last checkpoint and, if its write has failed, writes it a second time: no later one will hold the
    result of the training.

    Raises:
        StorageError: it could not be written.
    """
    checkpoints, health = instruments.checkpoints, instruments.doctor.finiteness.health
    position = instruments.position or position
    if checkpoints.finish() or checkpoints.save_now(step, position, health) is not None:
        checkpoints.close()
        return
    newest = "there is none" if checkpoints.last_step is None else f"the newest is of step {checkpoints.last_step}"
    raise StorageError(
        f"all {step} steps are trained, but their checkpoint could not be written, {newest}; the log says why"
    )


def warn_left_out(step: int, metrics: Mapping[str, float], outputs: RunOutputs) -> None:
    """Warns of metrics that the result leaves out."""
    # The loss takes the first place.
    if left_out := list(metrics)[MOST_METRICS - 1 :]:
        text = (
            f"the result has room for {MOST_METRICS} metrics, including the loss; it leaves out {left_out[0]} and "
            f"the {len(left_out) - 1} after it, which are in the report"
        )
        outputs.add_finding(Finding("Evaluation", step, text))
    for name, value in metrics.items():
        if not math.isfinite(value):
            text = f"the metric {name} is {value} after the last step, so the result leaves it out"
            outputs.add_finding(Finding("Evaluation", step, text))


def stopped_outcome(step: int, loss: float | None, instruments: Instruments) -> Outcome:
    checkpoints = instruments.checkpoints
    instruments.outputs.progress.checkpoint_step = checkpoints.last_step
    safe = _describe_checkpoint(step, checkpoints.last_step) if isinstance(checkpoints, Checkpointer) else ""
    summary = instruments.doctor.finiteness.summary
    before, after = f"stopped on request after {step} steps", safe + summary
    return _outcome(ExitCode.Preempted, before, after, step, loss, {}, instruments)


def succeeded_outcome(
    summary: str, step: int, loss: float | None, evaluated: Mapping[str, float], instruments: Instruments
) -> Outcome:
    """Returns the outcome of a successful run. `summary`: the beginning of its message."""
    progress, checkpoints = instruments.outputs.progress, instruments.checkpoints
    checkpoints.tidy()
    if (cost := checkpoints.cost).commits:
        progress.say(
            f"{cost.commits} checkpoints, {cost.size / 1e6:.1f} MB; they held up the training for {cost.blocked:.1f} s"
        )
    progress.checkpoint_step = checkpoints.last_step
    after = instruments.doctor.finiteness.summary
    return _outcome(ExitCode.Succeeded, summary, after, step, loss, evaluated, instruments)


def warn_unlearned(spec: RunSpec, step: int, metrics: Mapping[str, float], instruments: Instruments) -> None:
    """Warns of a training that has not learned. Says nothing of a lower rung, which has a gate for that, nor of weights
    that were good before the first step: `metrics` and losses need not improve on them. A run that continues is judged
    from its first step on if its report has that."""
    outputs, checkpoint = instruments.outputs, spec.checkpoint
    if spec.end_after_steps is not None or (checkpoint is not None and checkpoint.init_from is not None):
        return
    losses, first, stride = outputs.losses, outputs.progress.first_metrics, 1
    if instruments.first > 0:
        history = outputs.reporter.history
        if not history.is_whole:
            return
        means, stride = history.mean_losses
        losses, first = LossTrend(-(-spec.warmup_steps // stride)), history.first_metrics
        losses.add(means)
    for text in find_unlearned(losses, _followed(spec, metrics, first), stride):
        outputs.add_finding(Finding("Loss", step, text))


def _followed(spec: RunSpec, last: Mapping[str, float], first: Mapping[str, float]) -> Followed | None:
    """Returns the first metric that the recipe follows and that was evaluated twice."""
    for _, rule in metric_rules(spec):
        if rule.metric in first and rule.metric in last:
            before, after = first[rule.metric], last[rule.metric]
            return Followed(rule.metric, before, after, replace(rule, min_delta=0.0).is_better(after, before))
    return None


def _outcome(
    code: ExitCode,
    before: str,
    after: str,
    step: int,
    loss: float | None,
    evaluated: Mapping[str, float],
    instruments: Instruments,
) -> Outcome:
    """`before`, `after`: the text before and after the metrics in the run's last line."""
    metrics = {**({} if loss is None else {"loss": loss}), **evaluated}
    values = "".join(f", {name} {value:.6g}" for name, value in metrics.items())
    progress = instruments.outputs.progress
    # What was logged comes last, because a message that is too long loses its last metrics.
    every = {**metrics, **progress.means, **metrics}
    best = None if progress.best is None else progress.best.as_json()
    message = f"{before}{values}{after}"
    # Of the job itself, the first steps are judged, if there were so many.
    rung = (progress.rung or instruments.rung_numbers([*evaluated])) if code is ExitCode.Succeeded else None
    return Outcome(code, message, step, every, instruments.throughput.rate, best=best, rung=rung)


def _describe_checkpoint(step: int, committed: int | None) -> str:
    """Describes the checkpoint of a run that was stopped after `step`. `committed`: the newest step."""
    if committed == step:
        return ", checkpoint written"
    newest = "there is none" if committed is None else f"the newest is of step {committed}"
    return f"; its checkpoint could not be written, {newest}"
