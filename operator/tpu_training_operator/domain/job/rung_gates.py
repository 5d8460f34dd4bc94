"""The gates of a rung: whether the job may go on after what the trainer has measured, and why, in numbers.

A gate fails if the trainer did not report the number that it needs: no rung may pass unmeasured.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tpu_training_operator.api.ladder import EvaluationBound, Gates
from tpu_training_operator.api.status import GateResult
from tpu_training_operator.api.words import count
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


def judge(gates: Gates, steps: int, measured: LastWords, pace: Pace, before: Pace | None) -> list[GateResult]:
    """Returns the result of each requested gate, in the order of the fields. `steps`: the steps that the rung should
    make. `before`: the pace of the rung before, if any."""
    return list(_results(gates, steps, measured, pace, before))


def _results(gates: Gates, steps: int, measured: LastWords, pace: Pace, before: Pace | None) -> Iterator[GateResult]:
    # Any gate might have failed in the missing steps.
    if measured.step is not None and measured.step < steps:
        made = f"it made {count(measured.step, 'step')} of {steps} and then ended by itself; its log says why"
        yield GateResult(name="steps", passed=False, message=made)
    if gates.loss_falls:
        yield _loss_falls(measured)
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
    if gates.min_efficiency is not None:
        yield _efficiency(gates.min_efficiency, pace, before)
    if gates.no_findings is not None:
        yield _findings([str(check) for check in gates.no_findings], measured)
    if gates.evaluation is not None:
        yield _evaluation(gates.evaluation, measured)


def _loss_falls(measured: LastWords) -> GateResult:
    first, last, steps = measured.rung.first_loss, measured.rung.last_loss, measured.rung.averaged
    if first is None or last is None or steps is None:
        return GateResult(name="lossFalls", passed=False, message=f"{_NOT_REPORTED} losses, or none of them was finite")
    means = f"the mean of the first and of the last {count(steps, 'step')}" if steps > 1 else "the first and last step"
    verb = "fell" if last < first else "did not fall"
    return GateResult(
        name="lossFalls", passed=last < first, message=f"the loss {verb} from {first:.6g} to {last:.6g} ({means})"
    )


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


_NOT_REPORTED = "the trainer did not report the"
