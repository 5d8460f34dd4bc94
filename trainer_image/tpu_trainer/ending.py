"""How a run's end is said and kept: the last checkpoint, the outcome's line, and what is missing from the result."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tpu_trainer.checkpoint.checkpointer import Checkpointer, Checkpoints
from tpu_trainer.contract import ExitCode
from tpu_trainer.data import Position
from tpu_trainer.doctor.findings import Finding
from tpu_trainer.errors import StorageError
from tpu_trainer.instruments import Instruments
from tpu_trainer.outcome import Outcome
from tpu_trainer.progress import Progress
from tpu_trainer.telling import Telling


def keep_last(step: int, position: Position, instruments: Instruments) -> None:
    """The result of the whole training is worth a second attempt, and no later checkpoint would hold it.

    Raises:
        StorageError: it could not be written.
    """
    checkpoints, health = instruments.checkpoints, instruments.doctor.finiteness.health
    position = instruments.position or position
    if checkpoints.finish() or checkpoints.save_now(step, position, health) is not None:
        return
    newest = "there is none" if checkpoints.last_step is None else f"the newest is of step {checkpoints.last_step}"
    raise StorageError(
        f"all {step} steps are trained, but their checkpoint could not be written, {newest}; the log says why"
    )


def tell_not_finite(step: int, metrics: Mapping[str, float], telling: Telling) -> None:
    """Names the metrics that the result leaves out."""
    for name, value in metrics.items():
        if not math.isfinite(value):
            text = f"the metric {name} is {value} after the last step, so the result does not have it"
            telling.finding(Finding("Evaluation", step, text))


def tell_cost(checkpoints: Checkpoints, progress: Progress) -> None:
    if (cost := checkpoints.cost).commits:
        progress.say(
            f"{cost.commits} checkpoints, {cost.size / 1e6:.1f} MB; they held up the training for {cost.blocked:.1f} s"
        )


def stopped(
    step: int, loss: float | None, checkpoints: Checkpoints, progress: Progress, rate: float | None, summary: str
) -> Outcome:
    """`summary`: what the run's last line adds of steps that were not finite."""
    safe = _safe(step, checkpoints.last_step) if isinstance(checkpoints, Checkpointer) else ""
    ending = f"stopped on request after {step} steps"
    return _outcome(ExitCode.Preempted, ending, step, loss, {}, progress, rate, safe + summary)


def succeeded(
    ending: str,
    step: int,
    loss: float | None,
    evaluated: Mapping[str, float],
    progress: Progress,
    rate: float | None,
    summary: str,
) -> Outcome:
    return _outcome(ExitCode.Succeeded, ending, step, loss, evaluated, progress, rate, summary)


def _outcome(
    code: ExitCode,
    ending: str,
    step: int,
    loss: float | None,
    evaluated: Mapping[str, float],
    progress: Progress,
    rate: float | None,
    safe: str,
) -> Outcome:
    own = {} if loss is None else {"loss": loss}
    metrics = {**own, **evaluated}
    values = "".join(f", {name} {value:.6g}" for name, value in metrics.items())
    # What was logged comes last, because a message that is too long loses its last metrics.
    every = {**metrics, **progress.means, **metrics}
    best = None if progress.best is None else progress.best.as_json()
    return Outcome(code, f"{ending}{values}{safe}", step, every, rate, best=best)


def _safe(step: int, kept: int | None) -> str:
    """What the end of a stopped run says about its checkpoint."""
    if kept == step:
        return ", checkpoint written"
    newest = "there is none" if kept is None else f"the newest is of step {kept}"
    return f"; its checkpoint could not be written, {newest}"
