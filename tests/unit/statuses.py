"""Statuses of a job at points of its life, for tests that count transitions between them."""

from dataclasses import replace
from typing import Any

from tpu_training_operator.api.conditions import Condition, ConditionType
from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.api.status import Failure, Goodput, Status


def at(seconds: int) -> str:
    """This many seconds after the job's creation at noon."""
    return f"2026-03-01T{12 + seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}Z"


def condition(kind: ConditionType, value: bool, seconds: int, reason: str = "Because") -> Condition:
    status = "True" if value else "False"
    return Condition(type=kind, status=status, last_transition_time=at(seconds), reason=reason)


def failure(attempt: int, seconds: int, failure_class: FailureClass = FailureClass.INFRASTRUCTURE) -> Failure:
    return Failure(
        attempt=attempt,
        pod=f"digits-{attempt}-0-0",
        slice=0,
        host=0,
        failure_class=failure_class,
        reason="Killed",
        message="",
        time=at(seconds),
    )


def goodput(since: int, **seconds: int) -> Goodput:
    return Goodput(since=at(since), **seconds)


def status(**fields: Any) -> Status:
    """A job that began at its creation, with further `fields`."""
    return replace(Status(start_time=at(0)), **fields)


def waiting(since: int, **fields: Any) -> Status:
    """A job whose workers have not all been ready since then."""
    return status(conditions=[condition(ConditionType.GANG_READY, False, since)], **fields)


def ready(since: int, **fields: Any) -> Status:
    return status(conditions=[condition(ConditionType.GANG_READY, True, since)], **fields)
