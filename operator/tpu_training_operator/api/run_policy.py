"""`spec.runPolicy`: suspension, deadlines, the budget, and how often each class of failure may restart the gang."""

from datetime import timedelta
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from tpu_training_operator.api.model import ApiModel, Boolean, Count

MOST_COUNTED_RESTARTS = 100
"""The status keeps the time of every restart that counts, so a larger limit has to be unlimited."""
UNLIMITED = -1

_RestartLimit = Annotated[int, Field(strict=True, ge=UNLIMITED, le=MOST_COUNTED_RESTARTS)]


class FailureClass(StrEnum):
    """Why an attempt failed. The keys of `restart.limits` and of `status.restarts.byClass`."""

    USER_ERROR = "UserError"
    INFRASTRUCTURE = "Infrastructure"
    PREEMPTION = "Preemption"
    OUT_OF_MEMORY = "OutOfMemory"
    HANG = "Hang"
    NOT_FINITE = "NotFinite"
    UNKNOWN = "Unknown"


class RestartLimits(ApiModel):
    user_error: _RestartLimit = Field(
        0, alias="UserError", description="Restarts after errors in your code or job, which would fail again."
    )
    infrastructure: _RestartLimit = Field(
        20, alias="Infrastructure", description="Restarts after faults of nodes, network or storage."
    )
    preemption: _RestartLimit = Field(
        -1, alias="Preemption", description="Restarts after nodes were taken away or drained for maintenance."
    )
    out_of_memory: _RestartLimit = Field(
        1, alias="OutOfMemory", description="Restarts after a worker exceeded its memory limit on the host."
    )
    hang: _RestartLimit = Field(3, alias="Hang", description="Restarts after the training made no progress.")
    not_finite: _RestartLimit = Field(
        0,
        alias="NotFinite",
        description="Restarts after the loss became NaN or infinite, which the same training would repeat.",
    )
    unknown: _RestartLimit = Field(3, alias="Unknown", description="Restarts after failures of unknown cause.")

    def of(self, failure_class: FailureClass) -> int | None:
        """The limit of a class; None if unlimited."""
        limit: int = getattr(self, failure_class.name.lower())
        return None if limit == UNLIMITED else limit


class Backoff(ApiModel):
    initial_seconds: Count = Field(5, description="Delay before the second counted restart, in seconds.")
    max_seconds: Count = Field(300, description="Longest delay before a restart, in seconds.")


class Restart(ApiModel):
    limits: RestartLimits = Field(
        default_factory=RestartLimits,
        description="Restarts allowed for each failure class within restart.windowSeconds; -1 is unlimited, 0 means"
        " none.",
    )
    window_seconds: Count = Field(
        86400,
        description="How long a restart counts against its limit, in seconds. A checkpoint at a new highest step clears"
        " all counts earlier.",
    )
    backoff: Backoff = Field(
        default_factory=Backoff,
        description="Delay before a restart. The first restart after progress is immediate; then initialSeconds,"
        " doubling up to maxSeconds. Each delay is shortened by up to 50 %, differently for each job and attempt.",
    )

    @property
    def window(self) -> timedelta:
        return timedelta(seconds=self.window_seconds)


class OnExceeded(StrEnum):
    FAIL = "Fail"
    SUSPEND = "Suspend"


class ChipBudget(ApiModel):
    chip_hours: Count = Field(
        description="Chip-hours that all attempts of the job together may use; one chip held for an hour is one"
        " chip-hour. A worker holds its chips from the moment it gets its node until it has stopped. You can change the"
        " budget at any time."
    )
    on_exceeded: OnExceeded = Field(
        OnExceeded.SUSPEND,
        description="What happens to the job once its workers have saved and stopped. Suspend: it continues when"
        " chipHours is raised. Fail: it ends.",
    )


class RunPolicy(ApiModel):
    suspend: Boolean = Field(
        False, description="True stops the gang and frees its nodes; false again starts a new attempt."
    )
    start_deadline_seconds: Count = Field(
        600,
        description="If only some workers have found nodes and no further one does for this long, the gang gives its"
        " nodes back and tries again later. If all have nodes, the gang restarts when some container has not started"
        " within 30 minutes, or within this time if it is longer.",
    )
    active_deadline_seconds: Count | None = Field(
        None,
        description="Fail the job after it has been active for this long. Time spent waiting for nodes or suspended"
        " does not count. Unlimited by default.",
    )
    progress_deadline_seconds: Count | None = Field(
        None,
        description="Restart the gang if no new step is reported for this long. Also applies to your own loop, which"
        " must then report its steps. A worker that still runs 45 minutes after its peers succeeded, or this long if"
        " that is longer, also counts as hung. By default the limit is 15 minutes (or 20 typical steps, if longer) in"
        " training and 45 minutes elsewhere, and applies only while worker 0 still reports.",
    )
    budget: ChipBudget | None = Field(None, description="How many chip-hours the job may use. Unlimited by default.")
    ttl_seconds_after_finished: Count | None = Field(
        None, description="Delete the job and all it owns this long after it finished. Kept by default."
    )
    restart: Restart = Field(default_factory=Restart, description="Whether and when the gang restarts after a failure.")
