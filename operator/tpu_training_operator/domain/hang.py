"""Whether a gang that runs still gets on. Called by the planner for gangs in which nothing has failed.

The trainer has a watchdog of its own in every process; this is for what no watchdog in a worker can tell: a worker that
is stopped as a whole, a node that computes nothing, a loop of the user's own. How long nothing may happen depends on
what was reported last: a compilation or an evaluation may take long, a step may not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from tpu_training_operator.api.conditions import ConditionType, find
from tpu_training_operator.api.run_policy import RunPolicy
from tpu_training_operator.api.status import ReportPhase, Status
from tpu_training_operator.domain.observed import parse_time
from tpu_training_operator.domain.report import Inbox

# Beyond the trainer's own limits (`tpu_trainer.doctor.hang`: 5 and 30 minutes), so that the watchdog, which knows
# more, speaks first.
_LIMITS: Mapping[ReportPhase, timedelta] = {
    ReportPhase.STARTING: timedelta(minutes=45),
    ReportPhase.TRAINING: timedelta(minutes=15),
    ReportPhase.EVALUATING: timedelta(minutes=45),
    ReportPhase.CHECKPOINTING: timedelta(minutes=45),
}
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


def standstill(status: Status, inbox: Inbox, policy: RunPolicy, *, reports: bool) -> Standstill | None:
    """None where no limit applies: nobody listens, the gang is not complete, or it neither reports nor has
    `progressDeadlineSeconds`. `reports`: the job's trainer is ours, which always reports.

    The time runs from when this operator began to listen at the earliest: what was said before went to another.
    """
    ready = find(status.conditions, ConditionType.GANG_READY)
    if inbox.listening_since is None or ready is None or not ready.is_true:
        return None
    progress = status.progress
    heard = progress is not None and progress.phase is not None
    phase = progress.phase if progress is not None and heard else (ReportPhase.STARTING if reports else None)
    limit = _limit(phase, policy, heard=heard)
    if limit is None:
        return None
    advanced = progress.last_advance_time if progress else None
    since = max(parse_time(advanced or ready.last_transition_time), parse_time(ready.last_transition_time))
    since = max(since, inbox.listening_since)
    where = f"after step {progress.step} of {progress.total_steps}" if progress and heard else "since the gang is ready"
    doing = f" in phase {phase}" if phase else ""
    message = f"no step was reported for {limit.total_seconds():.0f} s, {where}{doing}"
    return Standstill(since, limit, message)


def _limit(phase: ReportPhase | None, policy: RunPolicy, *, heard: bool) -> timedelta | None:
    given = policy.progress_deadline_seconds
    own = timedelta(seconds=given) if given is not None else None
    match phase:
        case None:
            return own
        case ReportPhase.DONE:
            return None
        case ReportPhase.TRAINING:
            return own or _LIMITS[phase]
        case _ if not heard and own is None:
            # Where reports cannot get through, nothing at all is heard of a gang that is well.
            return None
        case _:
            return max(own, _LIMITS[phase]) if own else _LIMITS[phase]


def stacks_due(inbox: Inbox, now: datetime) -> timedelta | None:
    """How long to wait for the stacks that were asked for; None where they have not been asked for, or not again."""
    if inbox.asked_for_stacks is None:
        return None
    if inbox.report is not None and inbox.report.stacks is not None:
        return timedelta(0)
    return max(timedelta(0), inbox.asked_for_stacks + STACKS_WAIT - now)
