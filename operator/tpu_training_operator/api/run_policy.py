"""`spec.runPolicy`: suspend, the start deadline, and how often which class of failure may restart the gang."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from tpu_training_operator.api.model import ApiModel, Boolean, Count

_RestartLimit = Annotated[int, Field(strict=True, ge=-1, le=10_000)]


class FailureClass(StrEnum):
    """Why an attempt failed; the keys of `restart.limits` and of `status.restarts.byClass`."""

    USER_ERROR = "UserError"
    INFRASTRUCTURE = "Infrastructure"
    PREEMPTION = "Preemption"
    OUT_OF_MEMORY = "OutOfMemory"
    HANG = "Hang"
    UNKNOWN = "Unknown"


class RestartLimits(ApiModel):
    """Restarts allowed per failure class over the job's life; -1 is without limit."""

    user_error: _RestartLimit = Field(0, alias="UserError")
    infrastructure: _RestartLimit = Field(20, alias="Infrastructure")
    preemption: _RestartLimit = Field(-1, alias="Preemption")
    out_of_memory: _RestartLimit = Field(1, alias="OutOfMemory")
    hang: _RestartLimit = Field(3, alias="Hang")
    unknown: _RestartLimit = Field(3, alias="Unknown")

    def of(self, failure_class: FailureClass) -> int:
        return {
            FailureClass.USER_ERROR: self.user_error,
            FailureClass.INFRASTRUCTURE: self.infrastructure,
            FailureClass.PREEMPTION: self.preemption,
            FailureClass.OUT_OF_MEMORY: self.out_of_memory,
            FailureClass.HANG: self.hang,
            FailureClass.UNKNOWN: self.unknown,
        }[failure_class]


class Backoff(ApiModel):
    """Wait before a restart: initialSeconds, doubled with every restart, at most maxSeconds."""

    initial_seconds: Count = 5
    max_seconds: Count = 300


class Restart(ApiModel):
    limits: RestartLimits = Field(default_factory=RestartLimits)
    backoff: Backoff = Field(default_factory=Backoff)


class RunPolicy(ApiModel):
    suspend: Boolean = Field(False, description="True stops the gang; false starts a new attempt.")
    start_deadline_seconds: Count = Field(
        600,
        description="A gang of which only a part has found nodes gives them back when no further worker has found"
        " one for so long, and tries again later.",
    )
    restart: Restart = Field(default_factory=Restart)
