"""Condition types, condition and event reasons, and how a condition is set and cleared (metav1.Condition semantics).

kstatus (Flux, Argo CD, `kubectl wait`) reads Ready, Reconciling and Stalled. The last two are abnormal-true: they are
present only while they are true.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, TypeAdapter, model_validator
from pydantic.alias_generators import to_camel
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from tpu_training_operator.api.lenient import read_leniently
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.text import plain_json

LONGEST_MESSAGE = 4096


class ConditionType(StrEnum):
    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    SUSPENDED = "Suspended"
    ADMITTED = "Admitted"
    """Only on jobs in a queue: whether Kueue lets the job have workers. False while workers still stop."""
    ENTRY_CHECK_PASSED = "EntryCheckPassed"
    """Only if there was something to check. Unknown until it is decided, which happens once."""
    DATA_IN_REGION = "DataInRegion"
    """Whether the job's buckets are near its slice, if the entry check looked. Unknown if it could not find out."""
    STEP_FITS = "StepFits"
    """Whether the step fits into a core's memory, if the entry check was to compile it. Unknown without an answer."""
    GANG_READY = "GangReady"
    BUDGET_LOW = "BudgetLow"
    """Only while it is true: most of `runPolicy.budget` is used."""
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class Reason(StrEnum):
    """Why a condition has its value. A closed list, so that alerts and scripts can rely on it."""

    WAITING_FOR_WORKERS = "WaitingForWorkers"
    REPLACING_WORKERS = "ReplacingWorkers"
    WAITING_FOR_DELETED_JOB = "WaitingForDeletedJob"
    SOME_PODS_UNSCHEDULABLE = "SomePodsUnschedulable"
    MOVING = "Moving"
    ALL_WORKERS_READY = "AllWorkersReady"
    ALL_WORKERS_SUCCEEDED = "AllWorkersSucceeded"
    SUSPENDED = "Suspended"
    BEING_DELETED = "BeingDeleted"
    RESUMED = "Resumed"
    QUEUED = "Queued"
    ADMITTED = "Admitted"
    EVICTED = "Evicted"
    DEACTIVATED = "Deactivated"
    QUEUE_UNUSABLE = "QueueUnusable"
    PLACEMENT_CONFLICT = "PlacementConflict"
    QUOTA_RELEASED = "QuotaReleased"
    CHECKING_ENTRY = "CheckingEntry"
    ENTRY_PASSED = "EntryPassed"
    ENTRY_FAILED = "EntryFailed"
    ENTRY_NOT_CHECKED = "EntryNotChecked"
    BUCKETS_IN_REGION = "BucketsInRegion"
    BUCKET_OUTSIDE_REGION = "BucketOutsideRegion"
    BUCKET_REGION_UNKNOWN = "BucketRegionUnknown"
    STEP_FITS = "StepFits"
    STEP_TOO_LARGE = "StepTooLarge"
    STEP_NOT_COMPILED = "StepNotCompiled"
    RESTART_LIMIT_REACHED = "RestartLimitReached"
    NEXT_RUNG = "NextRung"
    GATE_FAILED = "GateFailed"
    NOT_RETRYABLE = "NotRetryable"
    DIVERGED_TWICE = "DivergedTwice"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    BUDGET_LOW = "BudgetLow"
    BUDGET_EXCEEDED = "BudgetExceeded"
    INVALID_SPEC = "InvalidSpec"
    NAME_CONFLICT = "NameConflict"
    NOT_PERMITTED = "NotPermitted"
    INVALID_OBJECT = "InvalidObject"
    PROGRESSING_WITH_RETRY = "ProgressingWithRetry"


class EventReason(StrEnum):
    """Why a Kubernetes event about a job was written."""

    QUEUED = "Queued"
    EVICTED = "Evicted"
    CHECKING_ENTRY = "CheckingEntry"
    ENTRY_PASSED = "EntryPassed"
    ENTRY_NOT_CHECKED = "EntryNotChecked"
    BUCKET_OUTSIDE_REGION = "BucketOutsideRegion"
    STEP_FITS = "StepFits"
    STEP_TOO_LARGE = "StepTooLarge"
    STEP_NOT_COMPILED = "StepNotCompiled"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    NODES_RELEASED = "NodesReleased"
    NEXT_RUNG = "NextRung"
    RUNG_PASSED = "RungPassed"
    MOVING = "Moving"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    BUDGET_LOW = "BudgetLow"
    BUDGET_EXCEEDED = "BudgetExceeded"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    BLOCKED = "Blocked"
    INVALID_SPEC = "InvalidSpec"
    STATUS_LOST = "StatusLost"
    RETRYING = "Retrying"
    NETWORK_POLICY_MISSING = "NetworkPolicyMissing"
    PLACEHOLDER_REFUSED = "PlaceholderRefused"


WIRE = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore")
"""camelCase in the object, snake_case in Python; a newer operator's fields are dropped, not refused."""


@dataclass(frozen=True, kw_only=True, config=WIRE)
class StatusModel:
    """A part of the status. A dataclass, so that `dataclasses.replace` with a misspelt field is a type error.

    Control characters are removed from every text, wherever the text comes from: people read the status in a terminal.
    """

    @model_validator(mode="before")
    @classmethod
    def _make_plain(cls, data: Any) -> Any:
        if not isinstance(data, ArgsKwargs):
            return plain_json(data)
        # Most of what `replace` passes on is plain already, and a pass does that a hundred times.
        changed = {name: plain_json(value) for name, value in (data.kwargs or {}).items() if not _is_plain(value)}
        return ArgsKwargs(data.args, {**data.kwargs, **changed}) if data.kwargs and changed else data

    @classmethod
    def read(cls, body: Any) -> Self:
        """Reads the part from an object's JSON, which may be None. Leaves out what it cannot read: a newer operator may
        have written it, and after a rollback this one must still look after the job."""
        return read_leniently(TypeAdapter(cls), body or {})

    def as_json(self) -> dict[str, Any]:
        """Returns the part's JSON, without empty fields."""
        body: dict[str, Any] = _without_empty(
            TypeAdapter(type(self)).dump_python(self, by_alias=True, exclude_none=True, mode="json")
        )
        return body


def _is_plain(value: Any) -> bool:
    return value.isprintable() if isinstance(value, str) else not value or not isinstance(value, dict | list | tuple)


def _without_empty(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    parts = {key: _without_empty(part) for key, part in value.items()}
    return {key: part for key, part in parts.items() if part not in ({}, [])}


@dataclass(frozen=True, kw_only=True, config=WIRE)
class Condition(StatusModel):
    type: Annotated[str, Field(max_length=64)] = Field(description="Kind of condition, for example Ready.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether the condition holds.")
    observed_generation: int = Field(default=0, description="Generation of the spec that the condition was set for.")
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})] = Field(
        description="When the condition's status last changed."
    )
    reason: Annotated[str, Field(max_length=128)] = Field(description="Why it has this status, as one word.")
    message: Annotated[str, Field(max_length=LONGEST_MESSAGE)] = Field(
        default="", description="The reason in a sentence."
    )

    @property
    def is_true(self) -> bool:
        return self.status == "True"


def find(conditions: Iterable[Condition], kind: ConditionType) -> Condition | None:
    return next((condition for condition in conditions if condition.type == kind), None)


def is_true(conditions: Iterable[Condition], kind: ConditionType) -> bool:
    condition = find(conditions, kind)
    return condition is not None and condition.is_true


def with_condition(conditions: list[Condition], new: Condition) -> list[Condition]:
    """Returns the list with `new` in place of the condition of its type. Only a change of status changes the time."""
    old = find(conditions, ConditionType(new.type))
    if old is None:
        return [*conditions, new]
    if old.status == new.status:
        new = replace(new, last_transition_time=old.last_transition_time)
    return [new if condition.type == new.type else condition for condition in conditions]


def without_condition(conditions: list[Condition], kind: ConditionType) -> list[Condition]:
    return [condition for condition in conditions if condition.type != kind]
