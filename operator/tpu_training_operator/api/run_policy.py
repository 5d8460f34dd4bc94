"""`spec.runPolicy`: suspension, deadlines, the budget, and how often each class of failure may restart the gang."""

from datetime import timedelta
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from tpu_training_operator.api.model import ApiModel, Boolean, Count, Rule, map_by

MOST_COUNTED_RESTARTS = 100
"""The status keeps the time of every restart that counts, so a larger limit must be unlimited."""
UNLIMITED = -1


class FailureClass(StrEnum):
    """Why an attempt failed. The `class` in `restart.limits` and `status.restarts`."""

    USER_ERROR = "UserError"
    INFRASTRUCTURE = "Infrastructure"
    PREEMPTION = "Preemption"
    OUT_OF_MEMORY = "OutOfMemory"
    HANG = "Hang"
    NOT_FINITE = "NotFinite"
    UNKNOWN = "Unknown"


_DEFAULT_LIMITS = {
    FailureClass.USER_ERROR: 0,
    FailureClass.INFRASTRUCTURE: 20,
    FailureClass.PREEMPTION: UNLIMITED,
    FailureClass.OUT_OF_MEMORY: 1,
    FailureClass.HANG: 3,
    FailureClass.NOT_FINITE: 0,
    FailureClass.UNKNOWN: 3,
}


class RestartLimit(ApiModel):
    failure_class: FailureClass = Field(
        alias="class",
        description="Failures that the limit is for. UserError: errors in your code or job, which would fail again."
        " Infrastructure: faults of nodes, network or storage. Preemption: nodes that were taken away or drained."
        " OutOfMemory: a worker exceeded its memory limit on the host. Hang: the training made no progress. NotFinite:"
        " the loss became NaN or infinite. Unknown: all others.",
    )
    max: Annotated[int, Field(strict=True, ge=UNLIMITED, le=MOST_COUNTED_RESTARTS)] = Field(
        description="Restarts allowed within windowSeconds; -1 is unlimited, 0 means none."
    )


class Backoff(ApiModel):
    initial_seconds: Count = Field(5, description="Delay before the second counted restart, in seconds.")
    max_seconds: Count = Field(300, description="Longest delay before a restart, in seconds.")


class Restart(ApiModel):
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.limits) || self.limits.all(one, self.limits.exists_one(other, other.class == one.class))",
            message="give one limit for each class",
            holds=lambda restart: len({limit.failure_class for limit in restart.limits}) == len(restart.limits),
            field="limits",
        ),
    )

    limits: Annotated[list[RestartLimit], Field(max_length=len(FailureClass), json_schema_extra=map_by("class"))] = (
        Field(
            default_factory=list,
            description="Restarts allowed for a class of failures. A class that is left out has its default: UserError"
            " 0, Infrastructure 20, Preemption -1, OutOfMemory 1, Hang 3, NotFinite 0, Unknown 3.",
        )
    )
    window_seconds: Count = Field(
        86400,
        description="How long a restart counts against its limit, in seconds. A checkpoint at a new highest step clears"
        " all counts sooner.",
    )
    backoff: Backoff = Field(
        default_factory=Backoff,
        description="Delay before a restart. The first restart after progress is immediate; then initialSeconds,"
        " doubling up to maxSeconds. Each delay is shortened by up to 50 %, differently for each job and attempt.",
    )

    def limit_of(self, failure_class: FailureClass) -> int | None:
        """Returns the limit of a class; None if unlimited."""
        limits = {limit.failure_class: limit.max for limit in self.limits}
        limit = limits.get(failure_class, _DEFAULT_LIMITS[failure_class])
        return None if limit == UNLIMITED else limit

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


class SliceCheckPolicy(StrEnum):
    CHECK = "Check"
    SKIP = "Skip"


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
    slice_check: SliceCheckPolicy = Field(
        SliceCheckPolicy.SKIP,
        description="Check: before the first step of every attempt the workers check their slice, for at most 20 s:"
        " devices, shared memory, ports, the speed of the chips and their sums. A host that fails ends the attempt with"
        " class Infrastructure and reason HostUnfit, and the next attempt avoids its node. The image must have the"
        " trainer, also for your own command. A change applies to the next attempt. Skip: train at once.",
    )
    restart: Restart = Field(default_factory=Restart, description="Whether and when the gang restarts after a failure.")
