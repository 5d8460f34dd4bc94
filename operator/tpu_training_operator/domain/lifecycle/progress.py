"""What the workers report, as the status shows it.

A status is written for a report's sake now and then only: the newest report tells all that the earlier ones told.
"""

from dataclasses import replace
from datetime import datetime, timedelta

from tpu_training_operator.api.conditions import ConditionType, is_true
from tpu_training_operator.api.status import Activity, Goodput, Progress, ReportPhase, Status
from tpu_training_operator.domain.lifecycle.goodput import charge, saved
from tpu_training_operator.domain.lifecycle.restart_budget import refill
from tpu_training_operator.domain.observed import format_time, parse_time
from tpu_training_operator.domain.report import Inbox, Report


def heard(status: Status, report: Report | None, total_steps: int, now: datetime) -> Status:
    """The status after the report; as it was where the report is of another attempt, or known already.

    A step is never taken back within an attempt, the newest checkpoint never at all. Times that lie after `now` come
    from a clock that was set back since, and count for nothing.
    """
    if report is None or report.attempt != status.attempt:
        return status
    before = status.progress or Progress(step=0, total_steps=total_steps)
    received = format_time(report.received)
    if before.last_report_time is not None and parse_time(received) < parse_time(before.last_report_time) <= now:
        return status
    # No phase: nothing was heard in this attempt, which may begin with an earlier step than the last one ended with.
    step = report.step if before.phase is None else max(report.step, before.step)
    advanced = before.phase is not report.phase or step > before.step
    advance = before.last_advance_time
    if advanced or (advance is not None and parse_time(advance) > max(now, report.received)):
        advance = received
    checkpoint = max((s for s in (before.checkpoint_step, report.checkpoint_step) if s is not None), default=None)
    progress = Progress(
        phase=report.phase,
        step=step,
        total_steps=report.total_steps or total_steps,
        examples_per_second=report.examples_per_second,
        loss=report.loss,
        metrics=dict(report.metrics or before.metrics),
        checkpoint_step=checkpoint,
        last_report_time=received,
        last_advance_time=advance,
        estimated_remaining_seconds=report.estimated_remaining_seconds,
        warnings=list(report.warnings),
    )
    status = _accounted(status, report)
    if checkpoint is not None and checkpoint > (before.checkpoint_step or 0):
        unsaved = max(0, step - checkpoint) / max(1, step - (before.checkpoint_step or 0))
        status = replace(status, restarts=refill(status.restarts), goodput=_saved(status.goodput, report, unsaved))
    return replace(status, progress=progress)


def _accounted(status: Status, report: Report) -> Status:
    """From its first step on the gang trains. Not before the gang is seen to be ready: until then its pods have yet to
    tell how long it waited for nodes."""
    goodput = status.goodput
    begins = report.phase is not ReportPhase.STARTING and report.step > 0
    if goodput is None or not begins or not is_true(status.conditions, ConditionType.GANG_READY):
        return status
    if goodput.activity not in (Activity.START, Activity.RECOVERY):
        return status
    return replace(status, goodput=charge(goodput, report.received, Activity.TRAIN))


def _saved(goodput: Goodput | None, report: Report, unsaved: float) -> Goodput | None:
    """What was trained up to the report is in a checkpoint, but for the steps after it: that share of those since the
    checkpoint before."""
    if goodput is not None and goodput.activity is Activity.SUSPENDED:
        # Saved while it stops; all that it trained is accounted for.
        return saved(goodput, but=unsaved)
    if goodput is None or goodput.activity is not Activity.TRAIN:
        return goodput
    return saved(charge(goodput, report.received, Activity.TRAIN), but=unsaved)


def new_attempt(progress: Progress | None) -> Progress | None:
    """What is still true when the next attempt begins: how far the last one came, and what is safe."""
    if progress is None:
        return None
    return Progress(
        step=progress.step,
        total_steps=progress.total_steps,
        loss=progress.loss,
        metrics=progress.metrics,
        checkpoint_step=progress.checkpoint_step,
    )


def write_due(stored: Status, inbox: Inbox, now: datetime) -> timedelta:
    """How long a report waits until the status is written for its sake."""
    last = stored.progress.last_report_time if stored.progress else None
    wait = parse_time(last) + inbox.between_writes - now if last else timedelta(0)
    # A longer wait comes from a clock that was set back.
    return max(timedelta(0), wait) if wait <= inbox.between_writes else timedelta(0)
