"""`spec.placement`: the other slices that a job may run on, and how it moves between them."""

from datetime import timedelta
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from tpu_training_operator.api.model import ApiModel, Count, Rule, ShortText
from tpu_training_operator.api.slice import MOST_SLICES, Slice

MOST_ALTERNATIVES = 4
"""The API server bounds the cost of the rules of all slices of a job."""

MOST_COUNTED_MOVES = 16
"""The status has room for these and some more."""


class MoveBatch(StrEnum):
    """How the recipe follows a move."""

    CONSTANT = "Constant"
    SCALED = "Scaled"


class OnLoss(StrEnum):
    """What a job does when it has lost its slice: it moves to another one, or waits for that one."""

    MOVE = "Move"
    WAIT = "Wait"


class ReturnToPreferred(StrEnum):
    """Whether a job returns to a slice that it prefers."""

    AT_CHECKPOINT = "AtCheckpoint"
    NEVER = "Never"


class MaxMoves(ApiModel):
    count: Annotated[int, Field(strict=True, ge=1, le=MOST_COUNTED_MOVES)] = Field(
        6, description="Moves allowed within windowSeconds; after that, the job stays."
    )
    window_seconds: Count = Field(86400, description="How long a move counts, in seconds.")

    @property
    def window(self) -> timedelta:
        return timedelta(seconds=self.window_seconds)


class Alternative(ApiModel):
    slice: Slice = Field(description="The slice, or slices, to run on instead; hardware as in spec.slice.")
    wait_for_previous_seconds: Count = Field(
        600, description="Seconds to wait for the previous slice before the job moves to this one."
    )


class FewerSlices(ApiModel):
    min: Annotated[int, Field(strict=True, ge=1, le=MOST_SLICES - 1)] = Field(
        description="Fewest slices that the job runs on. Up to spec.slice.count it uses the numbers whose replicas"
        " share the global batch evenly, at most 16."
    )
    wait_for_previous_seconds: Count = Field(
        600, description="Seconds to wait for all slices before the job runs on those that it has."
    )


class PlacementPolicy(ApiModel):
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.alternatives) || has(self.count)",
            message="give alternatives, count or both: what else the job may run on besides spec.slice",
            holds=lambda placement: placement.alternatives is not None or placement.count is not None,
        ),
    )

    alternatives: Annotated[list[Alternative], Field(min_length=1, max_length=MOST_ALTERNATIVES)] | None = Field(
        None, description="Slices to use while spec.slice has no capacity, in order of preference."
    )
    count: FewerSlices | None = Field(
        None, description="How few of its slices the job may run on; fewer slices come before the alternatives."
    )
    on_loss: OnLoss = Field(
        OnLoss.MOVE,
        description="Move: a job whose slice is lost, and not back within waitForPreviousSeconds, continues on the next"
        " one in the order of preference. Wait: it waits for the slice on which it has run.",
    )
    return_to_preferred: ReturnToPreferred = Field(
        ReturnToPreferred.NEVER,
        description="AtCheckpoint: placeholder pods ask for the nodes of a slice that the job prefers; when all run,"
        " the workers save and stop, and the job continues there. Needs spec.checkpoint. Never: the job stays until its"
        " slice is lost.",
    )
    min_run_seconds: Count = Field(
        1800, description="With returnToPreferred, how long the gang runs on a slice before it asks for a better one."
    )
    placeholder_priority_class: ShortText | None = Field(
        None,
        description="PriorityClass of the placeholder pods. If its value is negative, any other pod may take their"
        " nodes.",
    )
    max_moves: MaxMoves = Field(
        default_factory=MaxMoves, description="How often the job may leave a slice on which it has run."
    )
    batch: MoveBatch = Field(
        MoveBatch.CONSTANT,
        description="Constant keeps global batch, steps and learning rate of spec.slice; gradients are accumulated as"
        " each slice needs. Scaled scales the recipe for each slice.",
    )
