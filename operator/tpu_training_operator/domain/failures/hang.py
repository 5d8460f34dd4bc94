"""Whether a gang that runs still gets on.

The trainer has a watchdog of its own in every process; this is for what no watchdog in a worker can tell: a worker that
is stopped as a whole, a node that computes nothing, a loop of the user's own. How long nothing may happen depends on
what was reported last: a compilation or an evaluation may take long, a step may not.

Without `progressDeadlineSeconds` only a worker that is heard, and reports the same step again and again, is taken for
hung. One that is not heard any more may be well behind a network policy, and what trains is not to be stopped for that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tpu_training_operator.api.conditions import ConditionType, find
from tpu_training_operator.api.run_policy import RunPolicy
from tpu_training_operator.api.status import ReportPhase, Status
from tpu_training_operator.domain.failures.pod_signs import ended_by
from tpu_training_operator.domain.naming import WorkerId
from tpu_training_operator.domain.observed import WorkerPod, parse_time
from tpu_training_operator.domain.report import Inbox
from tpu_training_operator.domain.words import count

# Beyond the trainer's own limits (`tpu_trainer.doctor.hang`: 5 and 30 minutes), so that the watchdog, which knows
# more, speaks first.
_LIMITS: Mapping[ReportPhase, timedelta] = {
    ReportPhase.STARTING: timedelta(minutes=45),
    ReportPhase.TRAINING: timedelta(minutes=15),
    ReportPhase.EVALUATING: timedelta(minutes=45),
    ReportPhase.CHECKPOINTING: timedelta(minutes=45),
    # Its peers still write, or its process does not end.
    ReportPhase.DONE: timedelta(minutes=45),
}
_MORE = "a larger spec.runPolicy.progressDeadlineSeconds allows more"
# A step that is slow takes longer than that: so many times its usual length.
_STEPS = 20
_LONGEST_STEP_SECONDS = 3600.0
# A worker reports every five to ten seconds.
_SILENCE = timedelta(minutes=1)
# Of two operators, or of one over time.
_CLOCKS_DIFFER = timedelta(minutes=1)
# A worker that can answer does so with its next report, ten seconds later at most.
STACKS_WAIT = timedelta(seconds=15)


@dataclass(frozen=True)
class Standstill:
    """Nothing has happened since `since`; after `limit` that is a hang."""

    since: datetime
    limit: timedelta
    message: str

    @property
    def deadline(self) -> datetime:
        return self.since + self.limit


def standstill(status: Status, inbox: Inbox, policy: RunPolicy, now: datetime, *, reports: bool) -> Standstill | None:
    """None where no limit applies: nobody listens, the gang is not complete, or it is not heard and has no
    `progressDeadlineSeconds`. `reports`: the job's trainer is ours, which always reports.

    The time runs from when this operator began to listen at the earliest: what was said before went to another. For a
    worker that is not heard it also runs from the last report that failed through no fault of its own; one that is
    heard is judged by what it says.
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
        # Where the clock was set back since the gang became ready, only what was reported afterwards has a time.
        since = advance if advance <= now < since - _CLOCKS_DIFFER else max(since, advance)
    if inbox.unheard is not None and not is_heard:
        since = max(since, inbox.unheard)
    where = f"after step {progress.step} of {progress.total_steps}" if progress else "since the gang is ready"
    doing = f" in phase {phase}" if phase else ""
    message = f"no step was reported for {limit.total_seconds():.0f} s, {where}{doing}; {_MORE}"
    return Standstill(since, limit, message)


@dataclass(frozen=True)
class Straggler:
    """A worker that runs although peers have succeeded; at `deadline` it counts as hung."""

    pod: WorkerPod
    message: str
    deadline: datetime


def straggler(pods: Sequence[WorkerPod], status: Status, policy: RunPolicy) -> Straggler | None:
    """None while no worker has succeeded, or where nothing says when one did. The time runs from the last one that did,
    and from the last step that a reporting worker has told of if it still runs."""
    ended = [pod for pod in pods if pod.phase == "Succeeded"]
    running = [pod for pod in pods if pod.phase != "Succeeded"]
    if not ended or not running:
        return None
    moments = [moment for pod in ended if (moment := ended_by(pod))]
    if len(moments) < len(ended):
        return None
    if ready := find(status.conditions, ConditionType.GANG_READY):
        # Nobody had hung before, whatever a node's clock says.
        moments.append(parse_time(ready.last_transition_time))
    progress, reporter = status.progress, WorkerId(status.attempt, 0, 0)
    if progress and progress.last_advance_time and running[0].worker == reporter:
        moments.append(parse_time(progress.last_advance_time))
    limit = max(_LIMITS[ReportPhase.DONE], timedelta(seconds=policy.progress_deadline_seconds or 0))
    message = (
        f"{len(ended)} of {count(len(pods), 'worker')} succeeded, and {running[0].name} has not ended within"
        f" {limit.total_seconds():.0f} s since; {_MORE}"
    )
    return Straggler(running[0], message, max(moments) + limit)


def _is_heard(status: Status, inbox: Inbox, now: datetime) -> bool:
    """And says which step it makes: a percentage of a long training stands for longer than any step."""
    report = inbox.report
    if report is None or not report.exact:
        return False
    return report.attempt == status.attempt and now - report.received <= _SILENCE


def _limit(phase: ReportPhase | None, status: Status, policy: RunPolicy) -> timedelta | None:
    given = policy.progress_deadline_seconds
    own = timedelta(seconds=given) if given is not None else None
    match phase:
        case None:
            return own
        case ReportPhase.TRAINING:
            return own or max(_LIMITS[phase], _STEPS * _usual_step(status))
        case _:
            return max(own, _LIMITS[phase]) if own else _LIMITS[phase]


def _usual_step(status: Status) -> timedelta:
    """How long a step takes by the rate that was reported last; 0 where none was."""
    rate = float(status.progress.examples_per_second or 0) if status.progress else 0.0
    if status.resolved is None or not rate > 0:
        return timedelta(0)
    return timedelta(seconds=min(status.resolved.global_batch_size / rate, _LONGEST_STEP_SECONDS))


def stacks_due(inbox: Inbox, now: datetime) -> timedelta | None:
    """How long to wait for the stacks that were asked for; None where they have not been asked for, or not again."""
    if inbox.asked_for_stacks is None:
        return None
    if inbox.report is not None and inbox.report.stacks is not None:
        return timedelta(0)
    return max(timedelta(0), inbox.asked_for_stacks + STACKS_WAIT - now)
