"""`spec.ladder`: the rungs on smaller slices, which must pass before the job may begin."""

from enum import StrEnum
from itertools import pairwise
from typing import Annotated, ClassVar

from pydantic import Field

from tpu_contract.protocol import Check
from tpu_training_operator.api.decimals import (
    Decimal,
    FractionDecimal,
    NonNegativeDecimal,
    PositiveDecimal,
    RatioDecimal,
)
from tpu_training_operator.api.model import ApiModel, Boolean, MetricName, Rule
from tpu_training_operator.api.slice import Slice, cel_chips, requested_chips

MOST_RUNGS = 4
"""The API server bounds the cost of the rules of all slices of a job."""

FEWEST_STEPS = 10
"""The first three steps of a process compile, and a rate needs several more."""
_MOST_STEPS = 10_000


class EvaluationBound(ApiModel):
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.min) || has(self.max)",
            message="give min, max or both",
            holds=lambda bound: bound.min is not None or bound.max is not None,
        ),
        Rule(
            cel="!has(self.min) || !has(self.max) || double(self.min) <= double(self.max)",
            message="min must not be above max",
            holds=lambda bound: bound.min is None or bound.max is None or float(bound.min) <= float(bound.max),
            field="min",
        ),
    )

    metric: MetricName = Field(description="Metric of the task's evaluation, for example accuracy.")
    min: Decimal | None = Field(None, description="Least value that passes.")
    max: Decimal | None = Field(None, description="Greatest value that passes.")


class LossBound(ApiModel):
    tolerance: NonNegativeDecimal = Field(
        description="How much higher the loss may be than on the rung before, beside its noise, for example 0.05."
    )


class Gates(ApiModel):
    """What a rung must show. The first three and minEfficiency are on by default."""

    loss_falls: Boolean = Field(
        True,
        description="The loss falls, by the order of the losses of all steps, with an error of at most 1 %, and after"
        " the warm-up does not rise above the first. Steps that are too few to tell fail the gate.",
    )
    finite: Boolean = Field(
        True,
        description="Loss and gradients of all steps are finite; with recipe.onNotFinite Stop any other step already"
        " fails the rung.",
    )
    no_recompilation: Boolean = Field(True, description="No step after the first three compiles a new program.")
    loss_follows: LossBound | None = Field(
        None, description="After the same examples the loss is as low as on the rung before. Not on the first rung."
    )
    min_efficiency: RatioDecimal | None = Field(
        None,
        description="Least examples per second per chip, divided by those of the rung before, for example 0.8; 0: only"
        " shown. Default 0.5 on hardware TPU after a rung of the same generation. Not on the first rung.",
    )
    min_examples_per_second_per_chip: PositiveDecimal | None = Field(
        None, description="Least examples per second per chip."
    )
    min_utilisation: FractionDecimal | None = Field(
        None, description="Least model flops utilisation, for example 0.3; not known on hardware CPU."
    )
    no_findings: Annotated[list[Check], Field(min_length=1, max_length=9)] | None = Field(
        None, description="Findings of the trainer's doctor that fail the rung; docs/doctor.md explains each."
    )
    evaluation: EvaluationBound | None = Field(
        None, description="Bounds for a metric of the evaluation at the end of the rung."
    )


class RungSpec(ApiModel):
    slice: Slice = Field(description="The slice, or slices, of the rung; hardware as in spec.slice.")
    steps: Annotated[int, Field(strict=True, ge=FEWEST_STEPS, le=_MOST_STEPS)] = Field(
        description="The first steps of the training, as it would run on this slice."
    )
    gates: Gates = Field(default_factory=Gates, description="What the rung must show; if it does not, the job fails.")


class TopRung(ApiModel):
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.gates) || !has(self.gates.evaluation)",
            message="the job makes no evaluation when its first steps are judged; use recipe.stopEarly, or a rung",
            holds=lambda top: top.gates.evaluation is None,
            field="gates.evaluation",
        ),
    )

    steps: Annotated[int, Field(strict=True, ge=FEWEST_STEPS, le=_MOST_STEPS)] | None = Field(
        None, description="Number of steps that are judged; if left out, as many as in the last rung."
    )
    gates: Gates = Field(default_factory=Gates, description="What they must show; if they do not, the job fails.")


class Begin(StrEnum):
    """Where the job begins once all rungs have passed."""

    SCRATCH = "Scratch"
    CHECKPOINT = "Checkpoint"


def _ascends(ladder: "Ladder") -> bool:
    """Returns whether each rung has more chips than the one before. A slice that does not exist breaks another rule."""
    return all(not above or below < above for below, above in pairwise(_chips(ladder)))


def _chips(ladder: "Ladder") -> list[int]:
    return [requested_chips(rung.slice) for rung in ladder.rungs]


class Ladder(ApiModel):
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"[self.rungs.map(rung, {cel_chips('rung.slice')})].all(chips,"
            f" {list(range(MOST_RUNGS - 1))}.all(below, below + 1 >= chips.size()"
            " || chips[below + 1] == 0 || chips[below] < chips[below + 1]))",
            message="each rung must have more chips than the one before it",
            holds=_ascends,
            field="rungs",
            explain=lambda ladder: (
                f"the rungs have {', '.join(map(str, _chips(ladder)))} chips: each must have more than the one before"
            ),
        ),
        Rule(
            cel="self.rungs.size() == 0 || !has(self.rungs[0].gates) || !has(self.rungs[0].gates.minEfficiency)",
            message="minEfficiency compares a rung with the one before it; leave it out of the first rung",
            holds=lambda ladder: ladder.rungs[0].gates.min_efficiency is None,
            field="rungs",
        ),
        Rule(
            cel="self.rungs.size() == 0 || !has(self.rungs[0].gates) || !has(self.rungs[0].gates.lossFollows)",
            message="lossFollows compares a rung with the one before it; leave it out of the first rung",
            holds=lambda ladder: ladder.rungs[0].gates.loss_follows is None,
            field="rungs",
        ),
    )

    rungs: Annotated[list[RungSpec], Field(min_length=1, max_length=MOST_RUNGS)] = Field(
        description="The rungs below the job, each with more chips than the one before and none with more than"
        " spec.slice, the top rung."
    )
    top: TopRung = Field(
        default_factory=TopRung, description="The job's own first steps are judged, too, while it goes on."
    )
    # `from` is a keyword in Python.
    begin: Begin = Field(
        Begin.SCRATCH,
        alias="from",
        description="Scratch: the job trains as it would without a ladder. Checkpoint: it continues from"
        " the last rung's checkpoint, with the batch of its own slice; needs spec.checkpoint.",
    )
