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
        description="UserError: errors in your code or job. Infrastructure: faults of nodes, network or storage."
        " Preemption: nodes that were taken away or drained. OutOfMemory: more of the host's memory than the limit."
        " Hang: no progress. NotFinite: the loss became NaN or infinite. Unknown: all others.",
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
        description="Seconds for which a restart counts; a checkpoint at a new highest step clears all counts sooner.",
    )
    backoff: Backoff = Field(
        default_factory=Backoff,
        description="Delay before a restart: none for the first after progress, then initialSeconds, doubling up to"
        " maxSeconds, each shortened at random by up to 50 %.",
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
        description="Chip-hours that all attempts of the job together may use. A worker holds its chips from the moment"
        " it gets its node until it has stopped."
    )
    on_exceeded: OnExceeded = Field(
        OnExceeded.SUSPEND,
        description="Once the workers have saved and stopped. Suspend: the job continues when chipHours is raised."
        " Fail: it ends.",
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
        description="How long a gang with nodes for only some workers keeps them before it tries again later. A gang"
        " with all nodes restarts if a container has not started after 30 minutes, or this long if longer.",
    )
    active_deadline_seconds: Count | None = Field(
        None,
        description="Fail the job after it has been active for this long. Time spent waiting for nodes or suspended"
        " does not count. Unlimited by default.",
    )
    progress_deadline_seconds: Count | None = Field(
        None,
        description="Restart the gang if no new step is reported for this long, by your own loop, too. Default, while"
        " worker 0 reports: 15 minutes (or 20 typical steps, if longer) in training and 45 minutes elsewhere. A worker"
        " that runs 45 minutes after its peers succeeded, or this long if longer, also counts as hung.",
    )
    budget: ChipBudget | None = Field(None, description="How many chip-hours the job may use. Unlimited by default.")
    ttl_seconds_after_finished: Count | None = Field(
        None, description="Delete the job and all it owns this long after it finished. Kept by default."
    )
    slice_check: SliceCheckPolicy = Field(
        SliceCheckPolicy.SKIP,
        description="Check: before the first step of every attempt the workers check their slice, for at most 20 s:"
        " devices, shared memory, ports, speed and sums of the chips. A host that fails ends the attempt as"
        " Infrastructure, HostUnfit, and its node is avoided. Needs the trainer in the image. Skip: train at once.",
    )
    restart: Restart = Field(default_factory=Restart, description="Whether and when the gang restarts after a failure.")
