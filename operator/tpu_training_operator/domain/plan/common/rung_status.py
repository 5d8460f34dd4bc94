"""`status.ladder`: what the status says about the rungs of a ladder."""

from collections.abc import Sequence

from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.status import LadderStatus, RungStatus, RungVerdict, Status
from tpu_training_operator.api.words import read_number
from tpu_training_operator.domain.job.rung_gates import Pace
from tpu_training_operator.domain.job.rungs import Rung


def record_rung(status: Status, rung: Rung | None) -> Status:
    """Returns the status of an attempt on `rung`; it is written together with the attempt."""
    if rung is None:
        return status if status.ladder is None else replace(status, ladder=None)
    below, judged = status.rungs[: rung.number - 1], status.rungs[rung.number - 1 :]
    if judged and judged[0].verdict is RungVerdict.PASSED and rung.lower_rung is None:
        # The job's first steps are judged once, wherever it goes on.
        return replace(status, ladder=LadderStatus(rung=rung.number, of=rung.of, rungs=[*below, judged[0]]))
    resolution = rung.option.resolution
    layout, recipe = resolution.layout, resolution.recipe
    current = RungStatus(
        slice=str(rung.option),
        chips=layout.chips,
        replicas=layout.replicas,
        global_batch_size=recipe.batch.total,
        learning_rate=recipe.learning_rate,
        steps=resolution.steps,
    )
    return replace(status, ladder=LadderStatus(rung=rung.number, of=rung.of, rungs=[*below, current]))


def with_verdict(status: Status, last: RungStatus) -> Status:
    """Returns the status with `last` in place of the rung that the job is on."""
    assert status.ladder is not None
    return replace(status, ladder=replace(status.ladder, rungs=[*status.rungs[:-1], last]))


def is_on_lower_rung(status: Status) -> bool:
    """Returns whether the attempt is on a rung below the job, from the status alone: the spec may be invalid."""
    return status.ladder is not None and status.ladder.rung != status.ladder.of


def with_end(status: Status, examples_per_second: str | None, *, succeeded: bool) -> Status:
    """Returns the status of a job that ends, with the verdict on the rung that it ends on."""
    if not status.rungs or status.rungs[-1].verdict is not RungVerdict.RUNNING:
        return status
    last = status.rungs[-1]
    rate = read_number(examples_per_second) if succeeded else None
    ended = replace(
        last,
        verdict=RungVerdict.PASSED if succeeded else RungVerdict.FAILED,
        attempt=status.attempt,
        examples_per_second=examples_per_second if rate is not None else None,
        efficiency=format_ratio(Pace(rate, last.chips).efficiency(read_pace(status.rungs[:-1]))),
    )
    return with_verdict(status, ended)


def read_pace(below: Sequence[RungStatus]) -> Pace | None:
    return Pace(read_number(below[-1].examples_per_second), below[-1].chips) if below else None


def format_ratio(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g}"
