"""Decides what follows from an evaluation: a run keeps the best checkpoint, lowers the learning rate, or ends early.

Each decision follows one metric. All replicas decide alike, by rank 0's values. Every checkpoint has the state of the
decisions, so a run that continues decides as one that never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tpu_contract.run_spec import Mode, RunSpec
from tpu_trainer.checkpoint.resume import Start
from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.optim.schedule import LearningRateSetter

Values = Mapping[str, float]


@dataclass(frozen=True)
class MetricRule:
    """The direction in which a metric improves. min_delta: what counts as an improvement is larger than this."""

    metric: str
    mode: Mode
    min_delta: float = 0.0

    def is_better(self, value: float, than: float | None) -> bool:
        """Returns whether `value` is an improvement; one that is not finite never is."""
        if not math.isfinite(value):
            return False
        if than is None:
            return True
        return value > than + self.min_delta if self.mode is Mode.MAX else value < than - self.min_delta


@dataclass(frozen=True)
class MetricState:
    """best: the metric's best value so far, None before the first finite one. waited: evaluations since then."""

    best: float | None = None
    waited: int = 0

    def after(self, value: float, rule: MetricRule) -> MetricState:
        return MetricState(value) if rule.is_better(value, self.best) else MetricState(self.best, self.waited + 1)


class EvaluationPolicy:
    """Applies checkpoint.keepBest, recipe.stopEarly and schedule Plateau to a run's evaluations.

    rates: what schedule Plateau lowers. monitors: metrics that the task's hooks follow, too. evaluated: the step of the
    last evaluation in this process, None before the first. metrics: its results.
    """

    def __init__(self, spec: RunSpec, start: Start, rates: LearningRateSetter, monitors: tuple[str, ...] = ()) -> None:
        self._spec, self._start, self._rates = spec, start, rates
        self._rules = dict(metric_rules(spec))
        self._states = dict.fromkeys(self._rules, MetricState())
        self._judged: int | None = None
        self._needed = {rule.metric: field for field, rule in self._rules.items()}
        self._needed |= {metric: "configure_optimizers: monitor" for metric in monitors if metric not in self._needed}
        self.evaluated: int | None = None
        self.metrics: Values = {}

    def check(self, metrics: Values) -> None:
        """Raises UserCodeError: an evaluation does not report a metric that the run follows."""
        for metric, field in self._needed.items():
            if metric not in metrics:
                there = f"it reports {', '.join(metrics)}" if metrics else "it reports none"
                raise UserCodeError(f'{field}: the task\'s evaluation has no metric "{metric}"; {there}')

    def agree(self, metrics: Values, backend: Backend) -> dict[str, float]:
        """Returns rank 0's values of the metrics that the run follows, in every process; a collective if there are any.

        Raises:
            UserCodeError: as `check`.
        """
        self.check(metrics)
        if not self._needed:
            return {}
        first, *_ = backend.gather([metrics[metric] for metric in self._needed])
        return dict(zip(self._needed, first, strict=True))

    def judge(self, step: int, values: Values, metrics: Values) -> bool:
        """Decides what follows from the evaluation after `step`. `values`: from `agree`. `metrics`: this process's.

        Returns whether the evaluation is the best so far, so that it needs a checkpoint.
        """
        self.evaluated, self.metrics = step, metrics
        self._judged = self._examples(step)
        before = self._states
        self._states = {
            field: state.after(values[self._rules[field].metric], self._rules[field]) for field, state in before.items()
        }
        patience, plateau = self._spec.schedule.patience, self._states.get(PLATEAU)
        if plateau is not None and patience is not None and plateau.waited >= patience:
            self._rates.lower()
            self._states[PLATEAU] = MetricState(plateau.best)
        return KEEP_BEST in before and self._states[KEEP_BEST].waited == 0

    def owes(self, step: int) -> bool:
        """Returns whether a run that continues after `step` has still to make the evaluation after it: the run was
        stopped before that evaluation."""
        every = self._spec.evaluate_every_steps
        if every is None or step % every or not 0 < step < self._spec.last_step:
            return False
        return self._judged != self._examples(step) and self.early_end(step) is None

    def early_end(self, step: int) -> str | None:
        """Returns why the training ends after `step`; None if it goes on."""
        stop, state = self._spec.stop_early, self._states.get(STOP_EARLY)
        if stop is None or state is None or state.waited < stop.patience:
            return None
        times = "1 evaluation" if state.waited == 1 else f"{state.waited} evaluations"
        best = "it was never finite" if state.best is None else f"its best value is {state.best:.6g}"
        return (
            f"stopped early after step {step} of {self._spec.train_steps}: {stop.metric} has not improved for {times}, "
            f"{best}"
        )

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps, as JSON."""
        return {
            "judged": self._judged,
            "reduction": self._rates.recipe.reduction,
            "streaks": {field: {**_key(self._rules[field]), **asdict(state)} for field, state in self._states.items()},
        }

    def load(self, kept: Mapping[str, Any] | None) -> None:
        """Loads a checkpoint's state, None if it has none. Ignores the state of another metric."""
        if kept is None:
            return
        self._judged = kept["judged"]
        for field, rule in self._rules.items():
            state = kept["streaks"].get(field)
            if state is not None and _key(rule).items() <= state.items():
                self._states[field] = MetricState(state["best"], int(state["waited"]))

    def _examples(self, step: int) -> int:
        # Examples and not steps, which another slice counts differently.
        return self._start.examples_after(step, self._spec.batch.total)


KEEP_BEST, STOP_EARLY, PLATEAU = "checkpoint.keepBest", "recipe.stopEarly", "recipe.schedule"
"""The fields that make a run follow a metric."""


def reduction_of(kept: Mapping[str, Any] | None, spec: RunSpec) -> float:
    """Returns the factor by which schedule Plateau had multiplied the rate, from the state in a checkpoint."""
    return 1.0 if kept is None or spec.schedule.name != "Plateau" else float(kept["reduction"])


def metric_rules(spec: RunSpec) -> Iterator[tuple[str, MetricRule]]:
    """Yields the fields that make the run follow a metric, and the metric's rule."""
    if spec.checkpoint is not None and (best := spec.checkpoint.keep_best) is not None:
        yield KEEP_BEST, MetricRule(best.metric, best.mode)
    if (stop := spec.stop_early) is not None:
        yield STOP_EARLY, MetricRule(stop.metric, stop.mode, stop.min_delta or 0.0)
    if spec.schedule.metric is not None and spec.schedule.mode is not None:
        yield PLATEAU, MetricRule(spec.schedule.metric, spec.schedule.mode)


def _key(rule: MetricRule) -> dict[str, str]:
    return {"metric": rule.metric, "mode": rule.mode}
