"""A run as it might have gone: made up, but by rule, and the same every time."""

from __future__ import annotations

import math
import random

from tpu_contract.protocol import Phase
from tpu_trainer.reporting.history import RunHistory, Sample


def history_of(steps: int, every: int = 10, broken: tuple[int, ...] = ()) -> RunHistory:
    """A training of `steps` steps, a sample `every` so many; `broken` steps have a loss that is not finite."""
    draw = random.Random(7)
    history = RunHistory()
    for last in range(every, steps + every, every):
        done = range(last - every + 1, min(last, steps) + 1)
        losses = [math.nan if step in broken else 0.35 + 2 * math.exp(-6 * step / steps) for step in done]
        seconds = len(done) * draw.uniform(0.19, 0.22)
        split = {Phase.INPUT: 0.08 * seconds, Phase.HOST: 0.15 * seconds, Phase.DEVICE: 0.77 * seconds}
        history.add_sample(Sample(done[-1], tuple(losses), 0.4, seconds, split, 4940.0, 0.413, 13_600.0))
    return history
