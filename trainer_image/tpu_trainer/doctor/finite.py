"""What happens to a run whose loss, gradients or weights are not finite, as recipe.onNotFinite says.

Decided when the signals are read, and when the parameters are compared. All replicas do both after the same steps, so
they all end together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import count

from tpu_contract.protocol import Check
from tpu_contract.run_spec import NotFinitePolicy
from tpu_trainer.contract.errors import NotFiniteError
from tpu_trainer.contract.findings import FindingReporter, NumericalHealth
from tpu_trainer.gang.exchange import StepResults

MOST_SKIPPED = 100
"""Steps skipped in a row before the run fails, since it no longer learns anything."""

_ADVICE = (
    "lower the learning rate or lengthen the warm-up; clip the gradients; look for a division by zero, the logarithm "
    "of zero, an overflow of float16, or examples that are not finite themselves"
)


@dataclass(frozen=True)
class ModelPart:
    """A part of a model that may not be finite although loss and gradients were; `advice`: why, and what helps."""

    name: str
    advice: str


_OVERFLOW = (
    "the update is the cause. What helps: parameters in float32 or bfloat16 instead of float16, in which Adam's "
    "epsilon is zero; a lower learning rate"
)
WEIGHTS = ModelPart("the weights", _OVERFLOW)
AVERAGE = ModelPart("the averaged weights", _OVERFLOW)
STATISTICS = ModelPart(
    "the running statistics",
    "an evaluation would use a broken model. What helps: look for examples with values that are far too large",
)


class Finiteness:
    """Applies recipe.onNotFinite. `health` goes into every checkpoint, and a run that continues from one starts with
    it: otherwise a run that is restarted often could skip steps forever. `bad`: steps of this attempt that were not
    finite."""

    def __init__(self, policy: NotFinitePolicy, findings: FindingReporter, steps: int, health: NumericalHealth) -> None:
        """`steps`: the steps of the run."""
        self._policy, self._findings = policy, findings
        self._most = min(MOST_SKIPPED, steps)
        self.health = health
        self.bad = 0
        self._first: int | None = None
        self._broken: str | None = None

    def judge_steps(self, first: int, results: StepResults, learning_rate: float) -> None:
        """Judges the results of the steps from `first` on.

        Raises:
            NotFiniteError: in all replicas, if the run must not continue.
        """
        for step, loss, finite in zip(count(first), results.losses, results.finite, strict=False):
            if finite:
                self.health = replace(self.health, in_a_row=0)
                continue
            self.bad += 1
            self._first = step if self._first is None else self._first
            self._judge_step(step, _describe(loss), learning_rate)

    def judge_part(self, step: int, part: ModelPart, first: str) -> None:
        """Handles a part of the model that is not finite after `step`; `first`: the first such tensor. Skipping a step
        would not repair it.

        Raises:
            NotFiniteError: unless the recipe only warns.
        """
        text = f"{part.name} are not finite after step {step}, first in {first}"
        text = f"{text}, although loss and gradients were: {part.advice}"
        if self._policy is not NotFinitePolicy.WARN:
            raise NotFiniteError(f"{text}. No checkpoint holds that step", step)
        self._broken = self._broken or f"{part.name} were not finite after step {step}"
        # Otherwise the reason has been reported.
        if self.health.clean:
            self.health = replace(self.health, clean=False)
            self._findings.report(
                Check.NOT_FINITE, step, f"{text}. recipe.onNotFinite is Warn, so the run continues", cause="weights"
            )

    @property
    def summary(self) -> str:
        """The addition to the run's last line; empty if all was finite."""
        if self._policy is NotFinitePolicy.SKIP and self.health.skipped:
            return f"; {_steps(self.health.skipped)} skipped, because loss or gradients were not finite"
        if not self.bad:
            return f"; WARNING: {self._broken}" if self._broken else ""
        ending = f", and {self._broken}" if self._broken else ""
        bad = _steps(self.bad)
        return f"; WARNING: loss or gradients were not finite in {bad}, first in step {self._first}{ending}"

    def _judge_step(self, step: int, what: str, learning_rate: float) -> None:
        rate = f"learning rate {learning_rate:.6g}"
        if self._policy is NotFinitePolicy.STOP:
            raise NotFiniteError(
                f"{what} since step {step} ({rate}); no checkpoint holds that step. What helps: {_ADVICE}. With "
                "recipe.onNotFinite: Skip such steps are left out, and training continues",
                step,
            )
        if self._policy is NotFinitePolicy.SKIP:
            skipped, in_a_row = self.health.skipped + 1, self.health.in_a_row + 1
            self.health = replace(self.health, skipped=skipped, in_a_row=in_a_row)
            if in_a_row >= self._most:
                raise NotFiniteError(
                    f"the last {in_a_row} steps were all skipped: {what} in step {step} ({rate}). What helps: "
                    f"{_ADVICE}",
                    step,
                )
            times = "" if skipped == 1 else f"; steps skipped so far: {skipped}"
            self._findings.report(
                Check.NOT_FINITE, step, f"step {step} was skipped: {what} ({rate}){times}", severity=float(skipped)
            )
            return
        self.health = replace(self.health, clean=False)
        self._findings.report(
            Check.NOT_FINITE,
            step,
            f"{what} in step {step} ({rate}), and recipe.onNotFinite is Warn: training continues, most likely with "
            f"parameters that are not finite either. What helps: {_ADVICE}",
            severity=float(self.bad),
        )


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _describe(loss: float) -> str:
    return f"the gradients are not finite (loss {loss:.6g})" if math.isfinite(loss) else f"the loss is {loss}"
