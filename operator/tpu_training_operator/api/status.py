"""`status` as the operator writes it; unknown fields of a newer operator are dropped, not refused."""

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from tpu_training_operator.api.conditions import Condition
from tpu_training_operator.api.run_policy import FailureClass

MOST_METRICS = 64

_Text = Annotated[str, Field(max_length=1024)]
_Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]


class StatusModel(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)


class State(StrEnum):
    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    BLOCKED = "Blocked"
    INVALID = "Invalid"


class Resolved(StatusModel):
    """Every number derived from the spec, and in `notes` the rule that gave it."""

    accelerator_type: str
    generation: str
    topology: str
    machine_type: str | None = None
    slices: int
    hosts_per_slice: int
    hosts: int
    chips_per_host: int
    chips: int
    replicas: int
    per_replica_batch_size: int
    accumulation_steps: int = 1
    global_batch_size: int
    train_steps: int
    warmup_steps: int
    milestones: Annotated[list[int], Field(max_length=32)] | None = None
    evaluate_every_steps: int | None = None
    learning_rate: str
    weight_decay: str | None = None
    beta1: str | None = None
    beta2: str | None = None
    ema_decay: str | None = None
    scale_factor: str = Field(description="Global batch over the recipe's global batch.")
    notes: Annotated[list[_Text], Field(max_length=32)] = Field(default_factory=list)


class Failure(StatusModel):
    """The first failed worker of an attempt; what the others did afterwards is its consequence."""

    attempt: int
    pod: str
    node: str | None = None
    slice: int
    host: int
    exit_code: int | None = None
    failure_class: FailureClass = Field(alias="class")
    reason: str
    message: _Text
    time: _Time


class Restarts(StatusModel):
    by_class: dict[str, int] = Field(default_factory=dict)
    next_attempt_time: _Time | None = Field(None, description="The next attempt starts no earlier than this.")

    @property
    def total(self) -> int:
        return sum(self.by_class.values())


class Progress(StatusModel):
    """How far the training is, as worker 0 last reported it."""

    step: int
    total_steps: int
    examples_per_second: str | None = None
    loss: str | None = None
    metrics: Annotated[dict[str, str], Field(max_length=MOST_METRICS)] = Field(default_factory=dict)


class Status(StatusModel):
    observed_generation: int | None = None
    state: State | None = Field(None, description="One word for people; programs read the conditions.")
    attempt: int = Field(0, description="Attempts begun so far; 0 before the first.")
    start_time: _Time | None = None
    completion_time: _Time | None = None
    conditions: Annotated[
        list[Condition],
        Field(
            max_length=16,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = Field(default_factory=list)
    resolved: Resolved | None = None
    progress: Progress | None = None
    restarts: Restarts = Field(default_factory=Restarts)
    first_failure: Failure | None = None
    last_failure: Failure | None = None
