"""How a job presents itself: the state word, and the conditions that kstatus reads.

              Ready    Reconciling   Stalled    kstatus, kubectl wait, Flux, Argo CD
in progress   False    True          -          InProgress
current       True     -             -          Current  (running, suspended and succeeded are what was asked for)
failed        False    -             True       Failed
"""

from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from tpu_training_operator.api.conditions import (
    LONGEST_MESSAGE,
    Condition,
    ConditionType,
    Reason,
    find,
    is_true,
    with_condition,
    without_condition,
)
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.status import Activity, Goodput, State, Status
from tpu_training_operator.domain.cluster_state.observed import Observed, format_time
from tpu_training_operator.domain.plan.common import accounts
from tpu_training_operator.domain.plan.common.accounts import Holding, read_holding

_CURRENT = (State.RUNNING, State.SUSPENDED, State.SUCCEEDED)
_FAILED = (State.BLOCKED, State.INVALID, State.FAILED)


@dataclass(frozen=True)
class ReadyState:
    """What the job shows: its state, and why it is or is not ready. `is_stopping`: it is suspended, and still has
    workers."""

    state: State
    reason: Reason
    message: str
    is_stopping: bool = False


def is_held(status: Status) -> bool:
    """Returns whether the job waits in a queue, so that its workers are stopped, if it has any."""
    admitted = find(status.conditions, ConditionType.ADMITTED)
    return admitted is not None and not admitted.is_true


@dataclass(frozen=True)
class JobState:
    """A job as one pass finds it, whether or not its spec is valid, and the writing of its next status."""

    observed: Observed
    status: Status
    now: datetime

    @property
    def attempt(self) -> int:
        return self.status.attempt

    @property
    def has_finished(self) -> bool:
        """Returns whether the job has ended. An edit of the status may leave only one of the signs, and a finished job
        must not train again."""
        ends = (ConditionType.SUCCEEDED, ConditionType.FAILED)
        return self.status.completion_time is not None or any(is_true(self.status.conditions, end) for end in ends)

    @property
    def is_leaving(self) -> bool:
        """Returns whether the job or its namespace is being deleted."""
        return "deletionTimestamp" in self.observed.job["metadata"] or self.observed.is_namespace_going

    @property
    def is_suspended(self) -> bool:
        return is_true(self.status.conditions, ConditionType.SUSPENDED)

    @property
    def is_held(self) -> bool:
        return is_held(self.status)

    @cached_property
    def holding(self) -> Holding:
        """The chips of the job's workers and placeholders."""
        return read_holding(self.observed, self.status, self.now)

    def charge(self, goodput: Goodput, until: datetime, then: Activity) -> Goodput:
        return accounts.charge(goodput, until, then, self.holding)

    def with_condition(
        self, status: Status, kind: ConditionType, value: bool | None, reason: Reason, message: str
    ) -> Status:
        """Returns the status with this condition. `value`: None for Unknown."""
        condition = Condition(
            type=kind,
            status="Unknown" if value is None else "True" if value else "False",
            observed_generation=self.observed.generation,
            last_transition_time=format_time(self.now),
            reason=reason,
            # The API server's refusal can be as long as the object that it refuses.
            message=message[:LONGEST_MESSAGE],
        )
        return replace(status, conditions=with_condition(status.conditions, condition))

    def present(self, status: Status, ready: ReadyState) -> Status:
        """Returns the status that shows `ready`, as observed now."""
        is_ready, is_stalled = ready.state in _CURRENT and not ready.is_stopping, ready.state in _FAILED
        shown = {
            ConditionType.READY: is_ready,
            ConditionType.RECONCILING: not is_ready and not is_stalled,
            ConditionType.STALLED: is_stalled,
        }
        for kind, value in shown.items():
            if value or kind is ConditionType.READY:
                status = self.with_condition(status, kind, value, ready.reason, ready.message)
            else:
                status = replace(status, conditions=without_condition(status.conditions, kind))
        return replace(status, observed_generation=self.observed.generation, state=ready.state)

    def finish(self, status: Status, ready: ReadyState) -> Status:
        """Returns the last status of the job. The job ends when its goodput does: if the clock was set back, that is
        later than now."""
        status = self.with_condition(status, ConditionType.GANG_READY, False, ready.reason, ready.message)
        goodput = status.goodput and self.charge(status.goodput, self.now, Activity.FINISHED)
        ended = goodput.since if goodput else format_time(self.now)
        return self.present(replace(status, completion_time=ended, goodput=goodput, avoided_nodes=[]), ready)
