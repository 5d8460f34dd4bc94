"""Reads reports: our own payload and Kubeflow Trainer's.

A wrong type is refused with the field's name, so that the author of a reporter notices it at once. Excess is only cut
off: a refused report is lost, and training that is silent for long is treated as hung.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, TypeVar

from pydantic import Field, ValidationError

from tpu_contract.protocol import MOST_WARNINGS, STACKS_LIMIT, WARNING_LENGTH, WORKER_PHASES, ReportPhase
from tpu_training_operator.api.model import LARGEST_COUNT
from tpu_training_operator.api.words import number_text, read_number
from tpu_training_operator.domain.cluster_state.worker_reports import WorkerReport
from tpu_training_operator.domain.job.trainer_report import Count, Part, ReportedRung, TrainerReport, metric_texts
from tpu_training_operator.runtime.progress.tokens import ReportRefused, Sender

_MOST_PROBLEMS = 5
_LONGEST_PROBLEM = 200

# Names that reporters use for their step: Hugging Face's callback says current_step and total_steps.
_STEP_METRICS = ("current_step", "currentStep", "step", "global_step", "globalStep")
_TOTAL_METRICS = ("total_steps", "totalSteps", "max_steps", "maxSteps")


class _ProgressPayload(TrainerReport):
    phase: ReportPhase
    step: Count
    start_step: Count | None = None
    warnings: list[str] | None = None
    estimated_remaining_seconds: Count | None = None
    stacks: str | None = None
    packages_sha256: Annotated[str, Field(max_length=64)] | None = None
    rung: ReportedRung | None = None
    start_seconds: dict[str, Annotated[float, Field(ge=0, le=LARGEST_COUNT)]] | None = None


class _MetricPayload(Part):
    name: str
    value: str


class _TrainerStatus(Part):
    progress_percentage: Annotated[int, Field(ge=0, le=100)] | None = None
    estimated_remaining_seconds: Count | None = None
    metrics: list[_MetricPayload] | None = None


class _TrainJob(Part):
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
        start_step=payload.start_step,
        total_steps=payload.total_steps,
        examples_per_second=number_text(payload.examples_per_second),
        loss=number_text(payload.loss),
        metrics=payload.metric_texts,
        checkpoint_step=payload.checkpoint_step,
        best_checkpoint=payload.best,
        estimated_remaining_seconds=payload.estimated_remaining_seconds,
        program=payload.program,
        warnings=tuple(text[:WARNING_LENGTH] for text in (payload.warnings or ())[-MOST_WARNINGS:]),
        start_seconds={name: s for name, s in (payload.start_seconds or {}).items() if name in WORKER_PHASES},
        # The end shows where a thread is.
        stacks=payload.stacks[-STACKS_LIMIT:] if payload.stacks else None,
        rung=payload.rung,
        packages_sha256=payload.packages_sha256,
    )


def read_trainer_status(body: bytes, sender: Sender, received: datetime) -> WorkerReport:
    """Reads Kubeflow Trainer's payload: `trainerStatus` of KEP-2779, which has a percentage and metrics but no step.

    The step comes from a metric of that meaning, or else from the percentage and the job's steps. Raises ReportRefused
    (400) if neither is there.
    """
    status = _parse(_TrainJob, body).trainer_status
    numbers = {
        metric.name: number for metric in status.metrics or () if (number := read_number(metric.value)) is not None
    }
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
        metrics=metric_texts(rest.items()),
        estimated_remaining_seconds=status.estimated_remaining_seconds,
        exact=exact,
    )


def _phase(step: int, percentage: int | None) -> ReportPhase:
    if percentage == 100:
        return ReportPhase.DONE
    return ReportPhase.TRAINING if step else ReportPhase.STARTING


_Form = TypeVar("_Form", bound=Part)


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


def _count(numbers: Mapping[str, float], names: tuple[str, ...]) -> int | None:
    """Returns the first number under one of the names that is a count."""
    values = (numbers[name] for name in names if name in numbers)
    return next((int(number) for number in values if 0 <= number <= LARGEST_COUNT), None)
