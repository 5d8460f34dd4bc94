"""One progress report, and its two written forms.

The heartbeat's thread makes a report from state that the run keeps anyway. So the loop does nothing for it, and only
the newest state is reported: there is no queue that could grow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tpu_contract.protocol import (
    MOST_METRICS,
    REPORT_LIMIT,
    WARNING_LENGTH,
    Phase,
    ProgramMatch,
    ReportPhase,
    StartPhase,
)
from tpu_contract.run_spec import RunSpec
from tpu_trainer.contract.clock import WARM_UP_STEPS, Clock, StartTimes, StepPace
from tpu_trainer.contract.outcome import Best
from tpu_trainer.reporting.progress import ProgressLog


@dataclass(frozen=True)
class ProgressReport:
    """step: steps made so far; the device may still be working on the newest. start_step: the step that the run begins
    after, 0 or the checkpoint's; None until that is read. loss, examples_per_second: of the last
    steps that were read. metrics: of the last evaluation, then what the task has logged. checkpoint_step: the newest
    step that is safe in a checkpoint. best_checkpoint: the checkpoint with the best evaluation, if one is kept.
    remaining_seconds: without evaluations and checkpoints. rung: of the job on top of a ladder, what its first steps
    have shown. program: as in `ProgressLog`. packages_sha256: of what requirements.txt has added. None while a number
    is unknown."""

    phase: ReportPhase
    step: int
    total_steps: int
    start_step: int | None = None
    loss: float | None = None
    examples_per_second: float | None = None
    checkpoint_step: int | None = None
    best_checkpoint: Best | None = None
    metrics: Mapping[str, float] | None = None
    warnings: tuple[str, ...] = ()
    remaining_seconds: int | None = None
    program: ProgramMatch | None = None
    stacks: str | None = None
    rung: Mapping[str, Any] | None = None
    start_seconds: Mapping[StartPhase, float] | None = None
    packages_sha256: str | None = None


def present_report(
    spec: RunSpec,
    clock: Clock,
    pace: StepPace,
    progress: ProgressLog,
    start_times: StartTimes | None = None,
    packages_sha256: str | None = None,
) -> ProgressReport:
    """Returns how the run is doing now. Call it from any thread."""
    phase, _ = clock.current()
    last, step = progress.last, max(progress.step or 0, pace.last or 0)
    rate = last.examples_per_second if last else None
    return ProgressReport(
        phase=phase_of(phase, pace.steps),
        step=step,
        total_steps=progress.total,
        start_step=progress.start_step,
        loss=last.losses[-1] if last else None,
        examples_per_second=rate,
        checkpoint_step=progress.checkpoint_step,
        best_checkpoint=progress.best,
        # The evaluation's come first, because a report has room for MOST_METRICS. They replace logged ones of the same
        # name.
        metrics={**progress.metrics, **progress.means.copy(), **progress.metrics},
        warnings=progress.warnings,
        remaining_seconds=math.ceil((progress.total - step) * spec.batch.total / rate) if rate else None,
        rung=progress.rung,
        program=progress.program,
        start_seconds=None if start_times is None else start_times.seconds(),
        packages_sha256=packages_sha256,
    )


def phase_of(phase: Phase, steps: int) -> ReportPhase:
    """Returns the phase to report. `steps`: made by this process; the first WARM_UP_STEPS may still compile."""
    match phase:
        case Phase.EVALUATE:
            return ReportPhase.EVALUATING
        case Phase.CHECKPOINT:
            return ReportPhase.CHECKPOINTING
        case Phase.START:
            return ReportPhase.STARTING
        case _:
            return ReportPhase.STARTING if steps < WARM_UP_STEPS else ReportPhase.TRAINING


def operator_body(report: ProgressReport) -> bytes:
    """Returns at most REPORT_LIMIT bytes of JSON, with Python's NaN and Infinity, so that a loss that is not finite can
    be seen."""
    document: dict[str, Any] = {
        "phase": report.phase,
        "step": report.step,
        "totalSteps": report.total_steps,
        "startStep": report.start_step,
        "loss": report.loss,
        "examplesPerSecond": report.examples_per_second,
        "checkpointStep": report.checkpoint_step,
        "bestCheckpoint": None if report.best_checkpoint is None else report.best_checkpoint.as_json(),
        "estimatedRemainingSeconds": report.remaining_seconds,
        "program": report.program,
        "stacks": report.stacks,
        "startSeconds": None if report.start_seconds is None else dict(report.start_seconds),
    }
    if report.rung is not None:
        document["rung"] = report.rung
    if report.packages_sha256 is not None:
        document["packagesSha256"] = report.packages_sha256
    more = {
        "metrics": dict(_metrics(report)),
        "warnings": [warning[:WARNING_LENGTH] for warning in report.warnings],
    }
    body = _encode(document | more)
    # Only the user's own names and texts can be that long; the rest fits.
    return body if len(body) <= REPORT_LIMIT else _encode(document)


def kubeflow_body(report: ProgressReport, now: datetime) -> bytes:
    """Returns the payload of KEP-2779. The percentage is 100 only once the run has ended."""
    done = report.phase is ReportPhase.DONE
    numbers = dict(_metrics(report))
    if report.loss is not None:
        numbers["loss"] = report.loss
    if report.examples_per_second is not None:
        numbers["examples_per_second"] = report.examples_per_second
    texts = {name: f"{value:.6g}" for name, value in numbers.items()}
    # Last: a metric of that name must not replace them.
    texts |= {"current_step": str(report.step), "total_steps": str(report.total_steps)}
    status: dict[str, Any] = {
        "progressPercentage": 100 if done else min(99, 100 * report.step // report.total_steps),
        "metrics": [{"name": name, "value": text} for name, text in texts.items()],
        "lastUpdatedTime": now.isoformat(timespec="seconds").replace("+00:00", "Z"),
    }
    if report.remaining_seconds is not None:
        status["estimatedRemainingSeconds"] = report.remaining_seconds
    return _encode({"trainerStatus": status})


def _metrics(report: ProgressReport) -> list[tuple[str, float]]:
    return list((report.metrics or {}).items())[:MOST_METRICS]


def _encode(document: Mapping[str, Any]) -> bytes:
    # A lone surrogate (in a metric's name) has no UTF-8 form.
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
