"""What a trainer says of its run: while it runs in its reports, and at its end in the termination message.

Both are one document. A report of a wrong form is refused, so that the author of a reporter notices it at once. Of a
termination message, which a user's own loop may write as it likes, only the wrong fields are left out.
"""

import json
import math
from collections.abc import Iterable
from itertools import islice
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from tpu_contract.protocol import MOST_LOSSES, MOST_METRICS, ProgramMatch, ReportPhase
from tpu_training_operator.api.model import LARGEST_COUNT
from tpu_training_operator.api.status import BestCheckpoint
from tpu_training_operator.api.text import plain_json
from tpu_training_operator.api.words import number_text

LONGEST_NAME = 128
LONGEST_DIGEST = 64
_LONGEST_LINE = 300

Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
# Of flops or bytes.
Amount = Annotated[float, Field(ge=0, lt=2**62)]
Line = Annotated[str, AfterValidator(lambda text: text[:_LONGEST_LINE])]


class Part(BaseModel):
    """Fields that a trainer may not know, or may know in addition, keep no report from being read."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, strict=True, extra="ignore", frozen=True)


class ReportedBest(Part):
    name: Annotated[str, Field(max_length=LONGEST_NAME)]
    step: Count
    metric: Annotated[str, Field(max_length=LONGEST_NAME)]
    value: float


class TrainerReport(Part):
    """What both forms have. `metrics`: of the last evaluation, then what the task has logged. `program`: how the step's
    program is the one that the entry check has compiled."""

    phase: ReportPhase | None = None
    step: Count | None = None
    total_steps: Count | None = None
    loss: float | None = None
    examples_per_second: float | None = None
    checkpoint_step: Count | None = None
    best_checkpoint: ReportedBest | None = None
    metrics: dict[str, float | None] | None = None
    program: ProgramMatch | None = None

    @property
    def metric_texts(self) -> dict[str, str]:
        return metric_texts((self.metrics or {}).items())

    @property
    def best(self) -> BestCheckpoint | None:
        best = self.best_checkpoint
        value = None if best is None else number_text(best.value)
        if best is None or value is None:
            return None
        return BestCheckpoint(name=best.name, step=best.step, metric=best.metric, value=value)

    @property
    def rate(self) -> float | None:
        """The examples per second, if they are a finite number."""
        rate = self.examples_per_second
        return rate if rate is not None and math.isfinite(rate) else None


class ReportedRise(Part):
    start: Finite
    peak: Finite
    step: Count


class ReportedCurve(Part):
    """The mean losses of some ranges of steps, each up to one of `steps`, with their standard errors."""

    steps: Annotated[list[Count], Field(max_length=MOST_LOSSES)] = []
    losses: Annotated[list[Finite], Field(max_length=MOST_LOSSES)] = []
    errors: Annotated[list[Finite], Field(max_length=MOST_LOSSES)] = []


class ReportedRung(Part):
    """What a rung of a ladder has measured; None for what is missing.

    `begins`: the steps made before the measurement. `steps`: those of the measurement.
    `first_loss`, `last_loss`: means of the first and the last `averaged` steps, None if no loss there was finite; with
    their standard errors. `errors_fallen`: how many standard errors the loss has fallen, by the trainer's tests.
    `rise`: above the first loss after the warm-up, None if there was none. `utilisation`: of the chips' operations.
    `noise_scale`: of the gradients, in examples.
    `findings`: how often each of the doctor's checks found something. `unseen`: checks that could not run. `evaluated`:
    which of the metrics are the evaluation's; the others are the last loss and what the task has logged.
    """

    begins: Count = 0
    steps: Count | None = None
    examples_per_second: Finite | None = None
    first_loss: Finite | None = None
    first_error: Finite | None = None
    last_loss: Finite | None = None
    last_error: Finite | None = None
    averaged: Count | None = None
    errors_fallen: Finite | None = None
    rise: ReportedRise | None = None
    curve: ReportedCurve | None = None
    utilisation: Finite | None = None
    noise_scale: Finite | None = None
    recompilations: Count | None = None
    not_finite: Count | None = None
    findings: dict[str, Count] | None = None
    unseen: list[Line] = []
    evaluated: list[Line] = []


class CompiledBatch(Part):
    per_replica: Amount | None = None
    accumulation: Amount = 1


class CompiledMemory(Part):
    """Bytes per core: what the step needs, and what it may use."""

    needed: Amount | None = None
    limit: Amount | None = None


class StepCost(Part):
    """One replica's step: operations as compiled and as the model needs them, bytes of HBM traffic, and the bytes that
    it puts into collectives, by XLA's name for their kind.

    `waited`: the part of `exchanged` in collectives that nothing runs beside; `waited_traffic`: the part of `traffic`
    that these read and write themselves.
    """

    flops: Amount = 0
    model_flops: Amount = 0
    traffic: Amount = 0
    exchanged: dict[str, Amount] = {}
    waited: dict[str, Amount] = {}
    waited_traffic: Amount = 0


class LargestBatch(Part):
    """The largest batch per replica that fitted, 0 if not even one example does; the smallest that did not fit."""

    fits: Amount
    refused: Amount | None = None


class CompileFinding(Part):
    """An operation that keeps the step from being one fixed program. `where`: FILE:LINE of the user's code."""

    kind: Line = ""
    operation: Line = ""
    where: Line = ""
    shapes: Line = ""


class CompiledStep(Part):
    """The compile check's answer: what the TPU's compiler says about the step on one slice. `trouble`: what kept it
    from an answer, and `said` the words of that. `digest`: of the step's program."""

    trouble: Line = ""
    said: Line = ""
    fits: bool | None = None
    refusal: Line = ""
    digest: Annotated[Line, AfterValidator(lambda text: text[:LONGEST_DIGEST])] = ""
    replicas: Amount = 1
    batch: CompiledBatch = CompiledBatch()
    memory: CompiledMemory = CompiledMemory()
    step: StepCost | None = None
    largest_batch: LargestBatch | None = None
    found: list[CompileFinding] = []


class Bucket(Part):
    """A bucket as the entry check describes it. `location`: "" if it is unknown; then `trouble` is the kind of error,
    and `said` the storage's message. `regions`: the two that the owner of a dual-region has chosen."""

    name: Line = ""
    location: Annotated[Line, AfterValidator(str.lower)] = ""
    regions: list[Annotated[Line, AfterValidator(str.lower)]] = []
    trouble: Line = ""
    said: Line = ""


class Places(Part):
    """Where the entry check's pod runs, and where the job's buckets are."""

    zone: Line = ""
    buckets: list[Bucket] = []


class UnfitLine(Part):
    """The line of the slice check that a worker ends with. `host`: the pod at fault; "" if it is about the slice."""

    host: Line = ""


class LastWords(TrainerReport):
    """A termination message. `outcome`: the name of the exit code; `compiled`: the compile check's answer, None from
    a trainer that does not compile."""

    outcome: str | None = None
    message: str = ""
    rung: ReportedRung = ReportedRung()
    compiled: CompiledStep | None = None
    places: Places | None = None
    slice_check: UnfitLine = UnfitLine()


def read_last_words(message: str) -> LastWords | None:
    """Reads a termination message without its wrong fields, and with all its texts made plain; None if it is anything
    but a JSON object."""
    try:
        content = plain_json(json.loads(message))
    except (ValueError, RecursionError):
        return None
    while isinstance(content, dict):
        try:
            return LastWords.model_validate(content)
        except ValidationError as error:
            # The last ones first, so that places in a list stay what they are.
            for problem in reversed(error.errors(include_url=False, include_context=False, include_input=False)):
                _remove(content, problem["loc"])
    return None


def metric_texts(metrics: Iterable[tuple[str, float | None]]) -> dict[str, str]:
    """Returns as many metrics as the status has room for, as texts."""
    texts = ((name, number_text(value)) for name, value in metrics if len(name) <= LONGEST_NAME)
    return dict(islice(((name, text) for name, text in texts if text is not None), MOST_METRICS))


def _remove(content: dict[str, Any], location: tuple[int | str, ...]) -> None:
    """Removes what is at the location, or the object that lacks a field there."""
    parent: Any = content
    key, *rest = location
    for inner in rest:
        below = parent.get(key) if isinstance(parent, dict) else parent[key]
        if not isinstance(below, dict | list) or (isinstance(below, dict) and inner not in below):
            break
        parent, key = below, inner
    if isinstance(parent, dict):
        parent.pop(key, None)
    else:
        del parent[key]
