"""Reads `history.json`, the file in which a trainer records a run: schema `history/v1`.

Its written form is `history-v1.schema.json` in `tpu_trainer`. Only the fields that the page shows are read; unknown
ones are ignored, so that a newer trainer's file can be shown.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime

from pydantic import AliasGenerator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

HISTORY = "history.json"
SCHEMA = "history/v1"


class UnreadableHistory(ValueError):
    """The file is not a history that this version can show; the text says why."""


class _Recorded(BaseModel):
    model_config = ConfigDict(frozen=True)


class LossSpan(_Recorded):
    """The losses of `count` steps up to and including `step`; `broken` of them were not finite.

    mean, low and high are over the finite ones, None if there are none.
    """

    step: int
    count: int
    mean: float | None
    low: float | None
    high: float | None
    broken: int


class LoggedSeries(_Recorded):
    """What the task has logged under a name: its points are as those of the losses."""

    name: str
    points: Sequence[LossSpan] = ()


class Stretch(_Recorded):
    """How `steps` steps up to and including `step` went: seconds in all and per phase, and the last learning rate.

    gradient_norm: the mean of the gradients' norms before clipping, None if none was finite or measured.
    """

    step: int
    steps: int = Field(ge=1)
    seconds: float
    split: Mapping[str, float]
    learning_rate: float
    gradient_norm: float | None = None

    @property
    def training_seconds(self) -> float:
        """Wall time without evaluations."""
        return self.seconds - self.split.get("evaluate", 0.0)


class Rate(_Recorded):
    """The learning rate of one step."""

    step: int
    rate: float


class LearningRates(_Recorded):
    """From the first step on, more or less closely; the last rate is that of the last stretch."""

    points: Sequence[Rate] = ()


class Evaluation(_Recorded):
    step: int
    metrics: Mapping[str, float]


class DoctorWarning(_Recorded):
    """What one check of the doctor found: `times` findings at steps first..last, and the last message."""

    check: str
    first: int
    last: int
    times: int
    message: str


class FirstLoss(_Recorded):
    """`seconds`: from the start of the reporting process to its first loss; `compiling`: the part that `compilations`
    programs took."""

    seconds: float
    compilations: int
    compiling: float


class Attempt(_Recorded):
    """One gang: it started after `first` steps and had done `last`. `outcome`: the exit code's name, if known."""

    number: int
    first: int
    last: int
    split: Mapping[str, float]
    outcome: str | None = None
    first_loss: FirstLoss | None = None


class Measurements(_Recorded):
    """All attempts together. The last attempt is the one that wrote the file; sequences are in the order of steps."""

    attempts: Sequence[Attempt] = Field(min_length=1)
    losses: Sequence[LossSpan] = ()
    logged: Sequence[LoggedSeries] = ()
    stretches: Sequence[Stretch] = ()
    evaluations: Sequence[Evaluation] = ()
    rates: LearningRates = LearningRates()
    warnings: Sequence[DoctorWarning] = ()
    examples_per_second: float | None = None
    mfu: float | None = None
    noise_scale: float | None = None

    @property
    def ends_finite(self) -> bool:
        """Whether the newest loss is a number; so it is where there is none."""
        return not self.losses or self.losses[-1].mean is not None


class _RunSpecPart(BaseModel):
    """The run spec has camel-case names; see `domain.objects.run_spec`, which writes it."""

    model_config = ConfigDict(frozen=True, alias_generator=AliasGenerator(validation_alias=to_camel))


class RecordedJob(_RunSpecPart):
    namespace: str
    name: str


class RecordedSlice(_RunSpecPart):
    generation: str
    topology: str
    slices: int
    hosts: int
    replicas: int = Field(ge=1)


class RecordedBatch(_RunSpecPart):
    """Examples per step of the job, and what a replica takes at once."""

    total: int = Field(validation_alias="global", ge=1)
    per_replica: int
    accumulation: int = 1


class RecordedSchedule(_RunSpecPart):
    name: str = "Constant"
    milestones: Sequence[int] = ()
    factor: float | None = None
    metric: str | None = None
    patience: int | None = None


class RecordedOptimizer(_RunSpecPart):
    name: str
    learning_rate: float
    momentum: float | None = None
    weight_decay: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    epsilon: float | None = None


class RecordedInitFrom(_RunSpecPart):
    uri: str


class WatchedMetric(_RunSpecPart):
    """A metric of the evaluations that decides something, and which of its values are the better ones."""

    metric: str
    mode: str

    @property
    def highest(self) -> bool:
        return self.mode == "Max"


class RecordedStopEarly(WatchedMetric):
    patience: int
    min_delta: float | None = None


class RecordedCheckpoint(_RunSpecPart):
    uri: str
    keep: int
    keep_best: WatchedMetric | None = None
    init_from: RecordedInitFrom | None = None
    every_steps: int | None = None
    every_seconds: int | None = None


class ScaledNumber(_RunSpecPart):
    """One number of the recipe: where it was tuned, where it ran, and the rule between the two."""

    name: str
    tuned_on: str
    runs_on: str
    rule: str


class RecordedRunSpec(_RunSpecPart):
    """`entrypoint`: None for a loop of the user's own."""

    job: RecordedJob
    entrypoint: str | None = None
    backend: str
    hardware: str
    slice: RecordedSlice
    batch: RecordedBatch
    train_steps: int = Field(ge=1)
    warmup_steps: int
    seed: int
    optimizer: RecordedOptimizer
    schedule: RecordedSchedule = RecordedSchedule()
    evaluate_every_steps: int | None = None
    stop_early: RecordedStopEarly | None = None
    on_not_finite: str = "Stop"
    ema_decay: float | None = None
    gradient_clip_norm: float | None = None
    precision: str | None = None
    sharding: str | None = None
    parameters: Mapping[str, str] = {}
    data_uri: str | None = None
    checkpoint: RecordedCheckpoint | None = None
    scaling: Sequence[ScaledNumber] = ()

    @property
    def watched(self) -> Sequence[WatchedMetric]:
        """What the run follows, the checkpoint to keep first."""
        best = None if self.checkpoint is None else self.checkpoint.keep_best
        return [each for each in (best, self.stop_early) if each is not None]


class AttemptOutcome(_Recorded):
    """How the newest attempt ended: the exit code's name, and its message."""

    code: str
    message: str


class History(_RunSpecPart):
    """`outcome` is None during the run. `environment`: names to versions. `written`: when the file was written."""

    run_spec: RecordedRunSpec
    recorded: Measurements
    written: datetime
    outcome: AttemptOutcome | None = None
    environment: Mapping[str, str] = {}


def parse_history(document: bytes) -> History:
    """Raises UnreadableHistory, naming the first field that is wrong."""
    try:
        found = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise UnreadableHistory(f"not JSON: {error}") from error
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
        raise UnreadableHistory(f'schema: this version reads "{SCHEMA}", got {schema!r}')
    try:
        return History.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise UnreadableHistory(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
