"""What a run has measured of itself so far, in constant memory. Kept by `reporter`, shown by `report`, stored between
attempts by `memory`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tpu_trainer.clock import Phase
from tpu_trainer.doctor.finding import Finding
from tpu_trainer.telemetry.sample import Sample
from tpu_trainer.telemetry.series import Series

KINDS_OF_FINDINGS = 100
"""Checks whose findings are kept; of each check the number, the first step and the last message."""


@dataclass(frozen=True)
class Loss:
    """The losses of `count` steps up to and including `step`. mean, low and high are over the finite ones, None where
    there are none; `broken`: how many were NaN or infinite."""

    step: int
    count: int
    mean: float | None
    low: float | None
    high: float | None
    broken: int

    @staticmethod
    def of(step: int, loss: float) -> Loss:
        if math.isfinite(loss):
            return Loss(step, 1, loss, loss, loss, 0)
        return Loss(step, 1, None, None, None, 1)

    def then(self, later: Loss) -> Loss:
        count, broken = self.count + later.count, self.broken + later.broken
        if self.mean is None or self.low is None or self.high is None:
            return replace(later, count=count, broken=broken)
        if later.mean is None or later.low is None or later.high is None:
            return replace(self, step=later.step, count=count, broken=broken)
        # Of the difference, so that two equal means merge into exactly themselves.
        mean = self.mean + (later.mean - self.mean) * ((later.count - later.broken) / (count - broken))
        return Loss(later.step, count, mean, min(self.low, later.low), max(self.high, later.high), broken)


@dataclass(frozen=True)
class Stretch:
    """How `steps` steps up to and including `step` went: seconds, and those of them that each phase took.

    The learning rate is that of the last step."""

    step: int
    steps: int
    seconds: float
    split: Mapping[Phase, float]
    learning_rate: float

    def then(self, later: Stretch) -> Stretch:
        return Stretch(
            step=later.step,
            steps=self.steps + later.steps,
            seconds=self.seconds + later.seconds,
            split=total([self.split, later.split]),
            learning_rate=later.learning_rate,
        )


@dataclass(frozen=True)
class Evaluation:
    """The metrics after `step` steps. Of two merged ones the later stands, whole: a mean of both was never measured."""

    step: int
    metrics: Mapping[str, float]

    def then(self, later: Evaluation) -> Evaluation:
        return later


@dataclass(frozen=True)
class Warned:
    """What one check had to say: `times` findings, at steps first..last, the last one's message."""

    check: str
    first: int
    last: int
    times: int
    message: str


@dataclass(frozen=True)
class Attempt:
    """One gang of the run: it began after `first` steps of the training and had done `last` when this was noted.

    `split`: seconds per phase of the reporting replica. `outcome`: the exit code's name, None while it runs; an
    earlier attempt without one ended without a word.
    """

    number: int
    first: int
    last: int
    split: Mapping[Phase, float]
    outcome: str | None = None


@dataclass(frozen=True)
class Recorded:
    """A History at one moment, as it is shown and stored. Every sequence in the order of the steps.

    `strides`: how many additions a point of losses, stretches and evaluations stands for, see `Series`.
    """

    losses: Sequence[Loss] = ()
    stretches: Sequence[Stretch] = ()
    evaluations: Sequence[Evaluation] = ()
    warnings: Sequence[Warned] = ()
    attempts: Sequence[Attempt] = ()
    examples_per_second: float | None = None
    mfu: float | None = None
    noise_scale: float | None = None
    strides: tuple[int, int, int] = (1, 1, 1)

    def until(self, step: int) -> Recorded:
        """Without what came after `step`: steps that a resumed run does again. A merged point on both sides goes."""
        return replace(
            self,
            losses=[point for point in self.losses if point.step <= step],
            stretches=[point for point in self.stretches if point.step <= step],
            evaluations=[point for point in self.evaluations if point.step <= step],
        )


class History:
    """Told everything by `reporter`; `before` is what earlier attempts of the same run have recorded."""

    def __init__(self, before: Recorded | None = None) -> None:
        before = before or Recorded()
        losses, stretches, evaluations = before.strides
        self._losses = Series(Loss.then, before.losses, losses)
        self._stretches = Series(Stretch.then, before.stretches, stretches)
        self._evaluations = Series(Evaluation.then, before.evaluations, evaluations)
        self._warnings = {warned.check: warned for warned in before.warnings}
        self._attempts = before.attempts
        self._rates = (before.examples_per_second, before.mfu, before.noise_scale)

    def sample(self, sample: Sample) -> None:
        first = sample.step - len(sample.losses) + 1
        for step, loss in enumerate(sample.losses, first):
            self._losses.add(Loss.of(step, loss))
        split = {phase: sample.split.get(phase, 0.0) for phase in Phase}
        self._stretches.add(Stretch(sample.step, len(sample.losses), sample.seconds, split, sample.learning_rate))
        newest = (sample.examples_per_second, sample.mfu, sample.noise_scale)
        rate, mfu, noise = (old if new is None else new for old, new in zip(self._rates, newest, strict=True))
        self._rates = (rate, mfu, noise)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics:
            self._evaluations.add(Evaluation(step, dict(metrics)))

    def finding(self, finding: Finding) -> None:
        before = self._warnings.get(finding.check)
        if before is None and len(self._warnings) >= KINDS_OF_FINDINGS:
            return
        first, times = (finding.step, 0) if before is None else (before.first, before.times)
        warned = Warned(finding.check, first, finding.step, times + 1, finding.message)
        self._warnings[finding.check] = warned

    @property
    def warnings(self) -> tuple[Warned, ...]:
        """One for each check that had something to say, in the order of their first words."""
        return tuple(self._warnings.values())

    def recorded(self, attempt: Attempt) -> Recorded:
        """All of it up to now, with the present attempt as it stands."""
        rate, mfu, noise = self._rates
        return Recorded(
            losses=self._losses.points,
            stretches=self._stretches.points,
            evaluations=self._evaluations.points,
            warnings=self.warnings,
            attempts=(*self._attempts, attempt),
            examples_per_second=rate,
            mfu=mfu,
            noise_scale=noise,
            strides=(self._losses.stride, self._stretches.stride, self._evaluations.stride),
        )


def total(splits: Sequence[Mapping[Phase, float]]) -> dict[Phase, float]:
    """Seconds per phase, over all of them."""
    return {phase: sum(split.get(phase, 0.0) for split in splits) for phase in Phase}
