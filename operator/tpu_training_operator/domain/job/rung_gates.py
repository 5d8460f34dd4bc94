"""The gates of a rung: whether the job may go on after what the trainer has measured, and why, in numbers.

A gate fails if the trainer did not report the number that it needs: no rung may pass unmeasured.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tpu_training_operator.api.ladder import EvaluationBound, Gates
from tpu_training_operator.api.status import GateResult
from tpu_training_operator.api.text import plain
from tpu_training_operator.api.words import count

_LARGEST_COUNT = 2**53
_LONGEST_NAME = 128


@dataclass(frozen=True)
class Measurement:
    """The numbers in a rung's termination message; None for one that is missing or malformed.

    `first_loss`, `last_loss`: means of the first and the last `averaged` steps, None if no loss there was finite.
    `findings`: how often each of the doctor's checks found something. `unseen`: checks that could not run.
    `evaluated`: which of the metrics are the evaluation's; the others are the last loss and what the task has logged.
    """

    steps: int | None = None
    examples_per_second: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    averaged: int | None = None
    recompilations: int | None = None
    not_finite: int | None = None
    findings: Mapping[str, int] | None = None
    unseen: frozenset[str] = frozenset()
    evaluated: frozenset[str] = frozenset()
    metrics: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def read(message: Mapping[str, Any] | None) -> "Measurement":
        fields = message or {}
        part = fields.get("rung")
        rung: Mapping[str, Any] = part if isinstance(part, dict) else {}
        findings = rung.get("findings")
        return Measurement(
            steps=_count(fields.get("step")),
            examples_per_second=_number(fields.get("examplesPerSecond")),
            first_loss=_number(rung.get("firstLoss")),
            last_loss=_number(rung.get("lastLoss")),
            averaged=_count(rung.get("averaged")),
            recompilations=_count(rung.get("recompilations")),
            not_finite=_count(rung.get("notFinite")),
            findings=dict(_read_items(findings, _count)) if isinstance(findings, dict) else None,
            unseen=_names(rung.get("unseen")),
            evaluated=_names(rung.get("evaluated")),
            metrics=dict(_read_items(fields.get("metrics"), _number)),
        )


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


def judge(gates: Gates, steps: int, measured: Measurement, pace: Pace, before: Pace | None) -> list[GateResult]:
    """Returns the result of each requested gate, in the order of the fields. `steps`: the steps that the rung should
    make. `before`: the pace of the rung before, if any."""
    return list(_results(gates, steps, measured, pace, before))


def _results(gates: Gates, steps: int, measured: Measurement, pace: Pace, before: Pace | None) -> Iterator[GateResult]:
    # Any gate might have failed in the missing steps.
    if measured.steps is not None and measured.steps < steps:
        made = f"it made {count(measured.steps, 'step')} of {steps} and then ended by itself; its log says why"
        yield GateResult(name="steps", passed=False, message=made)
    if gates.loss_falls:
        yield _loss_falls(measured)
    if gates.finite:
        yield _none_of(
            "finite", measured.not_finite, "step", "whose loss or gradients were not finite", "all steps were finite"
        )
    if gates.no_recompilation:
        yield _none_of(
            "noRecompilation",
            measured.recompilations,
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


def _loss_falls(measured: Measurement) -> GateResult:
    first, last, steps = measured.first_loss, measured.last_loss, measured.averaged
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


def _findings(unwanted: list[str], measured: Measurement) -> GateResult:
    findings = measured.findings
    if findings is None:
        return GateResult(name="noFindings", passed=False, message=f"{_NOT_REPORTED} findings of its doctor")
    if unseen := [check for check in unwanted if check in measured.unseen]:
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


def _evaluation(bound: EvaluationBound, measured: Measurement) -> GateResult:
    metrics = {name: value for name, value in measured.metrics.items() if name in measured.evaluated}
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


def _count(value: Any) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST_COUNT
    return value if is_count else None


def _number(value: Any) -> float | None:
    """Returns a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _names(value: Any) -> frozenset[str]:
    names = value if isinstance(value, list) else []
    return frozenset(plain(name)[:_LONGEST_NAME] for name in names if isinstance(name, str))


def _read_items(mapping: Any, read: Any) -> Iterator[tuple[str, Any]]:
    for name, value in mapping.items() if isinstance(mapping, dict) else ():
        number = read(value)
        if number is not None:
            yield plain(str(name))[:_LONGEST_NAME], number
