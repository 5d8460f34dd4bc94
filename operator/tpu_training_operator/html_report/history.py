"""Reads `history.json`, the file in which a trainer records a run: schema `history/v1`.

Its schema is `history-v1.schema.json` in `tpu_contract`. Only the fields that the page shows are read; unknown fields
are ignored, so that a newer trainer's file can be shown.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError

from tpu_contract.protocol import HISTORY_SCHEMA
from tpu_contract.run_spec import WARNING_ROW

# Larger counts could not be converted to a float.
Count = Annotated[int, Field(ge=0, le=10**15)]
Positive = Annotated[Count, Field(ge=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class UnreadableHistory(ValueError):
    """The file is not a history that this version can show; the text says why."""


def _at(path: str, *default: Any) -> Any:
    """Declares a field by its path in the document; without a default it is required."""
    return Field(*default, validation_alias=AliasPath(*path.split(".")))


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True)


@dataclass(frozen=True, slots=True)
class Span:
    """The values of `count` steps up to and including `step`; `broken` of them were not finite.

    `mean`, `low` and `high`: of the finite ones; None if there are none.
    """

    step: Count
    count: Count
    mean: Finite | None
    low: Finite | None
    high: Finite | None
    broken: Count


class Noise(_Row):
    """Sums over `count` steps up to and including `step`, of estimates of the gradients' noise and squared length."""

    step: Count
    count: Positive
    noise: Finite
    signal: Finite


class RecordedCurve(_Row):
    """The values that the task logs under one name."""

    name: str
    points: Sequence[Span] = ()


class Stretch(_Row):
    """The `steps` steps up to and including `step`. `gradient_norm`: the mean norm before clipping."""

    step: Count
    steps: Positive
    seconds: Finite
    split: Mapping[str, Finite]
    learning_rate: float
    gradient_norm: float | None = None

    @property
    def training_seconds(self) -> float:
        """Wall time without evaluations."""
        return self.seconds - self.split.get("evaluate", 0.0)


class Rate(_Row):
    step: Count
    rate: float


class Evaluation(_Row):
    step: Count
    metrics: Mapping[str, float]


class DoctorWarning(_Row):
    """The findings of one check of the doctor: how many (`times`), their first and last step, and the last message."""

    check: str
    first: Count
    last: Count
    times: Count
    message: str


class Attempt(_Row):
    """One gang, which started after step `first` and reached step `last`. `outcome`: the exit code's name, if known."""

    number: Count
    first: Count
    last: Count
    split: Mapping[str, Finite]
    outcome: str | None = None
    first_loss: Finite | None = _at("first_loss.seconds", None)
    compilations: Count = _at("first_loss.compilations", 0)
    compiling: Finite = _at("first_loss.compiling", 0.0)


class Watched(_Row):
    """A metric on which the run acts. `mode`: whether Max or Min is better."""

    metric: str
    mode: str


class EarlyStop(Watched):
    patience: Count
    min_delta: float | None = _at("minDelta", None)


class ScaledNumber(_Row):
    """One number of the recipe: where it was tuned, where it runs, and the rule between the two."""

    name: str
    tuned_on: str = _at("tunedOn")
    runs_on: str = _at("runsOn")
    rule: str


class History(_Row):
    """A history, as far as the page shows it. A field is None if it is unknown or not set."""

    written: datetime
    environment: Mapping[str, str] = {}
    # How the newest attempt ended: the exit code's name, and its message. None during the run.
    outcome: str | None = _at("outcome.code", None)
    message: str = _at("outcome.message", "")

    # The records of all attempts, in the order of steps. The last attempt wrote the file.
    attempts: Sequence[Attempt] = Field(validation_alias=AliasPath("recorded", "attempts"), min_length=1)
    losses: Sequence[Span] = _at("recorded.losses", ())
    logged: Sequence[RecordedCurve] = _at("recorded.logged", ())
    stretches: Sequence[Stretch] = _at("recorded.stretches", ())
    evaluations: Sequence[Evaluation] = _at("recorded.evaluations", ())
    rates: Sequence[Rate] = _at("recorded.rates.points", ())
    noise: Sequence[Noise] = _at("recorded.noise.points", ())
    warnings: Sequence[DoctorWarning] = _at("recorded.warnings", ())
    examples_per_second: float | None = _at("recorded.examples_per_second", None)
    mfu: float | None = _at("recorded.mfu", None)
    noise_scale: float | None = _at("recorded.noise_scale", None)

    # The run spec, which `domain.objects.run_spec` writes. A user's own loop has no entrypoint.
    namespace: str = _at("runSpec.job.namespace")
    name: str = _at("runSpec.job.name")
    entrypoint: str | None = _at("runSpec.entrypoint", None)
    backend: str = _at("runSpec.backend")
    hardware: str = _at("runSpec.hardware")
    generation: str = _at("runSpec.slice.generation")
    topology: str = _at("runSpec.slice.topology")
    slices: Count = _at("runSpec.slice.slices")
    hosts: Count = _at("runSpec.slice.hosts")
    replicas: Positive = _at("runSpec.slice.replicas")
    global_batch: Positive = _at("runSpec.batch.global")
    train_steps: Positive = _at("runSpec.trainSteps")
    seed: int = _at("runSpec.seed")
    optimizer: str = _at("runSpec.optimizer.name")
    momentum: float | None = _at("runSpec.optimizer.momentum", None)
    epsilon: float | None = _at("runSpec.optimizer.epsilon", None)
    schedule: str = _at("runSpec.schedule.name", "Constant")
    factor: float | None = _at("runSpec.schedule.factor", None)
    plateau_metric: str | None = _at("runSpec.schedule.metric", None)
    stop_early: EarlyStop | None = _at("runSpec.stopEarly", None)
    parameters: Mapping[str, str] = _at("runSpec.parameters", {})
    data_uri: str | None = _at("runSpec.dataUri", None)
    checkpoint_uri: str | None = _at("runSpec.checkpoint.uri", None)
    keep: Count = _at("runSpec.checkpoint.keep", 1)
    keep_best: Watched | None = _at("runSpec.checkpoint.keepBest", None)
    save_every_steps: Count | None = _at("runSpec.checkpoint.everySteps", None)
    save_every_seconds: Count | None = _at("runSpec.checkpoint.everySeconds", None)
    init_from: str | None = _at("runSpec.checkpoint.initFrom.uri", None)
    scaling: Sequence[ScaledNumber] = _at("runSpec.scaling", ())

    @property
    def planned_warnings(self) -> list[str]:
        """Returns what the plan had warned of before the run."""
        return [row.rule for row in self.scaling if row.name == WARNING_ROW]

    @property
    def watched(self) -> list[Watched]:
        """The metrics on which the run acts, the one for the best checkpoint first."""
        return [metric for metric in (self.keep_best, self.stop_early) if metric is not None]

    @property
    def metrics(self) -> list[str]:
        """The names of all metrics of the evaluations, in the task's order."""
        return list(dict.fromkeys(name for evaluation in self.evaluations for name in evaluation.metrics))

    @property
    def ends_finite(self) -> bool:
        """Whether the newest loss is finite, or there is none."""
        return not self.losses or self.losses[-1].mean is not None


def parse_history(document: bytes) -> History:
    """Parses the file's content. Raises UnreadableHistory, which names the first wrong field."""
    try:
        content = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise UnreadableHistory(f"not JSON: {error}") from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != HISTORY_SCHEMA:
        raise UnreadableHistory(f'schema: this version reads "{HISTORY_SCHEMA}", got {schema!r}')
    try:
        return History.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise UnreadableHistory(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
