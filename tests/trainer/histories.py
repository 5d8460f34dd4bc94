"""Runs as they might have gone, for the tests of the report: made up, but by rule, and the same every time."""

from __future__ import annotations

import math
import random

from tpu_trainer.clock import Phase
from tpu_trainer.doctor.finding import Finding
from tpu_trainer.telemetry.history import Attempt, History, Recorded
from tpu_trainer.telemetry.sample import Sample

SPLIT = {Phase.START: 41.0, Phase.INPUT: 96.0, Phase.HOST: 118.0, Phase.DEVICE: 812.0, Phase.CHECKPOINT: 9.5}


def history_of(steps: int, every: int = 10, seed: int = 7, broken: tuple[int, ...] = ()) -> History:
    """A training of `steps` steps, sampled `every` so many; `broken` steps have a loss that is not finite."""
    draw = random.Random(seed)
    history = History()
    for last in range(every, steps + every, every):
        done = range(last - every + 1, min(last, steps) + 1)
        losses = [0.35 + 2 * math.exp(-6 * step / steps) * draw.uniform(0.85, 1.15) for step in done]
        losses = [math.nan if step in broken else loss for step, loss in zip(done, losses, strict=True)]
        seconds = len(done) * draw.uniform(0.19, 0.22) + (20 if last == every else 0)
        split = {Phase.INPUT: 0.08 * seconds, Phase.HOST: 0.15 * seconds, Phase.DEVICE: 0.77 * seconds}
        rate = 0.4 * min(1.0, done[-1] / (0.05 * steps)) * (1 + math.cos(math.pi * done[-1] / steps)) / 2
        history.sample(Sample(done[-1], tuple(losses), rate, seconds, split, 4940.0, 0.413, 13_600.0))
    return history


def typical() -> Recorded:
    """Two attempts, evaluations, two kinds of warnings."""
    history = history_of(5000)
    for step in range(500, 5001, 500):
        done = 1 - math.exp(-4 * step / 5000)
        history.evaluated(step, {"loss": 2.1 - 1.6 * done, "accuracy": 0.1 + 0.85 * done, "top5": 0.5 + 0.49 * done})
    waits = (
        "the device waited for input in 9 % of the training time; read ahead more, or decode fewer bytes per example"
    )
    for step in (900, 1800, 2700):
        history.finding(Finding("InputBound", step, waits))
    shapes = "step 412 compiled again (2.1 s): the last batch had the shape [28, 64] and not [32, 64]; drop or pad it"
    history.finding(Finding("RecompilationAfterWarmUp", 412, shapes))
    first = Attempt(1, 0, 2130, {Phase.START: 38.0, Phase.DEVICE: 455.0, Phase.HOST: 61.0}, "Preempted")
    return with_attempts(history, first, Attempt(2, 2130, 5000, {**SPLIT, Phase.EVALUATE: 62.0}, "Succeeded"))


def with_attempts(history: History, *attempts: Attempt) -> Recorded:
    before = history.recorded(attempts[-1])
    return Recorded(**{**vars(before), "attempts": attempts})
