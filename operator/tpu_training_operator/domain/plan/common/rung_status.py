"""`status.stages`: what the status says of the rungs of a ladder."""

from collections.abc import Sequence
from dataclasses import replace

from tpu_training_operator.api.status import Stage, Status, Verdict
from tpu_training_operator.domain.job.rung_gates import Pace
from tpu_training_operator.domain.job.rungs import Rung


def on_rung(status: Status, rung: Rung | None) -> Status:
    """The status of an attempt on `rung`; it is written together with the attempt."""
    if rung is None:
        return status if not status.stages and status.stage is None else replace(status, stage=None, stages=[])
    below = status.stages[: rung.number - 1]
    resolution = rung.option.resolution
    layout, recipe = resolution.layout, resolution.recipe
    own = Stage(
        slice=str(rung.option),
        chips=layout.chips,
        replicas=layout.replicas,
        global_batch_size=recipe.batch.total,
        learning_rate=recipe.learning_rate,
        steps=resolution.steps,
    )
    return replace(status, stage=rung.name, stages=[*below, own])


def is_trial(status: Status) -> bool:
    """Whether the attempt is on a rung below the job, from the status alone: the spec may be invalid."""
    number, _, of = (status.stage or "").partition("/")
    return number != of


def with_end(status: Status, examples_per_second: str | None, *, succeeded: bool) -> Status:
    """The status of a job that ends, with the verdict on the rung that it ends on."""
    if not status.stages or status.stages[-1].verdict is not Verdict.RUNNING:
        return status
    last = status.stages[-1]
    rate = _number(examples_per_second) if succeeded else None
    own = replace(
        last,
        verdict=Verdict.PASSED if succeeded else Verdict.FAILED,
        attempt=status.attempt,
        examples_per_second=examples_per_second if rate is not None else None,
        efficiency=three_digits(Pace(rate, last.chips).efficiency(pace_of(status.stages[:-1]))),
    )
    return replace(status, stages=[*status.stages[:-1], own])


def pace_of(below: Sequence[Stage]) -> Pace | None:
    return Pace(_number(below[-1].examples_per_second), below[-1].chips) if below else None


def _number(text: str | None) -> float | None:
    """A rate in the status; None if somebody has edited it into something else."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def three_digits(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g}"
