"""`spec.runPolicy`: suspend, the deadlines, and how often which class of failure may restart the gang."""

from datetime import timedelta
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from tpu_training_operator.api.model import ApiModel, Boolean, Count

MOST_COUNTED_RESTARTS = 100
"""The status keeps the time of every restart that counts: a class that may restart more often is one without limit."""

UNLIMITED = -1
_RestartLimit = Annotated[int, Field(strict=True, ge=UNLIMITED, le=MOST_COUNTED_RESTARTS)]
# Digits enough for two years in seconds.
_Window = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,7}(s|m|h|d)$", max_length=9)]
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
# As long as any job lives. In days the digits reach beyond the calendar, where no time can be computed.
_LONGEST_WINDOW = timedelta(days=36_500)


class FailureClass(StrEnum):
    """Why an attempt failed; the keys of `restart.limits` and of `status.restarts.byClass`."""

    USER_ERROR = "UserError"
    INFRASTRUCTURE = "Infrastructure"
    PREEMPTION = "Preemption"
    OUT_OF_MEMORY = "OutOfMemory"
    HANG = "Hang"
    NOT_FINITE = "NotFinite"
    UNKNOWN = "Unknown"


class RestartLimits(ApiModel):
    """Restarts allowed per failure class within `restart.window`; -1 is without limit."""

    user_error: _RestartLimit = Field(0, alias="UserError")
    infrastructure: _RestartLimit = Field(20, alias="Infrastructure")
    preemption: _RestartLimit = Field(-1, alias="Preemption")
    out_of_memory: _RestartLimit = Field(1, alias="OutOfMemory")
    hang: _RestartLimit = Field(3, alias="Hang")
    not_finite: _RestartLimit = Field(
        0, alias="NotFinite", description="The loss became NaN or infinite; the same training would do so again."
    )
    unknown: _RestartLimit = Field(3, alias="Unknown")

    def of(self, failure_class: FailureClass) -> int | None:
        """None: without limit."""
        limit = {
            FailureClass.USER_ERROR: self.user_error,
            FailureClass.INFRASTRUCTURE: self.infrastructure,
            FailureClass.PREEMPTION: self.preemption,
            FailureClass.OUT_OF_MEMORY: self.out_of_memory,
            FailureClass.HANG: self.hang,
            FailureClass.NOT_FINITE: self.not_finite,
            FailureClass.UNKNOWN: self.unknown,
        }[failure_class]
        return None if limit == UNLIMITED else limit


class Backoff(ApiModel):
    """Wait before a restart: none before the first since the training last got on (a checkpoint beyond all before),
    then initialSeconds, doubled with every further one, at most maxSeconds, less a share of up to a half that differs
    between jobs."""

    initial_seconds: Count = 5
    max_seconds: Count = 300


class Restart(ApiModel):
    limits: RestartLimits = Field(default_factory=RestartLimits)
    window: _Window = Field(
        "24h",
        description="A restart counts against its limit for so long, or until a checkpoint is reported that goes beyond"
        " all before: 90s, 30m, 24h or 7d. More than a hundred years count as a hundred.",
    )
    backoff: Backoff = Field(default_factory=Backoff)

    @property
    def window_length(self) -> timedelta:
        return min(timedelta(**{_UNITS[self.window[-1]]: int(self.window[:-1])}), _LONGEST_WINDOW)


class RunPolicy(ApiModel):
    suspend: Boolean = Field(False, description="True stops the gang; false starts a new attempt.")
    start_deadline_seconds: Count = Field(
        600,
        description="A gang of which only a part has found nodes gives them back when no further worker has found"
        " one for so long, and tries again later. One that has all its nodes restarts when not all of its containers"
        " have started within 30 minutes, or within this time if it is longer.",
    )
    active_deadline_seconds: Count | None = Field(
        None,
        description="The job fails when it has been active for so long. Time in which it waits for nodes or is"
        " suspended does not count.",
    )
    progress_deadline_seconds: Count | None = Field(
        None,
        description="A gang that runs and reports no further step for so long is taken for hung, and restarts. Goes for"
        " a loop of your own too, which must then report its steps. A worker that runs on after its peers have"
        " succeeded is taken for hung after 45 minutes, or after this time if it is longer.",
    )
    ttl_seconds_after_finished: Count | None = Field(
        None, description="The job is deleted, with all that it owns, so long after it has finished."
    )
    restart: Restart = Field(default_factory=Restart)
