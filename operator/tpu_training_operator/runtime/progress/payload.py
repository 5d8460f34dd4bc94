"""Reads reports: our own payload and Kubeflow Trainer's.

A wrong type is refused with the field's name, so that the author of a reporter notices it at once. Excess is only cut
off: a refused report is lost, and training that is silent for long is treated as hung.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from itertools import islice
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from tpu_training_operator.api.status import MOST_METRICS, MOST_WARNINGS, BestCheckpoint, ReportPhase
from tpu_training_operator.api.words import number_text
from tpu_training_operator.domain.cluster_state.worker_reports import WorkerReport
from tpu_training_operator.runtime.progress.tokens import ReportRefused, Sender

LONGEST_WARNING = 1024
LONGEST_METRIC_NAME = 128
# In characters. The last ones are kept, which show where a thread is.
LONGEST_STACKS = 16 * 1024

# As in the recipe: the largest whole number that a double holds exactly.
_LARGEST_COUNT = 2**53
_MOST_PROBLEMS = 5
_LONGEST_PROBLEM = 200

# Names that reporters use for their step: Hugging Face's callback says current_step and total_steps.
_STEP_METRICS = ("current_step", "currentStep", "step", "global_step", "globalStep")
_TOTAL_METRICS = ("total_steps", "totalSteps", "max_steps", "maxSteps")

_Count = Annotated[int, Field(ge=0, le=_LARGEST_COUNT)]


class _Payload(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, strict=True, extra="ignore", frozen=True)


class _BestCheckpointPayload(_Payload):
    name: Annotated[str, Field(max_length=LONGEST_METRIC_NAME)]
    step: _Count
    metric: Annotated[str, Field(max_length=LONGEST_METRIC_NAME)]
    value: float


class _ProgressPayload(_Payload):
    phase: ReportPhase
    step: _Count
    total_steps: _Count | None = None
    loss: float | None = None
    examples_per_second: float | None = None
    checkpoint_step: _Count | None = None
    best_checkpoint: _BestCheckpointPayload | None = None
    metrics: dict[str, float | None] | None = None
    warnings: list[str] | None = None
    estimated_remaining_seconds: _Count | None = None
    stacks: str | None = None


class _MetricPayload(_Payload):
    name: str
    value: str


class _TrainerStatus(_Payload):
    progress_percentage: Annotated[int, Field(ge=0, le=100)] | None = None
    estimated_remaining_seconds: _Count | None = None
    metrics: list[_MetricPayload] | None = None


class _TrainJob(_Payload):
    trainer_status: _TrainerStatus


def read_progress(body: bytes, sender: Sender, received: datetime) -> WorkerReport:
    """Reads our own payload (docs/progress.md). Raises ReportRefused (400) for anything else."""
    payload = _parse(_ProgressPayload, body)
    return WorkerReport(
        attempt=sender.attempt,
        pod_uid=sender.pod_uid,
        received=received,
        phase=payload.phase,
        step=payload.step,
        total_steps=payload.total_steps,
        examples_per_second=number_text(payload.examples_per_second),
        loss=number_text(payload.loss),
        metrics=_metrics((payload.metrics or {}).items()),
        checkpoint_step=payload.checkpoint_step,
        best_checkpoint=_best(payload.best_checkpoint),
        estimated_remaining_seconds=payload.estimated_remaining_seconds,
        warnings=tuple(text[:LONGEST_WARNING] for text in (payload.warnings or ())[-MOST_WARNINGS:]),
        stacks=payload.stacks[-LONGEST_STACKS:] if payload.stacks else None,
    )


def read_trainer_status(body: bytes, sender: Sender, received: datetime) -> WorkerReport:
    """Reads Kubeflow Trainer's payload: `trainerStatus` of KEP-2779, which has a percentage and metrics but no step.

    The step comes from a metric of that meaning, or else from the percentage and the job's steps. Raises ReportRefused
    (400) if neither is there.
    """
    status = _parse(_TrainJob, body).trainer_status
    numbers = {metric.name: number for metric in status.metrics or () if (number := _number(metric.value)) is not None}
    total = _count(numbers, _TOTAL_METRICS) or sender.total_steps
    step = _count(numbers, _STEP_METRICS)
    exact = step is not None
    if step is None:
        if status.progress_percentage is None or total is None:
            raise ReportRefused(
                400, f"trainerStatus: needs progressPercentage or a metric named {', '.join(_STEP_METRICS)}"
            )
        step = total * status.progress_percentage // 100
    rest = {name: number for name, number in numbers.items() if name not in (*_STEP_METRICS, *_TOTAL_METRICS)}
    return WorkerReport(
        attempt=sender.attempt,
        pod_uid=sender.pod_uid,
        received=received,
        phase=_phase(step, status.progress_percentage),
        step=step,
        total_steps=total,
        loss=number_text(rest.get("loss")),
        metrics=_metrics(rest.items()),
        estimated_remaining_seconds=status.estimated_remaining_seconds,
        exact=exact,
    )


def _best(payload: _BestCheckpointPayload | None) -> BestCheckpoint | None:
    value = None if payload is None else number_text(payload.value)
    if payload is None or value is None:
        return None
    return BestCheckpoint(name=payload.name, step=payload.step, metric=payload.metric, value=value)


def _phase(step: int, percentage: int | None) -> ReportPhase:
    if percentage == 100:
        return ReportPhase.DONE
    return ReportPhase.TRAINING if step else ReportPhase.STARTING


_Form = TypeVar("_Form", bound=_Payload)


def _parse(form: type[_Form], body: bytes) -> _Form:
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)[:_MOST_PROBLEMS]
        raise ReportRefused(400, "; ".join(_problem(problem["loc"], problem["msg"]) for problem in problems)) from None


def _problem(location: tuple[int | str, ...], message: str) -> str:
    path = ".".join(map(str, location))[:_LONGEST_PROBLEM]
    text = message[:1].lower() + message[1:_LONGEST_PROBLEM]
    return f"{path}: {text}" if path else text


def _metrics(metrics: Iterable[tuple[str, float | None]]) -> Mapping[str, str]:
    """Returns as many metrics as the status has room for, as texts."""
    texts = ((name, number_text(value)) for name, value in metrics if len(name) <= LONGEST_METRIC_NAME)
    return dict(islice(((name, text) for name, text in texts if text is not None), MOST_METRICS))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _count(numbers: Mapping[str, float], names: tuple[str, ...]) -> int | None:
    """Returns the first number under one of the names that is a count."""
    values = (numbers[name] for name in names if name in numbers)
    return next((int(number) for number in values if 0 <= number <= _LARGEST_COUNT), None)
