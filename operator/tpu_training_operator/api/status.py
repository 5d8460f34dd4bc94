"""`status` as the operator writes it; unknown fields of a newer operator are dropped, not refused."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, field_validator

from tpu_training_operator.api.conditions import Condition, StatusModel
from tpu_training_operator.api.run_policy import MOST_COUNTED_RESTARTS, FailureClass

MOST_METRICS = 64
MOST_WARNINGS = 20
MOST_NODES = 16
LONGEST_TEXT = 1024

_Text = Annotated[str, Field(max_length=LONGEST_TEXT)]
_Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]


class ReportPhase(StrEnum):
    """What the training is doing. The first steps count as starting: their programs are compiled."""

    STARTING = "Starting"
    TRAINING = "Training"
    EVALUATING = "Evaluating"
    CHECKPOINTING = "Checkpointing"
    DONE = "Done"


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
    step: int | None = Field(None, description="The training step at which it failed, where the worker told.")

    @field_validator("failure_class", mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        """A newer operator may know more classes than this one."""
        return value if value in list(FailureClass) else FailureClass.UNKNOWN


class Restarts(StatusModel):
    """`charged` says what is left of the budgets, `by_class` what the whole job has cost."""

    by_class: dict[str, int] = Field(default_factory=dict, description="Restarts over the job's life.")
    charged: dict[str, Annotated[list[_Time], Field(max_length=MOST_COUNTED_RESTARTS)]] = Field(
        default_factory=dict,
        description="When the restarts were that still count: within restart.window, and since the last checkpoint that"
        " went beyond all before.",
    )
    next_attempt_time: _Time | None = Field(None, description="The next attempt starts no earlier than this.")

    @property
    def total(self) -> int:
        return sum(self.by_class.values())


class Progress(StatusModel):
    """How far the training is, as worker 0 last reported it."""

    phase: ReportPhase | None = Field(None, description="What it was doing then; absent for loops that don't report.")
    step: int
    total_steps: int
    examples_per_second: str | None = None
    loss: str | None = None
    metrics: Annotated[dict[str, str], Field(max_length=MOST_METRICS)] = Field(default_factory=dict)
    checkpoint_step: int | None = Field(None, description="The newest step that is safe in a checkpoint.")
    last_report_time: _Time | None = None
    last_advance_time: _Time | None = Field(None, description="When a further step or another phase was reported.")
    estimated_remaining_seconds: int | None = None
    warnings: Annotated[list[_Text], Field(max_length=MOST_WARNINGS)] = Field(default_factory=list)

    @field_validator("phase", mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        return value if value in list(ReportPhase) else None


class DeviceFault(StatusModel):
    node: _Text
    time: _Time


class Activity(StrEnum):
    """What the job spends its time on."""

    QUEUE = "Queue"
    START = "Start"
    TRAIN = "Train"
    RECOVERY = "Recovery"
    SUSPENDED = "Suspended"
    FINISHED = "Finished"


class Goodput(StatusModel):
    """Where the time went. The six sums add up to `since` less the job's creation; from `since` on time goes to
    `activity`, until the next thing happens. `ratio`: productive over all that was not suspended."""

    queue_seconds: int = Field(0, description="Waiting for nodes.")
    start_seconds: int = Field(0, description="From nodes to the first step: images, imports, the first compilation.")
    productive_seconds: int = Field(0, description="Training whose result was kept.")
    wasted_seconds: int = Field(0, description="Training that was lost: done after the last checkpoint.")
    recovery_seconds: int = Field(0, description="From a failure to the next step, without waiting for nodes.")
    suspended_seconds: int = 0
    unsaved_seconds: int = Field(0, description="The part of productiveSeconds that no checkpoint holds yet.")
    activity: Activity = Activity.QUEUE
    since: _Time
    ratio: str | None = None

    @field_validator("activity", mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        return value if value in list(Activity) else Activity.TRAIN


class Status(StatusModel):
    observed_generation: int | None = None
    state: State | None = Field(None, description="One word for people; programs read the conditions.")
    attempt: int = Field(0, ge=0, description="Attempts begun so far; 0 before the first.")
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
    device_faults: Annotated[list[DeviceFault], Field(max_length=MOST_NODES)] = Field(
        default_factory=list, description="The latest failures that point at the chips of a node."
    )
    avoided_nodes: Annotated[list[_Text], Field(max_length=MOST_NODES)] = Field(
        default_factory=list, description="Nodes that the present attempt does not use."
    )
    goodput: Goodput | None = None

    @field_validator("attempt", mode="before")
    @classmethod
    def _counted(cls, value: object) -> object:
        """An older CRD lets people write less than none."""
        return max(0, value) if isinstance(value, int) else value

    @field_validator("state", mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        """A newer operator may know more states; what this one decides rests on the conditions."""
        return value if value in list(State) else None
