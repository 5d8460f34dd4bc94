"""`status` as the operator writes it. Fields and values of a newer operator are dropped, not refused."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, ConfigDict, Field, field_validator
from pydantic.alias_generators import to_camel
from pydantic.dataclasses import dataclass

from tpu_contract.protocol import MOST_LOSSES, MOST_METRICS, MOST_WARNINGS, ProgramMatch, ReportPhase, StartPhase
from tpu_training_operator.api.conditions import WIRE, Condition, ConditionType, StatusModel
from tpu_training_operator.api.decimals import ResolvedDecimal
from tpu_training_operator.api.list_by_class import ListByClass
from tpu_training_operator.api.model import map_by
from tpu_training_operator.api.run_policy import MOST_COUNTED_RESTARTS, FailureClass
from tpu_training_operator.api.words import duration

MOST_NODES = 16
MOST_GATES = 12
_MOST_RUNGS = 8
LONGEST_TEXT = 1024
MOST_NOTES = 32
PLAN_WARNING = "warning: "
MOST_MOVES = 20
MOST_STARTS = 10
_MOST_SLICES = 48
_MOST_CONDITIONS = 16

_Text = Annotated[str, Field(max_length=LONGEST_TEXT)]
_Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]


def _unless_known(words: type[StrEnum], instead: StrEnum | None) -> BeforeValidator:
    """Returns a validator that reads a word that only a newer operator knows as `instead`."""
    return BeforeValidator(lambda value: value if value in list(words) else instead)


class State(StrEnum):
    QUEUED = "Queued"
    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    BLOCKED = "Blocked"
    INVALID = "Invalid"


@dataclass(frozen=True, kw_only=True, config=WIRE)
class Resolved(StatusModel):
    """Every number derived from the spec; `notes` has the rule behind each."""

    accelerator_type: str = Field(description="Cloud TPU accelerator type, for example v5litepod-16.")
    generation: str = Field(description="TPU generation, for example v5e.")
    topology: str = Field(description="Chips along each axis of one slice, for example 4x4.")
    machine_type: str | None = Field(
        default=None, description="GKE machine type of the hosts; absent for a generation that GKE does not offer."
    )
    slices: int = Field(description="Number of slices in the job.")
    hosts_per_slice: int = Field(description="Hosts, and so worker pods, in each slice.")
    hosts: int = Field(description="Hosts over all slices; each runs one worker pod.")
    chips_per_host: int = Field(description="TPU chips of one host.")
    chips: int = Field(description="TPU chips over all slices.")
    replicas: int = Field(description="Copies of the model over all slices: one per XLA device.")
    per_replica_batch_size: int = Field(description="Examples that one replica computes at once.")
    accumulation_steps: int = Field(default=1, description="Batches whose gradients are accumulated before one step.")
    global_batch_size: int = Field(description="Examples per step over all replicas.")
    train_steps: int = Field(
        description="Optimizer steps of the whole training; with AdaScale the most: the recipe's own steps."
    )
    warmup_steps: int = Field(description="Steps over which the learning rate rises linearly.")
    milestones: Annotated[list[int], Field(max_length=32)] | None = Field(
        default=None, description="Steps at which schedule Step multiplies the learning rate."
    )
    evaluate_every_steps: int | None = Field(default=None, description="Steps between two evaluations.")
    learning_rate: ResolvedDecimal = Field(description="Learning rate after warm-up, scaled to the global batch.")
    weight_decay: ResolvedDecimal | None = Field(default=None, description="Weight decay, if the recipe sets one.")
    beta1: ResolvedDecimal | None = Field(default=None, description="Decay per step of Adam's gradient average.")
    beta2: ResolvedDecimal | None = Field(
        default=None, description="Decay per step of Adam's average of squared gradients."
    )
    epsilon: ResolvedDecimal | None = Field(
        default=None,
        description="Term that keeps the optimizer from dividing by zero, if the recipe sets or scales it.",
    )
    ema_decay: ResolvedDecimal | None = Field(default=None, description="Decay per step of the average of the weights.")
    scale_factor: ResolvedDecimal = Field(description="Global batch divided by the recipe's global batch.")
    code_sha256: str | None = Field(
        default=None, description="SHA-256 of trainer.code; absent if the image brings the code."
    )
    notes: Annotated[list[_Text], Field(max_length=MOST_NOTES)] = Field(
        default_factory=list, description="Warnings of the plan, and the rule behind each number."
    )

    @property
    def warnings(self) -> list[str]:
        """The plan's warnings."""
        return [note.removeprefix(PLAN_WARNING) for note in self.notes if note.startswith(PLAN_WARNING)]


@dataclass(frozen=True, kw_only=True, config=WIRE)
class Failure(StatusModel):
    """The worker that failed first in an attempt. The failures of its peers are a consequence."""

    attempt: int = Field(description="The attempt that failed; the first is 1, and 0 is the entry check.")
    pod: str = Field(description="Name of the worker's pod.")
    node: str | None = Field(default=None, description="Node that the worker ran on.")
    slice: int = Field(description="Index of the worker's slice, from 0.")
    host: int = Field(description="Index of the worker's host within its slice, from 0.")
    exit_code: int | None = Field(default=None, description="Exit code of the worker's container, if it ran.")
    failure_class: Annotated[FailureClass, _unless_known(FailureClass, FailureClass.UNKNOWN)] = Field(
        validation_alias="class",
        serialization_alias="class",
        description="Kind of failure, which decides the restart limit it counts against.",
    )
    reason: str = Field(description="What happened, in one word; docs/failures.md explains each.")
    message: _Text = Field(description="The worker's last message, or what Kubernetes reports about it.")
    time: _Time = Field(description="When the worker began to fail.")
    step: int | None = Field(default=None, description="Training step at which the worker failed, if it reported one.")


_TIMES = {"type": "array", "items": {"type": "string", "format": "date-time"}, "maxItems": MOST_COUNTED_RESTARTS}


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _times(value: object) -> list[str] | None:
    if not isinstance(value, list):
        return None
    return [time for time in value if isinstance(time, str)][-MOST_COUNTED_RESTARTS:]


@dataclass(frozen=True, kw_only=True, config=WIRE)
class Restarts(StatusModel):
    """`by_class` counts all restarts of the job, `charged` those that count against the restart limits."""

    by_class: Annotated[dict[str, int], ListByClass("count", {"type": "integer"}, _count)] = Field(
        default_factory=dict, description="Restarts over the job's life, by failure class."
    )
    charged: Annotated[dict[str, list[str]], ListByClass("times", _TIMES, _times)] = Field(
        default_factory=dict, description="Times of the restarts that still count against the limits."
    )
    next_attempt_time: _Time | None = Field(default=None, description="Earliest time at which the next attempt starts.")

    @property
    def total(self) -> int:
        return sum(self.by_class.values())


@dataclass(frozen=True, kw_only=True, config=WIRE)
class BestCheckpoint(StatusModel):
    """The checkpoint with the best evaluation (`checkpoint.keepBest`)."""

    name: _Text = Field(description="The checkpoint's folder, step-..., in the job's folder below checkpoint.uri.")
    step: int = Field(description="The step after which it was taken.")
    metric: _Text = Field(description="The metric of checkpoint.keepBest.")
    value: str = Field(description="The metric's value at that step.")


@dataclass(frozen=True, kw_only=True, config=WIRE)
class Progress(StatusModel):
    """How far the training is, as worker 0 last reported."""

    phase: Annotated[ReportPhase | None, _unless_known(ReportPhase, None)] = Field(
        default=None,
        description="What the training was doing at the last report; absent for a loop that does not report.",
    )
    step: int = Field(description="Last step that was reported.")
    total_steps: int = Field(description="Steps of the whole training.")
    examples_per_second: str | None = Field(default=None, description="Training speed over all replicas.")
    loss: str | None = Field(default=None, description="Training loss at the last report.")
    metrics: Annotated[dict[str, str], Field(max_length=MOST_METRICS)] = Field(
        default_factory=dict,
        description="Further numbers that worker 0 reported, by name, such as results of an evaluation.",
    )
    checkpoint_step: int | None = Field(default=None, description="Newest step that is saved in a checkpoint.")
    best_checkpoint: BestCheckpoint | None = Field(
        default=None, description="With checkpoint.keepBest, the checkpoint with the best evaluation so far."
    )
    last_report_time: _Time | None = Field(default=None, description="When worker 0 last reported.")
    last_advance_time: _Time | None = Field(
        default=None, description="When a new step or another phase was last reported."
    )
    estimated_remaining_seconds: int | None = Field(
        default=None, description="Time to the end of the training at the present speed."
    )
    warnings: Annotated[list[_Text], Field(max_length=MOST_WARNINGS)] = Field(
        default_factory=list, description="What the trainer finds unusual about the run."
    )
    packages_sha256: Annotated[str | None, Field(max_length=64)] = Field(
        default=None, description="SHA-256 of the packages that requirements.txt has added, with their versions."
    )
    percent: int | None = Field(default=None, description="Share of totalSteps that step has reached, rounded down.")
    time_left: str | None = Field(
        default=None, description="estimatedRemainingSeconds as people write it, such as 2m10s, 1h03m or 3d04h."
    )

    def __post_init__(self) -> None:
        """Derives what the columns show, so that it always agrees with the other fields."""
        left = self.estimated_remaining_seconds
        object.__setattr__(self, "percent", 100 * self.step // self.total_steps if self.total_steps else None)
        object.__setattr__(self, "time_left", None if left is None else duration(left))


@dataclass(frozen=True, kw_only=True, config=WIRE)
class CheckedProgram(StatusModel):
    """The program of the step that the entry check has compiled."""

    digest: _Text = Field(description="Digest of the program, before a hyphen of what makes it large.")
    slice: _Text = Field(description="The slice that it was compiled for, in words.")
    run: Annotated[ProgramMatch | None, _unless_known(ProgramMatch, None)] = Field(
        default=None,
        description="What the workers run, as worker 0 last compared: Same, Alike (the same products and collectives)"
        " or Other.",
    )


@dataclass(frozen=True, kw_only=True, config=WIRE)
class DeviceFault(StatusModel):
    node: _Text = Field(description="Name of the node.")
    time: _Time = Field(description="When the fault was seen.")


class Activity(StrEnum):
    """What the job spends its time on."""

    QUEUE = "Queue"
    START = "Start"
    TRAIN = "Train"
    RECOVERY = "Recovery"
    MOVING = "Moving"
    SUSPENDED = "Suspended"
    FINISHED = "Finished"


class Accounts(StatusModel):
    """What a job has spent, by account. Its subclasses have a field for each account, and `unsaved`: the part of
    `productive` that no checkpoint holds yet."""

    ACCOUNTS: ClassVar[tuple[str, ...]]
    AT_REST: ClassVar[str]
    """The account of a job that is suspended, or at its end."""
    if TYPE_CHECKING:
        productive: int
        unsaved: int

    @property
    def by_account(self) -> dict[str, int]:
        """The parts that add up to the total."""
        return {account: getattr(self, account) for account in self.ACCOUNTS}

    @property
    def total(self) -> int:
        return sum(self.by_account.values())


@dataclass(frozen=True, kw_only=True, config=WIRE)
class ChipSeconds(Accounts):
    """What the job's chips did, in chip-seconds: one chip held for one second. `unsaved`: part of `productive`. `held`:
    chips at `since`."""

    ACCOUNTS = ("queue", "start", "productive", "wasted", "recovery", "moving", "placeholders", "stopping")
    AT_REST = "stopping"

    queue: int = Field(default=0, description="Chip-seconds held while other workers waited for nodes.")
    start: int = Field(default=0, description="Chip-seconds of starting, up to the first step.")
    productive: int = Field(default=0, description="Chip-seconds of training whose result was kept.")
    wasted: int = Field(default=0, description="Chip-seconds of training that was lost in failures.")
    recovery: int = Field(default=0, description="Chip-seconds from a failure to the next step.")
    moving: int = Field(default=0, description="Chip-seconds of moves from one slice to another.")
    placeholders: int = Field(default=0, description="Chip-seconds held by placeholders of a better slice.")
    stopping: int = Field(
        default=0, description="Chip-seconds held by workers that were stopping: suspended, or after the job's end."
    )
    unsaved: int = Field(default=0, description="Part of productive that no checkpoint holds yet.")
    held: int = Field(default=0, description="Chips that the workers held at since.")
    since: _Time = Field(description="The time up to which the sums account for the chips.")


@dataclass(frozen=True, kw_only=True, config=WIRE)
class Usage(StatusModel):
    """Chip-hours used and expected when the status was last written."""

    chip_hours: ResolvedDecimal = Field(description="Chip-hours that all attempts have used.")
    forecast_chip_hours: ResolvedDecimal | None = Field(
        default=None, description="Chip-hours expected at the job's end, at the speed last reported."
    )
    budget_chip_hours: int | None = Field(default=None, description="The limit in runPolicy.budget.")
    budget_left_seconds: int | None = Field(
        default=None, description="How long the whole gang can hold its chips until the budget is used up."
    )


def _name_seconds(name: str) -> str:
    return to_camel(name if name in ("activity", "since", "ratio", "chip_seconds") else f"{name}_seconds")


@dataclass(frozen=True, kw_only=True, config=WIRE | ConfigDict(alias_generator=_name_seconds))
class Goodput(Accounts):
    """Where the time went. The seven sums, in seconds, add up to the time from the job's creation to `since`; later
    time counts as `activity`. `ratio`: productive time divided by all time that was not suspended."""

    ACCOUNTS = ("queue", "start", "productive", "wasted", "recovery", "moving", "suspended")
    AT_REST = "suspended"

    queue: int = Field(default=0, description="Time spent waiting for nodes.")
    start: int = Field(
        default=0, description="Time from having nodes to the first step: images, imports, first compilation."
    )
    productive: int = Field(default=0, description="Training time whose result was kept.")
    wasted: int = Field(
        default=0, description="Training time lost in failures, because it came after the last checkpoint."
    )
    recovery: int = Field(default=0, description="Time from a failure to the next step, less the wait for nodes.")
    moving: int = Field(
        default=0, description="Time from a move to the next step on the other slice, less the wait for nodes."
    )
    suspended: int = Field(default=0, description="Time during which the job was suspended.")
    unsaved: int = Field(default=0, description="Part of productiveSeconds that no checkpoint holds yet.")
    activity: Annotated[Activity, _unless_known(Activity, Activity.TRAIN)] = Field(
        default=Activity.QUEUE, description="What the time after since counts as."
    )
    since: _Time = Field(description="Up to when the seven sums account for the job's life.")
    ratio: str | None = Field(
        default=None, description="Productive time divided by all time that was not suspended, from 0 to 1."
    )
    chip_seconds: ChipSeconds | None = Field(
        default=None, description="The same in chip-seconds: what the chips of the job's workers did."
    )


@dataclass(frozen=True, kw_only=True, config=WIRE)
class AttemptStart(StatusModel):
    """Where the time went until an attempt made its first step."""

    attempt: int = Field(description="Number of the attempt; the first is 1.")
    cause: _Text = Field(description="Why it began: the class of the failure before it, or else a reason as one word.")
    since: _Time = Field(description="When the failure before it began, or else when the attempt did.")
    seconds: Annotated[dict[str, int], Field(max_length=len(StartPhase))] = Field(
        default_factory=dict,
        description="Seconds by phase, as far as they are known; docs/status.md#starts explains each.",
    )
    total_seconds: int | None = Field(
        default=None, description="The sum of all phases; absent until the first step is made."
    )


class RungVerdict(StrEnum):
    RUNNING = "Running"
    PASSED = "Passed"
    FAILED = "Failed"


@dataclass(frozen=True, kw_only=True, config=WIRE)
class GateResult(StatusModel):
    name: str = Field(description="The gate's field in spec.ladder.rungs[].gates.")
    passed: bool = Field(description="Whether the rung has passed the gate.")
    message: _Text = Field(default="", description="What the gate found, in words.")

    def __str__(self) -> str:
        return f"{self.name} {'passed' if self.passed else 'failed'}: {self.message}"


@dataclass(frozen=True, kw_only=True, config=WIRE)
class RungLoss(StatusModel):
    examples: int = Field(description="Examples at the end of the range, which begins where the one before ends.")
    loss: str = Field(description="Mean loss of the steps in the range.")
    error: str = Field(description="Standard error of the mean.")


@dataclass(frozen=True, kw_only=True, config=WIRE)
class RungStatus(StatusModel):
    """A rung of the ladder in spec.ladder; the last one is the job itself."""

    # Which rung an attempt is on follows from the verdicts before it.
    slice: _Text = Field(description="The rung's slice in words, for example 2 x v5litepod-16.")
    chips: int = Field(description="TPU chips of the rung.")
    replicas: int = Field(description="Copies of the model in the rung.")
    global_batch_size: int = Field(description="Examples per step.")
    learning_rate: ResolvedDecimal = Field(description="Learning rate after warm-up, scaled to the global batch.")
    steps: int = Field(description="Planned steps; after the rung has ended, the steps that it made.")
    # An unknown one does not count as passed.
    verdict: Annotated[RungVerdict, _unless_known(RungVerdict, RungVerdict.RUNNING)] = Field(
        default=RungVerdict.RUNNING, description="Running, Passed or Failed."
    )
    attempt: int | None = Field(default=None, description="The attempt that the verdict is about.")
    examples_per_second: str | None = Field(default=None, description="Training speed after the compilations.")
    efficiency: str | None = Field(
        default=None, description="Examples per second per chip, divided by those of the rung before."
    )
    first_loss: str | None = Field(default=None, description="Mean loss of the first quarter of the steps.")
    last_loss: str | None = Field(default=None, description="Mean loss of the last quarter of the steps.")
    utilisation: str | None = Field(default=None, description="Model flops utilisation, from 0 to 1.")
    noise_scale: str | None = Field(
        default=None, description="Gradient noise scale in examples; the rungs above scale their learning rate by it."
    )
    losses: Annotated[list[RungLoss], Field(max_length=MOST_LOSSES)] = Field(
        default_factory=list, description="The losses by examples, for the gate lossFollows of the next rung."
    )
    gates: Annotated[list[GateResult], Field(max_length=MOST_GATES, json_schema_extra=map_by("name"))] = Field(
        default_factory=list, description="What each gate found, in the order of the spec's fields."
    )


@dataclass(frozen=True, kw_only=True, config=WIRE)
class LadderStatus(StatusModel):
    rung: int = Field(description="The rung that the job is on, from 1.")
    of: int = Field(description="Number of rungs; the last one is the job itself.")
    rungs: Annotated[list[RungStatus], Field(max_length=_MOST_RUNGS)] = Field(
        default_factory=list, description="The rungs so far, the smallest first."
    )

    def __str__(self) -> str:
        return f"{self.rung}/{self.of}"


class PlacementReason(StrEnum):
    """Why the job is on its slice, and why it moved there."""

    PREFERRED = "Preferred"
    """The job has been on spec.slice from the beginning."""
    NO_CAPACITY = "NoCapacity"
    """The slice before got no nodes for as long as the job waits for them."""
    NOT_ADMITTED = "NotAdmitted"
    """The cluster refused the workers on the slice before."""
    BETTER = "Better"
    """The nodes of a preferred slice are there."""
    LOST = "Lost"
    """The slice before failed or was taken away, and did not come back in time."""
    RUNG = "Rung"
    """The job is on this rung of its ladder."""
    STATUS_LOST = "StatusLost"
    """The status was lost, and the labels of the workers name the slice."""


@dataclass(frozen=True, kw_only=True, config=WIRE)
class Move(StatusModel):
    from_: int = Field(
        validation_alias="from",
        serialization_alias="from",
        description="The optionIndex before; 0 is spec.slice.",
    )
    to: int = Field(description="The optionIndex after.")
    from_slice: _Text | None = Field(default=None, description="The slice before, in words.")
    to_slice: _Text | None = Field(default=None, description="The slice after, in words.")
    step: int | None = Field(default=None, description="Last step known to have been reached before the move.")
    examples: int | None = Field(default=None, description="Examples trained up to that step.")
    continued_step: int | None = Field(
        default=None, description="Step from which the training continued; absent until the workers have reported it."
    )
    continued_examples: int | None = Field(default=None, description="Examples trained up to that step.")
    at: _Time = Field(description="When the move was decided.")
    reason: str = Field(description="Why, as one word.")
    why: _Text = Field(description="Why, in a sentence.")


@dataclass(frozen=True, kw_only=True, config=WIRE)
class Placement(StatusModel):
    """The choice of a slice. Written with the attempt that runs on it, before any action."""

    option_index: int = Field(
        default=0,
        ge=0,
        description="Place of the slice in the order of preference: 0 is spec.slice, then fewer slices, then the"
        " alternatives.",
    )
    slice: _Text = Field(description="That slice in words, for example 2 x v5litepod-16.")
    since: _Time = Field(description="When the job was last put on it.")
    reason: str = Field(description="Why it is on this slice, as one word.")
    has_run: bool = Field(
        default=False, description="Whether all workers have been ready on this slice since the job was put on it."
    )
    moves_for_capacity: int = Field(
        default=0, ge=0, description="Consecutive moves for lack of capacity since all workers were last ready."
    )
    moves: Annotated[list[Move], Field(max_length=MOST_MOVES)] = Field(
        default_factory=list, description="The latest moves, oldest first."
    )
    chip_seconds: Annotated[dict[str, int], Field(max_length=_MOST_SLICES)] = Field(
        default_factory=dict,
        description="Chip-seconds of the workers, by slice. The key placeholders has those of placeholders on better"
        " slices.",
    )


@dataclass(frozen=True, kw_only=True, config=WIRE)
class Status(StatusModel):
    observed_generation: int | None = Field(
        default=None, description="Generation of the spec that this status describes."
    )
    state: Annotated[State | None, _unless_known(State, None)] = Field(
        default=None, description="One word for people; programs should read the conditions."
    )
    attempt: int = Field(default=0, ge=0, description="Attempts begun so far; 0 before the first.")
    start_time: _Time | None = Field(default=None, description="When the first attempt began.")
    completion_time: _Time | None = Field(default=None, description="When the job succeeded or failed.")
    conditions: Annotated[list[Condition], Field(max_length=_MOST_CONDITIONS, json_schema_extra=map_by("type"))] = (
        Field(
            default_factory=list,
            description="Ready, Reconciling, Stalled, Suspended, Admitted, EntryCheckPassed, DataInRegion, StepFits,"
            " GangReady, BudgetLow, Succeeded and Failed, as far as they apply.",
        )
    )
    resolved: Resolved | None = Field(
        default=None, description="The slice and every number derived from the spec, with the rules in notes."
    )
    checked_program: CheckedProgram | None = Field(
        default=None, description="The program of the step that the entry check has compiled, and whether it runs."
    )
    ladder: LadderStatus | None = Field(
        default=None, description="With spec.ladder, how far up the job has come, and what each rung has shown."
    )
    placement: Placement | None = Field(
        default=None,
        description="The slice that the attempt runs on, how the job got there, and what each slice has cost.",
    )
    progress: Progress | None = Field(default=None, description="How far the training is, as worker 0 last reported.")
    restarts: Restarts = Field(
        default_factory=Restarts, description="How often the job restarted, and which restarts still count."
    )
    first_failure: Failure | None = Field(
        default=None, description="The first failure of the job's life: the worker that failed first in its attempt."
    )
    last_failure: Failure | None = Field(
        default=None, description="The latest failure: the worker that failed first in the last failed attempt."
    )
    device_faults: Annotated[list[DeviceFault], Field(max_length=MOST_NODES)] = Field(
        default_factory=list, description="Latest failures that point at the chips of a node."
    )
    avoided_nodes: Annotated[list[_Text], Field(max_length=MOST_NODES)] = Field(
        default_factory=list, description="Nodes that the current attempt does not use."
    )
    goodput: Goodput | None = Field(
        default=None,
        description="Where the job's time went, in whole seconds. The seven sums add up to the time from the job's"
        " creation to since; time after since counts as activity.",
    )
    starts: Annotated[list[AttemptStart], Field(max_length=MOST_STARTS)] = Field(
        default_factory=list, description="The latest attempts up to their first steps, oldest first, by phase."
    )
    usage: Usage | None = Field(default=None, description="Chip-hours: used, expected, and left of the budget.")

    @property
    def rungs(self) -> list[RungStatus]:
        """The rungs of the ladder, as far as the job has come."""
        return self.ladder.rungs if self.ladder else []

    @classmethod
    def read(cls, body: Any) -> Self:
        # Before validation: the lenient reader finds what to cut by its index in this list.
        if isinstance(body, dict) and "conditions" in body:
            body = {**body, "conditions": _drop_unknown(body["conditions"])}
        return super().read(body)

    @field_validator("attempt", mode="before")
    @classmethod
    def _read_attempt(cls, value: object) -> object:
        """Reads a negative number, which an older CRD accepts from an edit, as 0."""
        return max(0, value) if isinstance(value, int) else value


def _drop_unknown(conditions: object) -> object:
    """Drops the conditions that this version does not know, if there are more than fit."""
    if not isinstance(conditions, list) or len(conditions) <= _MOST_CONDITIONS:
        return conditions
    known = [item for item in conditions if isinstance(item, dict) and item.get("type") in list(ConditionType)]
    return known[:_MOST_CONDITIONS]
