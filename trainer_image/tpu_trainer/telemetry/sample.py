"""What one report of the loop holds: the numbers of the steps since the report before. Made by `loop`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tpu_trainer.clock import Phase


@dataclass(frozen=True)
class Sample:
    """step: steps done; losses: the global loss of every step since the last sample, the newest last, never empty.

    seconds: wall time since the last sample, and how it was split (`split`, per phase). examples_per_second is over
    the steps that compiled nothing. mfu: part of the slice's peak that the model's own operations made up, 0..1.
    noise_scale: the gradient noise scale, in examples. None where a number is not to be had (yet).
    """

    step: int
    losses: tuple[float, ...]
    learning_rate: float
    seconds: float
    split: Mapping[Phase, float]
    examples_per_second: float | None = None
    mfu: float | None = None
    noise_scale: float | None = None
