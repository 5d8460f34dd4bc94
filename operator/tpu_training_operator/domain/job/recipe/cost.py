"""What a training costs in chips and time, from one model of a step's time.

Replicas compute side by side, so a step takes as long as one of them computes: a time that was measured on one slice
holds on every slice of its generation, in proportion to the examples that a replica computes for a step. That leaves
out how the exchange between chips grows with the slice, which a measurement on a larger slice shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

from tpu_training_operator.domain.job.recipe.resolve import Resolution
from tpu_training_operator.domain.job.topology import SliceLayout

SECONDS_PER_STEP = "seconds per step"
_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class StepTime:
    """The time of one optimizer step on a slice, for which each replica computes `examples`: its batch, times the
    accumulation. `source`: how the time is known."""

    seconds: float
    layout: SliceLayout
    examples: int
    source: str

    @classmethod
    def of(cls, resolution: Resolution, seconds: float, source: str) -> "StepTime":
        """Returns the time of a step of the recipe as it is on a slice."""
        return cls(seconds, resolution.layout, _examples(resolution), source)

    def seconds_for(self, resolution: Resolution) -> float:
        """Returns the time that a step should take on another slice of the generation."""
        return self.seconds * _examples(resolution) / self.examples

    def __str__(self) -> str:
        return f"{self.source} {self.layout}: {self.seconds:.3g} s for {self.examples} per replica"


@dataclass(frozen=True)
class Cost:
    """The cost of one uninterrupted training, without start-up, compilation and evaluation. `step_seconds` and
    `measured`, from which it follows, are None where no step time of this generation is known. `steps` are the most;
    with AdaScale a training may end after `fewest_steps`."""

    chips: int
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

    def as_json(self) -> dict[str, float | int | str]:
        known = {
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
    alike = [time for time in times if time.layout.shape.generation == layout.shape.generation]
    nearest = min(alike, key=lambda time: abs(log(time.layout.chips / layout.chips)), default=None)
    seconds = None if nearest is None else nearest.seconds_for(resolution)
    return Cost(layout.chips, resolution.steps, resolution.fewest_steps, seconds, nearest)


def cost_rows(costs: Sequence[Cost]) -> dict[str, list[str]]:
    """Returns the numbers to show for several slices, by name. Without any step time, chips are all that is known."""
    ranges = [(replace(cost, steps=cost.fewest_steps), cost) for cost in costs]
    if all(cost.measured is None for cost in costs):
        return {"chip-steps": [_range(str(least.chip_steps), str(most.chip_steps)) for least, most in ranges]}
    return {
        SECONDS_PER_STEP: [_text(cost.step_seconds) for cost in costs],
        "hours": [_range(_text(least.hours), _text(most.hours)) for least, most in ranges],
        "chip-hours": [_range(_text(least.chip_hours), _text(most.chip_hours)) for least, most in ranges],
    }


def _examples(resolution: Resolution) -> int:
    batch = resolution.recipe.batch
    return batch.per_replica * batch.accumulation


def _range(least: str, most: str) -> str:
    return most if least == most else f"{least} to {most}"


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
