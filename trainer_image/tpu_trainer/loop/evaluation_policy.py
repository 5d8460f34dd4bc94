"""What a run does because of its evaluations: it keeps the best checkpoint, lowers the rate, or ends early.

Each of these follows one metric. All replicas decide alike: the values are rank 0's, and what was decided before is in
every checkpoint, so a run that continues decides as one that never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tpu_trainer.checkpoint.resume import Start
from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.contract.spec import Mode, RunSpec
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.optim.schedule import DROP, LearningRateSetter

SMALLEST_REDUCTION = 1e-8
"""Of the rate by schedule Plateau: further ones would change nothing, and a rate of 0 is another program for XLA."""

Values = Mapping[str, float]


@dataclass(frozen=True)
class MetricRule:
    """A metric, which values of it are better, and by how much more than `min_delta`."""

    metric: str
    mode: Mode
    min_delta: float = 0.0

    def is_better(self, value: float, than: float | None) -> bool:
        """A value that is not finite is never better."""
        if not math.isfinite(value):
            return False
        if than is None:
            return True
        return value > than + self.min_delta if self.mode is Mode.MAX else value < than - self.min_delta


@dataclass(frozen=True)
class MetricState:
    """`best`: the best value so far, None before the first finite one; `waited`: evaluations since then."""

    best: float | None = None
    waited: int = 0

    def after(self, value: float, watch: MetricRule) -> MetricState:
        return MetricState(value) if watch.is_better(value, self.best) else MetricState(self.best, self.waited + 1)


class EvaluationPolicy:
    """Of one run. `monitors`: metrics that the task's hooks follow besides. `rates`: what schedule Plateau lowers.

    `evaluated`: the step that was evaluated last in this process, None before the first; `metrics`: its results.
    """

    def __init__(self, spec: RunSpec, start: Start, rates: LearningRateSetter, monitors: tuple[str, ...] = ()) -> None:
        self._spec, self._start, self._rates = spec, start, rates
        self._watches = dict(_watches(spec))
        self._streaks = dict.fromkeys(self._watches, MetricState())
        self._judged: int | None = None
        self._needed = {watch.metric: field for field, watch in self._watches.items()}
        self._needed |= {metric: "configure_optimizers: monitor" for metric in monitors if metric not in self._needed}
        self.evaluated: int | None = None
        self.metrics: Values = {}

    def check(self, metrics: Values) -> None:
        """Raises UserCodeError if a metric that the run follows is not among those of an evaluation."""
        for metric, field in self._needed.items():
            if metric not in metrics:
                there = f"it reports {', '.join(metrics)}" if metrics else "it reports none"
                raise UserCodeError(f'{field}: the task\'s evaluation has no metric "{metric}"; {there}')

    def agreed(self, metrics: Values, backend: Backend) -> dict[str, float]:
        """Rank 0's values of the metrics that the run follows, in every process; a collective if there are any.

        Raises:
            UserCodeError: as `check`.
        """
        self.check(metrics)
        if not self._needed:
            return {}
        first, *_ = backend.gather([metrics[metric] for metric in self._needed])
        return dict(zip(self._needed, first, strict=True))

    def judge(self, step: int, values: Values, metrics: Values) -> bool:
        """Takes the evaluation after `step` into account: `values` as agreed, `metrics` all of this process.

        Returns whether it is the best so far, so that it needs a checkpoint.
        """
        self.evaluated, self.metrics = step, metrics
        self._judged = self._examples(step)
        before = self._streaks
        self._streaks = {
            field: streak.after(values[self._watches[field].metric], self._watches[field])
            for field, streak in before.items()
        }
        self._lower_rate()
        return KEEP_BEST in before and self._streaks[KEEP_BEST].waited == 0

    def owes(self, step: int) -> bool:
        """Whether a run that continues with `step` steps done has the evaluation after them still to make: it was
        stopped, or its checkpoint taken, before that evaluation was judged."""
        every = self._spec.evaluate_every_steps
        if not self._needed or every is None or step % every or not 0 < step < self._spec.last_step:
            return False
        return self._judged != self._examples(step) and self.early_end(step) is None

    def early_end(self, step: int) -> str | None:
        """Why the training ends after `step`, None if it goes on."""
        stop, streak = self._spec.stop_early, self._streaks.get(STOP_EARLY)
        if stop is None or streak is None or streak.waited < stop.patience:
            return None
        times = "1 evaluation" if streak.waited == 1 else f"{streak.waited} evaluations"
        best = "it was never finite" if streak.best is None else f"its best value is {streak.best:.6g}"
        return (
            f"stopped early after step {step} of {self._spec.train_steps}: {stop.metric} has not improved for {times}, "
            f"{best}"
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        return {
            "judged": self._judged,
            "reduction": self._rates.reduction,
            "streaks": {field: {**_key(self._watches[field]), **asdict(each)} for field, each in self._streaks.items()},
        }

    def load(self, kept: Mapping[str, Any] | None) -> None:
        """None: a checkpoint without it. What was kept for another metric counts for nothing."""
        if kept is None:
            return
        self._judged = kept["judged"]
        self._rates.reduction = reduction_of(kept, self._spec)
        for field, watch in self._watches.items():
            streak = kept["streaks"].get(field)
            if streak is not None and _key(watch).items() <= streak.items():
                self._streaks[field] = MetricState(streak["best"], int(streak["waited"]))

    def _lower_rate(self) -> None:
        schedule, streak = self._spec.schedule, self._streaks.get(PLATEAU)
        if streak is None or schedule.patience is None or streak.waited < schedule.patience:
            return
        reduction = self._rates.reduction * (DROP if schedule.factor is None else schedule.factor)
        self._rates.reduction = max(reduction, SMALLEST_REDUCTION)
        self._streaks[PLATEAU] = MetricState(streak.best)

    def _examples(self, step: int) -> int:
        # Examples and not steps, which another slice counts differently.
        return self._start.examples_after(step, self._spec.batch.total)


KEEP_BEST, STOP_EARLY, PLATEAU = "checkpoint.keepBest", "recipe.stopEarly", "recipe.schedule"
"""What follows a metric, by the field that asks for it."""


def reduction_of(kept: Mapping[str, Any] | None, spec: RunSpec) -> float:
    """By what schedule Plateau had multiplied the rate, from the state in a checkpoint."""
    return 1.0 if kept is None or spec.schedule.name != "Plateau" else float(kept["reduction"])


def _watches(spec: RunSpec) -> Iterator[tuple[str, MetricRule]]:
    if spec.checkpoint is not None and (best := spec.checkpoint.keep_best) is not None:
        yield KEEP_BEST, MetricRule(best.metric, best.mode)
    if (stop := spec.stop_early) is not None:
        yield STOP_EARLY, MetricRule(stop.metric, stop.mode, stop.min_delta or 0.0)
    if spec.schedule.metric is not None and spec.schedule.mode is not None:
        yield PLATEAU, MetricRule(spec.schedule.metric, spec.schedule.mode)


def _key(watch: MetricRule) -> dict[str, str]:
    return {"metric": watch.metric, "mode": watch.mode}
