"""Says of a run that ends well whether it has learned anything: a training that diverges or stands still may end with
the exit code 0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tpu_contract.protocol import LOSS_FALLS
from tpu_trainer.reporting.loss_trend import LossTrend

FEWEST_STEPS = 100
"""Of the healthy trainings of noisy tasks up to half do not get out of the noise of their batches in 60 steps, and 1 in
25 in 100."""

HIGH_RATE = (
    "the learning rate is too high for this batch, or the warm-up too short; lower recipe.optimizer.learningRate, or "
    "scale it with less (recipe.scaling.learningRate), or raise recipe.warmupSteps"
)
STANDSTILL = "look at the learning rate, the labels, and whether the loss reaches all parameters"


@dataclass(frozen=True)
class Followed:
    """A metric that the recipe follows: its first and its last evaluation, and whether the last is better."""

    metric: str
    first: float
    last: float
    is_better: bool


def find_unlearned(losses: LossTrend, followed: Followed | None, stride: int = 1) -> Iterator[str]:
    """Yields what shows that the run has not learned. `losses`: from the first step of the training on. `followed`:
    decides in place of the losses, which need not fall if two networks compete; a rise is named in any case. `stride`:
    of how many steps each loss is the mean."""
    if (rise := losses.rise) is not None:
        yield (
            f"the loss rose from {rise.start:.4g} to {rise.peak:.4g} at step {rise.step * stride}, above its first "
            f"value, after the warm-up: {HIGH_RATE}"
        )
    if followed is not None:
        if not followed.is_better:
            yield (
                f"the training did not learn: {followed.metric} {followed.last:.4g} at the end, {followed.first:.4g} "
                f"at the first evaluation; {STANDSTILL}"
            )
        return
    errors, first, last = losses.errors_fallen, losses.first, losses.last
    if first is None or last is None or errors is None or losses.count * stride < FEWEST_STEPS or losses.is_constant:
        return
    if errors <= LOSS_FALLS:
        yield (
            f"the training did not learn: loss {last.value:.4g} at the end, {first.value:.4g} at the start (means of "
            f"{first.count * stride} steps; the noise hides a smaller fall); {STANDSTILL}"
        )
