"""The gates of a rung: whether the job may go on after what the trainer has measured, and why, in numbers.

A gate fails if the trainer did not report the number that it needs: no rung may pass unmeasured.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tpu_contract.protocol import LOSS_FALLS
from tpu_training_operator.api.ladder import FEWEST_STEPS, EvaluationBound, Gates
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.status import GateResult
from tpu_training_operator.api.words import count
from tpu_training_operator.domain.job.rung_losses import Difference
from tpu_training_operator.domain.job.trainer_report import LastWords


@dataclass(frozen=True)
class Pace:
    """How fast a rung trains, on how many chips."""

    examples_per_second: float | None
    chips: int

    @property
    def per_chip(self) -> float | None:
        """Examples per second per chip; None if the rate is not known or negative."""
        rate = self.examples_per_second
        return None if rate is None or rate < 0 else rate / self.chips

    def efficiency(self, before: "Pace | None") -> float | None:
        """Returns examples per second per chip, divided by those of the rung before; None if either is not known."""
        rate, rate_before = self.per_chip, before.per_chip if before else None
        return rate / rate_before if rate is not None and rate_before is not None and rate_before > 0 else None


def judge(
    gates: Gates,
    steps: int,
    measured: LastWords,
    pace: Pace,
    before: Pace | None,
    difference: Difference | None = None,
) -> list[GateResult]:
    """Returns the result of each requested gate, in the order of the fields. `steps`: the steps that the rung should
    make. `before`: the pace of the rung before, if any; `difference`: between the losses of the two."""
    return list(_results(gates, steps, measured, pace, before, difference))


def _results(
    gates: Gates, steps: int, measured: LastWords, pace: Pace, before: Pace | None, difference: Difference | None
) -> Iterator[GateResult]:
    # Any gate might have failed in the missing steps.
    if measured.step is not None and measured.step < steps:
        made = f"it made {count(measured.step, 'step')} of {steps} and then ended by itself; its log says why"
        yield GateResult(name="steps", passed=False, message=made)
    continues = measured.rung.begins > 0
    if gates.loss_falls:
        yield _not_judged("lossFalls", measured) if continues else _loss_falls(measured, steps)
    if gates.finite:
        yield _none_of(
            "finite",
            measured.rung.not_finite,
            "step",
            "whose loss or gradients were not finite",
            "all steps were finite",
        )
    if gates.no_recompilation:
        yield _none_of(
            "noRecompilation",
            measured.rung.recompilations,
            "program",
            "compiled after the warm-up",
            "no program was compiled after the warm-up",
        )
    if gates.loss_follows is not None:
        tolerance = float(gates.loss_follows.tolerance)
        yield _not_judged("lossFollows", measured) if continues else _loss_follows(tolerance, difference)
    speeds = _speeds(gates, measured, pace, before)
    if continues and steps < FEWEST_STEPS:
        few = f"not judged: this attempt makes {count(steps, 'step')} after step {measured.rung.begins}, too few for it"
        speeds = (replace(speed, passed=True, message=few) for speed in speeds)
    yield from speeds
    if gates.no_findings is not None:
        yield _findings([str(check) for check in gates.no_findings], measured)
    if gates.evaluation is not None:
        yield _evaluation(gates.evaluation, measured)


def _speeds(gates: Gates, measured: LastWords, pace: Pace, before: Pace | None) -> Iterator[GateResult]:
    if gates.min_efficiency is not None and float(gates.min_efficiency) > 0:
        yield _efficiency(gates.min_efficiency, pace, before)
    if gates.min_examples_per_second_per_chip is not None:
        least = gates.min_examples_per_second_per_chip
        yield _at_least("minExamplesPerSecondPerChip", "examples/s per chip", pace.per_chip, least)
    if gates.min_utilisation is not None:
        yield _at_least("minUtilisation", "utilisation", measured.rung.utilisation, gates.min_utilisation)


def _loss_falls(measured: LastWords, steps: int) -> GateResult:
    rung = measured.rung
    errors, rise = rung.errors_fallen, rung.rise
    if errors is None or rung.first_loss is None or rung.last_loss is None:
        return GateResult(name="lossFalls", passed=False, message=f"{_NOT_REPORTED} losses, or none of them was finite")
    if rise is not None:
        words = (
            f"the loss rose from {rise.start:.4g} to {rise.peak:.4g} at step {rise.step}, above its first value, after"
            " the warm-up; lower the learning rate of this slice (recipe.scaling.learningRate), or warm up for longer"
        )
        return GateResult(name="lossFalls", passed=False, message=words)
    means = (
        f"from {_with_error(rung.first_loss, rung.first_error)} to {_with_error(rung.last_loss, rung.last_error)}"
        f" (means of {count(rung.averaged or 1, 'step')}; all losses in order: {errors:.1f} standard errors)"
    )
    if errors > LOSS_FALLS:
        return GateResult(name="lossFalls", passed=True, message=f"the loss fell {means}")
    if errors <= 0:
        return GateResult(name="lossFalls", passed=False, message=f"the loss did not fall {means}")
    # The test sees a trend that goes on with the power 3/2 of the steps; 1.64 leaves a chance of 5 % to miss it.
    enough = math.ceil(steps * ((LOSS_FALLS + 1.64) / max(errors, _LEAST_TREND)) ** (2 / 3))
    words = f"cannot tell whether the loss falls: {means}, {LOSS_FALLS} are required"
    return GateResult(
        name="lossFalls", passed=False, message=f"{words}; {enough - steps} more steps would tell (steps: {enough})"
    )


def _loss_follows(tolerance: float, difference: Difference | None) -> GateResult:
    if difference is None:
        words = f"{_NOT_REPORTED} losses by examples of this rung or of the one before"
        return GateResult(name="lossFollows", passed=False, message=words)
    here, before = (_with_error(*mean) for mean in (difference.here, difference.before))
    words = (
        f"loss {here}, and {before} on the rung before (both between {difference.first} and {difference.last}"
        f" examples): {difference.excess:+.3g}, tolerated are {tolerance:g} and {difference.noise:.2g} for the noise"
    )
    return GateResult(name="lossFollows", passed=difference.excess <= tolerance + difference.noise, message=words)


def _not_judged(gate: str, measured: LastWords) -> GateResult:
    """Returns the result for the job itself if it does not begin with its first step."""
    words = f"not judged: this attempt continues at step {measured.rung.begins}, where the loss has fallen already"
    return GateResult(name=gate, passed=True, message=words)


def _at_least(gate: str, noun: str, value: float | None, least: str) -> GateResult:
    if value is None:
        return GateResult(name=gate, passed=False, message=f"{_NOT_REPORTED} {noun}")
    return GateResult(name=gate, passed=value >= float(least), message=f"{noun} {value:.4g}, at least {least} required")


def _with_error(value: float, error: float | None) -> str:
    return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.1g}"


def _none_of(gate: str, number: int | None, noun: str, which: str, none: str) -> GateResult:
    if number is None:
        return GateResult(name=gate, passed=False, message=f"{_NOT_REPORTED} number of {noun}s {which}")
    return GateResult(name=gate, passed=number == 0, message=f"{count(number, noun)} {which}" if number else none)


def _efficiency(least: str, pace: Pace, before: Pace | None) -> GateResult:
    efficiency = pace.efficiency(before)
    if efficiency is None or before is None:
        return GateResult(
            name="minEfficiency",
            passed=False,
            message=f"{_NOT_REPORTED} examples per second of this rung or of the one before",
        )
    words = (
        f"efficiency {efficiency:.3g}, at least {least} required: {pace.per_chip:.4g} examples/s per chip on"
        f" {count(pace.chips, 'chip')}, {before.per_chip:.4g} on {before.chips} before"
    )
    return GateResult(name="minEfficiency", passed=efficiency >= float(least), message=words)


def _findings(unwanted: list[str], measured: LastWords) -> GateResult:
    findings = measured.rung.findings
    if findings is None:
        return GateResult(name="noFindings", passed=False, message=f"{_NOT_REPORTED} findings of its doctor")
    if unseen := [check for check in unwanted if check in measured.rung.unseen]:
        words = f"the doctor cannot look for {' or '.join(unseen)} with this backend or trainer; leave it out"
        return GateResult(name="noFindings", passed=False, message=words)
    reported = [f"{check} ({findings[check]})" for check in unwanted if findings.get(check)]
    if reported:
        return GateResult(
            name="noFindings",
            passed=False,
            message=f"the doctor found {', '.join(reported)}; the rung's log says what to do",
        )
    return GateResult(name="noFindings", passed=True, message=f"no {' or '.join(unwanted)}")


def _evaluation(bound: EvaluationBound, measured: LastWords) -> GateResult:
    metrics = {
        name: value
        for name, value in (measured.metrics or {}).items()
        if name in measured.rung.evaluated and value is not None and math.isfinite(value)
    }
    value = metrics.get(bound.metric)
    if value is None:
        known = f"it has {', '.join(list(metrics)[:8])}" if metrics else "it has no metrics"
        return GateResult(
            name="evaluation", passed=False, message=f"the evaluation has no finite metric {bound.metric!r}; {known}"
        )
    parts = [f"at least {bound.min}"] if bound.min is not None else []
    parts += [f"at most {bound.max}"] if bound.max is not None else []
    passes = (bound.min is None or value >= float(bound.min)) and (bound.max is None or value <= float(bound.max))
    return GateResult(
        name="evaluation", passed=passes, message=f"{bound.metric} {value:.6g}, {' and '.join(parts)} required"
    )


_LEAST_TREND = 0.5
"""A smaller trend is as good as none, and says nothing of the steps that would show one."""

_NOT_REPORTED = "the trainer did not report the"
