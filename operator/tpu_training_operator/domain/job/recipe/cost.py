"""What a training costs in chips and time.

Only the step time is unknown before the first run. If every replica keeps its batch, the step time hardly depends on
the slice, so one measured on a small slice predicts the cost of a large one.
"""

from dataclasses import dataclass

from tpu_training_operator.domain.job.recipe.resolve import Resolution

_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Cost:
    """`hours` and `chip_hours` are None without a step time. They exclude start-up, compilation and evaluation."""

    chip_steps: int
    hours: float | None
    chip_hours: float | None

    def lines(self) -> dict[str, str]:
        """Returns the numbers to show, by name."""
        if self.hours is None or self.chip_hours is None:
            return {"chip-steps": str(self.chip_steps)}
        return {"hours": f"{self.hours:.3g}", "chip-hours": f"{self.chip_hours:.3g}"}

    def as_json(self) -> dict[str, float | int]:
        known = {"chipSteps": self.chip_steps, "hours": self.hours, "chipHours": self.chip_hours}
        return {name: value for name, value in known.items() if value is not None}


def cost_of(resolution: Resolution, step_seconds: float | None) -> Cost:
    """Returns the cost of one uninterrupted training; `step_seconds` is the time of one optimizer step."""
    chips, steps = resolution.layout.chips, resolution.steps
    if step_seconds is None:
        return Cost(chips * steps, None, None)
    hours = steps * step_seconds / _SECONDS_PER_HOUR
    return Cost(chips * steps, hours, chips * hours)
