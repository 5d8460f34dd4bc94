"""Finds gangs that run without making progress.

The trainer has a watchdog in every process. This module finds what no watchdog inside a worker can: a worker whose
processes have all stopped, a node that computes nothing, a hang in the user's own loop. How long a standstill may last
depends on the last report: a compilation or an evaluation may take long, a step may not.

Without `progressDeadlineSeconds` a worker counts as hung only if it keeps reporting the same step. A worker whose
reports do not arrive may be training well behind a network policy, so silence is no reason to stop it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tpu_contract.protocol import ReportPhase
from tpu_training_operator.api.conditions import ConditionType, find
from tpu_training_operator.api.run_policy import RunPolicy
from tpu_training_operator.api.status import Status
from tpu_training_operator.api.words import count
from tpu_training_operator.domain.cluster_state.observed import WorkerPod, parse_time
from tpu_training_operator.domain.cluster_state.worker_reports import Inbox
from tpu_training_operator.domain.failures.pod_signs import ended_by
from tpu_training_operator.domain.job.naming import WorkerId

# Longer than the trainer's own limits (`tpu_trainer.doctor.hang`: 5 and 30 minutes), because its watchdog knows more
# and should report first.
_LIMITS: Mapping[ReportPhase, timedelta] = {
    ReportPhase.STARTING: timedelta(minutes=45),
    ReportPhase.TRAINING: timedelta(minutes=15),
    ReportPhase.EVALUATING: timedelta(minutes=45),
    ReportPhase.CHECKPOINTING: timedelta(minutes=45),
    # Its peers still write a checkpoint, or its process does not end.
    ReportPhase.DONE: timedelta(minutes=45),
}
_MORE = "a larger spec.runPolicy.progressDeadlineSeconds allows more"
# A slow step may take this many times its usual length, if that is longer.
_STEPS = 20
_LONGEST_STEP_SECONDS = 3600.0
# A worker reports every five to ten seconds.
_SILENCE = timedelta(minutes=1)
# How far the clocks of two operators may differ, or one operator's clock over time.
_CLOCKS_DIFFER = timedelta(minutes=1)
# A worker that can answer does so in its next report, at most ten seconds later.
STACKS_WAIT = timedelta(seconds=15)


@dataclass(frozen=True)
class Standstill:
    """No progress since `since`. It counts as a hang after `limit`."""

    since: datetime
    limit: timedelta
    message: str

    @property
    def deadline(self) -> datetime:
        return self.since + self.limit


def standstill(status: Status, inbox: Inbox, policy: RunPolicy, now: datetime, *, reports: bool) -> Standstill | None:
    """Returns the gang's standstill; None if no limit applies.

    No limit applies if the operator receives no reports, if the gang is not complete, or if its reports do not arrive
    and it has no `progressDeadlineSeconds`. `reports`: the job runs the operator's own trainer, which always reports.

    The time starts no earlier than this operator began to listen, because earlier reports went to another one. For a
    gang whose reports do not arrive, it starts after the last report that was lost through no fault of a worker.
    """
    ready = find(status.conditions, ConditionType.GANG_READY)
    if inbox.listening_since is None or ready is None or not ready.is_true:
        return None
    progress = status.progress if status.progress and status.progress.phase else None
    phase = progress.phase if progress else ReportPhase.STARTING if reports else None
    is_heard = _is_heard(status, inbox, now)
    limit = _limit(phase, status, policy) if policy.progress_deadline_seconds or is_heard else None
    if limit is None:
        return None
    since = max(parse_time(ready.last_transition_time), inbox.listening_since)
    if progress and progress.last_advance_time:
        advance = parse_time(progress.last_advance_time)
        # If the clock was set back after the gang became ready, only times reported afterwards can be compared.
        since = advance if advance <= now < since - _CLOCKS_DIFFER else max(since, advance)
    if inbox.last_loss is not None and not is_heard:
        since = max(since, inbox.last_loss)
    where = f"after step {progress.step} of {progress.total_steps}" if progress else "since the gang became ready"
    doing = f" in phase {phase}" if phase else ""
    message = f"no step was reported for {limit.total_seconds():.0f} s, {where}{doing}; {_MORE}"
    return Standstill(since, limit, message)


@dataclass(frozen=True)
class Straggler:
    """A worker that still runs although peers have succeeded. It counts as hung at `deadline`."""

    pod: WorkerPod
    message: str
    deadline: datetime


def straggler(pods: Sequence[WorkerPod], status: Status, policy: RunPolicy) -> Straggler | None:
    """Returns the worker that outlasts its peers; None if none has succeeded, or if the time of a success is unknown.

    The time starts at the last success, or at the last reported step if the reporting worker still runs.
    """
    ended = [pod for pod in pods if pod.phase == "Succeeded"]
    running = [pod for pod in pods if pod.phase != "Succeeded"]
    if not ended or not running:
        return None
    moments = [moment for pod in ended if (moment := ended_by(pod))]
    if len(moments) < len(ended):
        return None
    if ready := find(status.conditions, ConditionType.GANG_READY):
        # No worker was late before that, whatever a node's clock says.
        moments.append(parse_time(ready.last_transition_time))
    progress, reporter = status.progress, WorkerId(status.attempt, 0, 0)
    if progress and progress.last_advance_time and running[0].worker == reporter:
        moments.append(parse_time(progress.last_advance_time))
    limit = max(_LIMITS[ReportPhase.DONE], timedelta(seconds=policy.progress_deadline_seconds or 0))
    message = (
        f"{len(ended)} of {count(len(pods), 'worker')} succeeded, and {running[0].name} has not ended within"
        f" {limit.total_seconds():.0f} s after that; {_MORE}"
    )
    return Straggler(running[0], message, max(moments) + limit)


def _is_heard(status: Status, inbox: Inbox, now: datetime) -> bool:
    """Tells whether reports of exact steps arrive: a percentage of a long training stays the same for many steps."""
    report = inbox.report
    if report is None or not report.exact:
        return False
    return report.attempt == status.attempt and now - report.received <= _SILENCE


def _limit(phase: ReportPhase | None, status: Status, policy: RunPolicy) -> timedelta | None:
    seconds = policy.progress_deadline_seconds
    configured = timedelta(seconds=seconds) if seconds is not None else None
    match phase:
        case None:
            return configured
        case ReportPhase.TRAINING:
            return configured or max(_LIMITS[phase], _STEPS * _usual_step(status))
        case _:
            return max(configured, _LIMITS[phase]) if configured else _LIMITS[phase]


def _usual_step(status: Status) -> timedelta:
    """Returns how long a step takes at the last reported rate; 0 if none was reported."""
    rate = float(status.progress.examples_per_second or 0) if status.progress else 0.0
    if status.resolved is None or not rate > 0:
        return timedelta(0)
    return timedelta(seconds=min(status.resolved.global_batch_size / rate, _LONGEST_STEP_SECONDS))


def stacks_due(inbox: Inbox, now: datetime) -> timedelta | None:
    """Returns how much longer to wait for the stacks; None if they were not requested."""
    if inbox.asked_for_stacks is None:
        return None
    if inbox.report is not None and inbox.report.stacks is not None:
        return timedelta(0)
    return max(timedelta(0), inbox.asked_for_stacks + STACKS_WAIT - now)
