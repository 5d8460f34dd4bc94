"""What a training costs in chips and time, from one model of a step's time.

Replicas compute side by side, so a step takes as long as one of them computes: a time that was measured on one slice
holds on every slice of its generation, in proportion to the examples that a replica computes for a step. That leaves
out how the exchange between chips grows with the slice, which a measurement on a larger slice shows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, isfinite, log
from typing import Any

from tpu_training_operator.api.catalogue import generation_of
from tpu_training_operator.api.recipe import Recipe
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.status import Status
from tpu_training_operator.api.words import read_number
from tpu_training_operator.domain.job.recipe.noise_scale import examples_multiplier
from tpu_training_operator.domain.job.recipe.resolve import Resolution

AT_BEST = "at best, compiled for"
SECONDS_PER_STEP = "seconds per step"
_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class StepTime:
    """The time of one optimizer step on a slice, for which each replica computes `examples`: its batch, times the
    accumulation. `source`: how the time is known."""

    seconds: float
    slice: str
    chips: int
    examples: int
    source: str

    @classmethod
    def of(cls, resolution: Resolution, seconds: float, source: str) -> "StepTime":
        """Returns the time of a step of the recipe as it is on a slice."""
        layout = resolution.layout
        return cls(seconds, str(layout), layout.chips, _examples(resolution), source)

    @property
    def generation(self) -> str:
        return generation_of(self.slice)

    def __str__(self) -> str:
        return f"{self.source} {self.slice}: {self.seconds:.3g} s for {self.examples} per replica"


def times_in(status: Status, name: str) -> Iterator[StepTime]:
    """Yields the times of a step that the status of the job `name` tells: its own, and those of its rungs."""
    resolved, progress = status.resolved, status.progress
    if resolved is not None and progress is not None:
        times = f"{resolved.slices} x " if resolved.slices > 1 else ""
        layout = f"{times}{resolved.accelerator_type}", resolved.chips, resolved.replicas
        yield from _from_speed(progress.examples_per_second, resolved.global_batch_size, layout, f"{name} ran on")
    for number, rung in enumerate(status.rungs, 1):
        layout, source = (rung.slice, rung.chips, rung.replicas), f"rung {number} of {name} ran on"
        yield from _from_speed(rung.examples_per_second, rung.global_batch_size, layout, source)


def _from_speed(speed: str | None, batch: int, layout: tuple[str, int, int], source: str) -> Iterator[StepTime]:
    rate, (name, chips, replicas) = read_number(speed), layout
    if rate is not None and rate > 0 and isfinite(rate) and chips > 0 and batch >= replicas > 0:
        yield StepTime(batch / rate, name, chips, batch // replicas, source)


@dataclass(frozen=True)
class Cost:
    """The cost of one uninterrupted training, without start-up, compilation and evaluation. `batch`: the examples of a
    step. `step_seconds` and `measured`, from which it follows, are None where no step time of this generation is known.
    `steps` are the most; with AdaScale a training may end after `fewest_steps`."""

    chips: int
    batch: int
    steps: int
    fewest_steps: int
    step_seconds: float | None
    measured: StepTime | None

    @property
    def chip_steps(self) -> int:
        return self.chips * self.steps

    @property
    def hours(self) -> float | None:
        return None if self.step_seconds is None else self.steps * self.step_seconds / _SECONDS_PER_HOUR

    @property
    def chip_hours(self) -> float | None:
        return None if self.hours is None else self.chips * self.hours

    def as_json(self) -> dict[str, Any]:
        known = {
            "steps": self.steps,
            "examples": self.steps * self.batch,
            "chipSteps": self.chip_steps,
            "stepSeconds": self.step_seconds,
            "stepSecondsFrom": None if self.measured is None else str(self.measured),
            "hours": self.hours,
            "chipHours": self.chip_hours,
        }
        return {name: value for name, value in known.items() if value is not None}


def cost_of(resolution: Resolution, times: Sequence[StepTime] = ()) -> Cost:
    """Returns the cost of the steps on this slice, by the time that was measured on it or on the slice of its
    generation that is nearest in size."""
    layout = resolution.layout
    alike = [time for time in times if time.generation == generation_of(str(layout))]
    nearest = min(alike, key=lambda time: abs(log(time.chips / layout.chips)), default=None)
    seconds = None if nearest is None else nearest.seconds * _examples(resolution) / nearest.examples
    return Cost(
        layout.chips, resolution.recipe.batch.total, resolution.steps, resolution.fewest_steps, seconds, nearest
    )


def to_same_loss(cost: Cost, recipe: Recipe) -> Cost | None:
    """Returns the cost of as many steps as take the loss where the recipe's own batch takes it; None without a gradient
    noise scale. AdaScale makes the same number, because its gain is what the noise scale says of the best rate."""
    if recipe.gradient_noise_scale is None:
        return None
    per_epoch = (recipe.dataset_size or 0) // cost.batch * cost.batch
    examples = (recipe.epochs or 0) * per_epoch + (recipe.train_steps or 0) * recipe.global_batch_size
    more = examples_multiplier(Fraction(recipe.gradient_noise_scale), recipe.global_batch_size, cost.batch)
    steps = ceil(examples * more / cost.batch)
    return replace(cost, steps=steps, fewest_steps=steps)


def cost_rows(costs: Sequence[Cost]) -> dict[str, list[str]]:
    """Returns the numbers to show for several slices, by name. Without any step time, chips are all that is known."""
    ranges = [(replace(cost, steps=cost.fewest_steps), cost) for cost in costs]
    if all(cost.measured is None for cost in costs):
        return {"chip-steps": [_range(str(least.chip_steps), str(most.chip_steps)) for least, most in ranges]}
    return {
        SECONDS_PER_STEP: [_number(cost.step_seconds) for cost in costs],
        "hours": [_range(_number(least.hours), _number(most.hours)) for least, most in ranges],
        "chip-hours": [_range(_number(least.chip_hours), _number(most.chip_hours)) for least, most in ranges],
    }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _examples(resolution: Resolution) -> int:
    batch = resolution.recipe.batch
    return batch.per_replica * batch.accumulation


def _range(least: str, most: str) -> str:
    return most if least == most else f"{least} to {most}"
