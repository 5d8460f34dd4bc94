"""What the workers report, as the status shows it.

A report causes a status write only now and then: the newest report holds everything that earlier ones did.
"""

from datetime import datetime, timedelta

from tpu_contract.protocol import ReportPhase
from tpu_training_operator.api.conditions import ConditionType, is_true
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.status import Activity, Goodput, Progress, Status
from tpu_training_operator.domain.cluster_state.observed import format_time, parse_time
from tpu_training_operator.domain.cluster_state.worker_reports import Inbox, WorkerReport
from tpu_training_operator.domain.objects.actions import AT_ONCE
from tpu_training_operator.domain.plan.common.accounts import Holding, charge, mark_saved
from tpu_training_operator.domain.plan.common.restart_limits import refill


def apply_report(
    status: Status, report: WorkerReport | None, total_steps: int, now: datetime, chips: Holding | None = None
) -> Status:
    """Returns the status after the report; unchanged if the report is old or of another attempt.

    The step never decreases within an attempt, the newest checkpoint never at all. Times later than `now` were written
    before the clock was set back, and are ignored.
    """
    if report is None or report.attempt != status.attempt:
        return status
    before = status.progress or Progress(step=0, total_steps=total_steps)
    received = format_time(report.received)
    if before.last_report_time is not None and parse_time(received) < parse_time(before.last_report_time) <= now:
        return status
    step = _read_step(report, before)
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
        best_checkpoint=report.best_checkpoint or before.best_checkpoint,
        last_report_time=received,
        last_advance_time=advance,
        estimated_remaining_seconds=report.estimated_remaining_seconds,
        warnings=list(report.warnings),
        packages_sha256=report.packages_sha256,
    )
    status = replace(status, progress=progress, goodput=_count_training(status, report, chips))
    if status.checked_program is not None and report.program is not None:
        status = replace(status, checked_program=replace(status.checked_program, run=report.program))
    saved_before = before.checkpoint_step or 0
    if checkpoint is None or checkpoint <= saved_before:
        return status
    unsaved = max(0, step - checkpoint) / max(1, step - saved_before)
    return replace(
        status, restarts=refill(status.restarts), goodput=_count_saved(status.goodput, report, unsaved, chips)
    )


def _read_step(report: WorkerReport, before: Progress) -> int:
    """Returns the step to show. While a worker has not read its checkpoint, it is that of the newest one.

    An attempt may begin at an earlier step than the last one reached, and from another checkpoint than the one shown
    until its worker has told where it starts. After that the step never decreases.
    """
    is_first = before.phase is None
    if report.phase is ReportPhase.STARTING and report.step == 0 and report.start_step is None:
        if is_first:
            return before.checkpoint_step or 0
    elif is_first or (
        before.phase is ReportPhase.STARTING and report.start_step is not None and before.step == before.checkpoint_step
    ):
        return report.step
    return max(report.step, before.step)


def _count_training(status: Status, report: WorkerReport, chips: Holding | None) -> Goodput | None:
    """Counts time as training from the gang's first step on, but not before the gang is ready: only then do its pods
    show how long it waited for nodes."""
    goodput = status.goodput
    begins = report.phase is not ReportPhase.STARTING and report.step > 0
    if goodput is None or not begins or not is_true(status.conditions, ConditionType.GANG_READY):
        return goodput
    if goodput.activity not in (Activity.START, Activity.RECOVERY, Activity.MOVING):
        return goodput
    return charge(goodput, report.received, Activity.TRAIN, chips)


def _count_saved(
    goodput: Goodput | None, report: WorkerReport, unsaved: float, chips: Holding | None
) -> Goodput | None:
    """Counts all training up to the report as saved, except `unsaved`: the steps since the new checkpoint, as a share
    of those since the one before."""
    if goodput is not None and goodput.activity is Activity.SUSPENDED:
        # Saved while the gang stops; its training is already accounted for.
        return mark_saved(goodput, unsaved_share=unsaved)
    if goodput is None or goodput.activity is not Activity.TRAIN:
        return goodput
    return mark_saved(charge(goodput, report.received, Activity.TRAIN, chips), unsaved_share=unsaved)


def carry_over(progress: Progress | None) -> Progress | None:
    """Returns what stays true when the next attempt begins: how far the last one came, and what is saved."""
    if progress is None:
        return None
    return Progress(
        step=progress.step,
        total_steps=progress.total_steps,
        loss=progress.loss,
        metrics=progress.metrics,
        checkpoint_step=progress.checkpoint_step,
        best_checkpoint=progress.best_checkpoint,
    )


def write_due(stored: Status, inbox: Inbox, now: datetime) -> timedelta:
    """Returns how long a report waits until it is worth a status write."""
    last = stored.progress.last_report_time if stored.progress else None
    wait = parse_time(last) + inbox.between_writes - now if last else AT_ONCE
    # A longer wait means that the clock was set back.
    return max(AT_ONCE, wait) if wait <= inbox.between_writes else AT_ONCE
