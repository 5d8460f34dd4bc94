"""Reads `history.json`, the file in which a trainer records a run: schema `history/v1`.

Its schema is `history-v1.schema.json` in `tpu_trainer`. Only the fields that the page shows are read; unknown fields
are ignored, so that a newer trainer's file can be shown.
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

    `mean`, `low` and `high`: of the finite ones; None if there are none.
    """

    step: int
    count: int
    mean: float | None
    low: float | None
    high: float | None
    broken: int


class LoggedSeries(_Recorded):
    """The values that the task logs under one name, in points like those of the losses."""

    name: str
    points: Sequence[LossSpan] = ()


class Stretch(_Recorded):
    """The `steps` steps up to and including `step`: seconds in all and per phase, and the last learning rate.

    `gradient_norm`: the mean of the gradients' norms before clipping; None if none was finite or measured.
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
    """Learning rates from the first step on, sampled; the last one is that of the last stretch."""

    points: Sequence[Rate] = ()


class Evaluation(_Recorded):
    step: int
    metrics: Mapping[str, float]


class DoctorWarning(_Recorded):
    """The findings of one check of the doctor: how many (`times`), their first and last step, and the last message."""

    check: str
    first: int
    last: int
    times: int
    message: str


class FirstLoss(_Recorded):
    """`seconds`: from the start of the reporting process to its first loss; `compiling`: the seconds of these that the
    `compilations` programs took."""

    seconds: float
    compilations: int
    compiling: float


class Attempt(_Recorded):
    """One gang, which started after step `first` and reached step `last`. `outcome`: the exit code's name, if known."""

    number: int
    first: int
    last: int
    split: Mapping[str, float]
    outcome: str | None = None
    first_loss: FirstLoss | None = None


class Measurements(_Recorded):
    """The records of all attempts. The last attempt wrote the file; sequences are in the order of steps."""

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
        """Whether the newest loss is finite, or there is none."""
        return not self.losses or self.losses[-1].mean is not None


class _RunSpecPart(BaseModel):
    """A part of the run spec, whose fields have camel-case names; `domain.objects.run_spec` writes it."""

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
    """Examples per step of the whole job, and per replica and pass."""

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
    """A metric on which the run acts. `mode`: whether Max or Min is better."""

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
    """The run spec as recorded. `entrypoint`: None for a user's own loop."""

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
        """The metrics on which the run acts, the one for the best checkpoint first."""
        best = None if self.checkpoint is None else self.checkpoint.keep_best
        return [metric for metric in (best, self.stop_early) if metric is not None]


class AttemptOutcome(_Recorded):
    """How the newest attempt ended: the exit code's name, and its message."""

    code: str
    message: str


class History(_RunSpecPart):
    """A whole history. `outcome`: None during the run; `environment`: versions by name; `written`: its time."""

    run_spec: RecordedRunSpec
    recorded: Measurements
    written: datetime
    outcome: AttemptOutcome | None = None
    environment: Mapping[str, str] = {}


def parse_history(document: bytes) -> History:
    """Parses the file's content. Raises UnreadableHistory, which names the first wrong field."""
    try:
        content = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise UnreadableHistory(f"not JSON: {error}") from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise UnreadableHistory(f'schema: this version reads "{SCHEMA}", got {schema!r}')
    try:
        return History.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise UnreadableHistory(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
