"""Collects a run's measurements in constant memory, and writes the file that carries them to the next attempt.

`history-v1.schema.json` describes the file; `tpujob report` makes the report page from it. The file is evidence for
people, not state of the training: one that cannot be read is ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, Generic, TypeVar

from tpu_contract.protocol import HISTORY_SCHEMA, Phase
from tpu_contract.run_spec import RunSpec
from tpu_trainer.contract.findings import Finding
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.task.logbook import LoggedCurve

LIMIT = 2000
"""The most points of a curve; even, so that all of them pair up. A page cannot show more of them side by side."""

LOGGED_LIMIT = 500
"""The most points of a curve that the task logs, and of the learning rate's curve; even, too."""

LOGGED_CURVES = 128
"""The most curves that the task logs, over all attempts."""

KINDS_OF_FINDINGS = 100
"""The most checks whose findings are kept: their number, the first and last step and the last message of each check."""

_RATES = ("examples_per_second", "mfu", "noise_scale")

NOISE_LIMIT = 240
"""The most points of the gradients' noise; even, too."""

P = TypeVar("P", bound="LossPoint | StretchPoint | EvaluationPoint | RatePoint | NoisePoint")


@dataclass(frozen=True)
class NoisePoint:
    """The gradients of `count` steps up to and including `step`: sums of estimates of their noise and of their squared
    length (`throughput.NoiseMeter`)."""

    step: int
    count: int
    noise: float
    signal: float

    def then(self, later: NoisePoint) -> NoisePoint:
        noise, signal = self.noise + later.noise, self.signal + later.signal
        return NoisePoint(later.step, self.count + later.count, noise, signal)


@dataclass(frozen=True)
class Sample:
    """The steps since the last sample. step: steps done. losses: one per step, the newest last, never empty.

    seconds: wall time since the last sample; `split` divides it by phase. examples_per_second: over the steps that
    compiled nothing. mfu: 0..1. noise_scale: in examples. gradient_norms: one per step. learning_rate: of the last
    step. learning_rates: of all steps whose rate is known. None while a number is unknown. noise: of the gradients, if
    it is measured.
    """

    step: int
    losses: tuple[float, ...]
    learning_rate: float
    seconds: float
    split: Mapping[Phase, float]
    examples_per_second: float | None = None
    mfu: float | None = None
    noise_scale: float | None = None
    gradient_norms: tuple[float, ...] = ()
    learning_rates: Mapping[int, float] = field(default_factory=dict)
    noise: NoisePoint | None = None


@dataclass(frozen=True)
class LossPoint:
    """The losses of `count` steps up to and including `step`. broken: how many of them are NaN or infinite. mean, low,
    high: over the finite ones, None if there are none."""

    step: int
    count: int
    mean: float | None
    low: float | None
    high: float | None
    broken: int

    @staticmethod
    def of(step: int, loss: float) -> LossPoint:
        if math.isfinite(loss):
            return LossPoint(step, 1, loss, loss, loss, 0)
        return LossPoint(step, 1, None, None, None, 1)

    def then(self, later: LossPoint) -> LossPoint:
        count, broken = self.count + later.count, self.broken + later.broken
        if self.mean is None or self.low is None or self.high is None:
            return replace(later, count=count, broken=broken)
        if later.mean is None or later.low is None or later.high is None:
            return replace(self, step=later.step, count=count, broken=broken)
        # Computed from the difference, so that two equal means merge into exactly that mean.
        mean = self.mean + (later.mean - self.mean) * ((later.count - later.broken) / (count - broken))
        return LossPoint(later.step, count, mean, min(self.low, later.low), max(self.high, later.high), broken)


@dataclass(frozen=True)
class StretchPoint:
    """`steps` steps up to and including `step`: their seconds in all and per phase, and the last learning rate.

    gradient_norm: the mean length of their gradients before clipping, over the finite ones; None if there are none.
    """

    step: int
    steps: int
    seconds: float
    split: Mapping[Phase, float]
    learning_rate: float
    gradient_norm: float | None = None

    def then(self, later: StretchPoint) -> StretchPoint:
        lengths = [(point.gradient_norm, point.steps) for point in (self, later) if point.gradient_norm is not None]
        return StretchPoint(
            step=later.step,
            steps=self.steps + later.steps,
            seconds=self.seconds + later.seconds,
            split={phase: self.split.get(phase, 0.0) + later.split.get(phase, 0.0) for phase in Phase},
            learning_rate=later.learning_rate,
            gradient_norm=_mean(lengths),
        )


@dataclass(frozen=True)
class RatePoint:
    """The learning rate of one step. Merging keeps the earlier point, so that the curve begins with step 1; the last
    stretch has the last rate."""

    step: int
    rate: float

    def then(self, later: RatePoint) -> RatePoint:
        return self


@dataclass(frozen=True)
class EvaluationPoint:
    """The metrics after `step` steps. Merging keeps the later point: a mean of the two was never measured."""

    step: int
    metrics: Mapping[str, float]

    def then(self, later: EvaluationPoint) -> EvaluationPoint:
        return later


@dataclass(frozen=True)
class FindingSummary:
    """The findings of one check: how many, their first and last step, and the last message."""

    check: str
    first: int
    last: int
    times: int
    message: str


@dataclass(frozen=True)
class FirstLossTime:
    """seconds: from the start of the reporting process until it had read the loss of its first step. compilations:
    programs compiled in that time. compiling: the seconds that these took."""

    seconds: float
    compilations: int
    compiling: float


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt of the run. first: steps done at its start. last: steps done when this was written.

    split: seconds per phase of the reporting replica. outcome: the exit code's name, None while the attempt runs; an
    earlier attempt without one ended without a message. first_loss: when its first loss was read.
    """

    number: int
    first: int
    last: int
    split: Mapping[Phase, float]
    outcome: str | None = None
    first_loss: FirstLossTime | None = None


class Series(Generic[P]):
    """A curve of any length in at most `limit` points: neighbours are merged as it grows.

    Each point stands for `stride` additions, the last one for up to that many, so early and late parts of a run have
    the same resolution.
    """

    def __init__(
        self, merge: Callable[[P, P], P], points: Sequence[P] = (), stride: int = 1, limit: int | None = None
    ) -> None:
        """Starts or continues a series. `merge`: makes one point of an earlier and a later one. `points`, `stride`: a
        series to continue. `limit`: LIMIT by default."""
        self._merge, self._limit = merge, LIMIT if limit is None else limit
        self._points = list(points)
        self.stride = stride
        self._room = 0

    @property
    def points(self) -> tuple[P, ...]:
        return tuple(self._points)

    def forget_after(self, step: int) -> None:
        """Drops the points after `step`, and a merged point that reaches beyond it."""
        self._points = [point for point in self._points if point.step <= step]
        self._room = 0

    def add(self, point: P) -> None:
        if self._room:
            self._points[-1] = self._merge(self._points[-1], point)
            self._room -= 1
            return
        if len(self._points) >= self._limit:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [self._merge(earlier, later) for earlier, later in pairs]
            self.stride *= 2
        self._points.append(point)
        self._room = self.stride - 1


class RunHistory:
    """Collects what happens. `before`: what earlier attempts of the same run recorded, as `as_recorded` returns it."""

    def __init__(self, before: Mapping[str, Any] | None = None) -> None:
        before = before or {"strides": (1, 1, 1)}
        losses, stretches, evaluations = before["strides"]
        self._losses = _series(LossPoint, before.get("losses", ()), losses)
        self._stretches = _series(StretchPoint, before.get("stretches", ()), stretches)
        self._evaluations = _series(EvaluationPoint, before.get("evaluations", ()), evaluations)
        rates = before.get("rates", {"points": (), "stride": 1})
        self._learning_rates = _series(RatePoint, rates["points"], rates["stride"], LOGGED_LIMIT)
        noise = before.get("noise", {"points": (), "stride": 1})
        self._noise = _series(NoisePoint, noise["points"], noise["stride"], NOISE_LIMIT)
        self._warnings = {row["check"]: FindingSummary(**row) for row in before.get("warnings", ())}
        self._attempts = [_parse_attempt(row) for row in before.get("attempts", ())]
        self._rates: dict[str, float] = {name: before[name] for name in _RATES if name in before}
        # Logged values are like losses: one per step, some of them not finite.
        self._logged = {
            str(logged["name"]): _series(LossPoint, logged["points"], logged["stride"], LOGGED_LIMIT)
            for logged in before.get("logged", ())
        }

    @property
    def last_step(self) -> int:
        """Returns the last step of earlier attempts; 0 if there are none."""
        return self._attempts[-1].last if self._attempts else 0

    @property
    def is_whole(self) -> bool:
        """Returns whether the first attempt has begun with the first step, so that the curves have all steps."""
        return bool(self._attempts) and self._attempts[0].first == 0

    @property
    def mean_losses(self) -> tuple[list[float], int]:
        """Returns the mean losses of neighbouring steps, and of how many steps each is; leaves out those without."""
        return [point.mean for point in self._losses.points if point.mean is not None], self._losses.stride

    @property
    def first_metrics(self) -> Mapping[str, float]:
        """Returns the metrics of the first evaluation; none while it is the only one."""
        first, *later = self._evaluations.points or (EvaluationPoint(0, {}),)
        return first.metrics if later else {}

    def forget_after(self, step: int) -> None:
        """Drops the steps after `step`, which a resumed run makes again; warnings and attempts stay."""
        for series in (self._losses, self._stretches, self._evaluations, self._learning_rates, self._noise):
            series.forget_after(step)
        for curve in self._logged.values():
            curve.forget_after(step)

    def add_sample(self, sample: Sample) -> None:
        first = sample.step - len(sample.losses) + 1
        for step, loss in enumerate(sample.losses, first):
            self._losses.add(LossPoint.of(step, loss))
        for step, rate in sorted(sample.learning_rates.items()):
            if math.isfinite(rate):
                self._learning_rates.add(RatePoint(step, rate))
        split = {phase: sample.split.get(phase, 0.0) for phase in Phase}
        norm = _mean([(norm, 1) for norm in sample.gradient_norms if math.isfinite(norm)])
        steps = len(sample.losses)
        self._stretches.add(StretchPoint(sample.step, steps, sample.seconds, split, sample.learning_rate, norm))
        if sample.noise is not None:
            self._noise.add(sample.noise)
        newest = {name: getattr(sample, name) for name in _RATES}
        self._rates |= {name: value for name, value in newest.items() if value is not None}

    def add_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics:
            self._evaluations.add(EvaluationPoint(step, dict(metrics)))

    def add_curves(self, curves: Sequence[LoggedCurve]) -> None:
        for curve in curves:
            if curve.name not in self._logged:
                if len(self._logged) >= LOGGED_CURVES:
                    continue
                self._logged[curve.name] = _series(LossPoint, limit=LOGGED_LIMIT)
            for step, value in curve.points:
                self._logged[curve.name].add(LossPoint.of(step, value))

    def add_finding(self, finding: Finding) -> None:
        before = self._warnings.get(finding.check)
        if before is None and len(self._warnings) >= KINDS_OF_FINDINGS:
            return
        first, times = (finding.step, 0) if before is None else (before.first, before.times)
        warned = FindingSummary(finding.check, first, finding.step, times + 1, finding.message)
        self._warnings[finding.check] = warned

    def as_recorded(self, attempt: AttemptRecord) -> dict[str, Any]:
        """Returns everything up to now, `attempt` being the current one: `recorded` of the file's schema, in
        dataclasses. `strides`: how many additions a point of losses, stretches and evaluations stands for."""
        return {
            "losses": self._losses.points,
            "stretches": self._stretches.points,
            "evaluations": self._evaluations.points,
            "rates": {"stride": self._learning_rates.stride, "points": self._learning_rates.points},
            "noise": {"stride": self._noise.stride, "points": self._noise.points},
            "logged": tuple(
                {"name": name, "stride": series.stride, "points": series.points}
                for name, series in self._logged.items()
            ),
            "warnings": tuple(self._warnings.values()),
            "attempts": (*self._attempts, attempt),
            "strides": (self._losses.stride, self._stretches.stride, self._evaluations.stride),
            **self._rates,
        }


def _series(
    kind: type[P], rows: Iterable[Mapping[str, Any]] = (), stride: int = 1, limit: int | None = None
) -> Series[P]:
    """Returns a series, from the points that an earlier attempt has recorded."""
    return Series(kind.then, [kind(**row) for row in rows], int(stride), limit)  # type: ignore[arg-type]


def _parse_attempt(row: Mapping[str, Any]) -> AttemptRecord:
    first = row.get("first_loss")
    return AttemptRecord(**{**row, "first_loss": FirstLossTime(**first) if first else None})


def _mean(weighted: Sequence[tuple[float, int]]) -> float | None:
    """Returns the mean of (value, weight) pairs; None without any."""
    weights = sum(weight for _, weight in weighted)
    return sum(value * (weight / weights) for value, weight in weighted) if weights else None


def dump_history(
    recorded: Mapping[str, Any],
    spec: RunSpec,
    outcome: Outcome | None,
    environment: Mapping[str, str],
    written: datetime,
) -> bytes:
    """Returns the history file. `outcome`: None during the run. `environment`: the versions of what the run uses.

    Metrics that are not finite are written as Python's NaN and Infinity.
    """
    document = {
        "schema": HISTORY_SCHEMA,
        "uid": spec.job.uid,
        "runSpec": spec.document,
        "written": written.isoformat(),
        "outcome": {"code": outcome.code.name, "message": outcome.message} if outcome else None,
        "environment": environment,
        "recorded": recorded,
    }
    return json.dumps(document, default=asdict).encode()


def load_history(document: bytes, uid: str) -> RunHistory | None:
    """Continues what `dump_history` wrote for the job with this uid; None for anything else."""
    try:
        return RunHistory(_recorded(document, uid))
    except (ValueError, KeyError, TypeError):
        return None


def newest_attempt(document: bytes, uid: str) -> int:
    """Returns the attempt that wrote the history of the job with this uid; 0 for anything else."""
    try:
        return int(_recorded(document, uid)["attempts"][-1]["number"])
    except (ValueError, KeyError, TypeError, IndexError):
        return 0


def _recorded(document: bytes, uid: str) -> dict[str, Any]:
    history = json.loads(document)
    if (history["schema"], history["uid"]) != (HISTORY_SCHEMA, uid):
        raise ValueError("the history of another job or format")
    recorded: dict[str, Any] = history["recorded"]
    return recorded
