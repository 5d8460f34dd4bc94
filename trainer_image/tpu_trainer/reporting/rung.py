"""Measures a rung of a ladder, for the gates by which the operator judges it.

The numbers go into the termination message, which Kubernetes keeps with the pod; a report to the operator may be lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tpu_contract.noise_scale import Window, measured_noise
from tpu_trainer.contract.findings import Finding
from tpu_trainer.contract.outcome import finite
from tpu_trainer.reporting.history import NoisePoint
from tpu_trainer.reporting.loss_trend import LossTrend, Mean

MOST_FINDINGS = 24
"""Kinds of findings in the message, which has little room."""

MOST_EVALUATED = 40
"""Names of metrics in the message."""


class RungNumbers:
    def __init__(self, *, measures_noise: bool = True) -> None:
        """`measures_noise`: whether another rung is above, which takes the noise scale from this one."""
        self._findings: Counter[str] = Counter()
        self._noise: list[Window] = []
        self._measures_noise = measures_noise

    def add_finding(self, finding: Finding) -> None:
        self._findings[finding.check] += 1

    def add_noise(self, point: NoisePoint) -> None:
        if self._measures_noise:
            self._noise.append(Window(point.count, point.noise, point.signal))

    def as_json(
        self,
        losses: LossTrend,
        recompilations: int,
        not_finite: int,
        batch: int,
        begins: int = 0,
        rate: float | None = None,
        utilisation: float | None = None,
        unseen: Sequence[str] = (),
        evaluated: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Returns the rung's numbers.

        recompilations: programs that were compiled after the warm-up. not_finite: steps whose loss or gradients were
        not finite. batch: examples per step. begins: the steps made before. rate: examples per second. utilisation: of
        the chips' operations. unseen: checks that found nothing because they could not look. evaluated: metrics of the
        last evaluation; the message has other metrics, too, such as the loss and what the task has logged.
        """
        first, last, rise = losses.first, losses.last, losses.rise
        noise = measured_noise(self._noise, batch)
        return {
            "begins": begins,
            "steps": losses.count + losses.broken,
            "examplesPerSecond": rate,
            "firstLoss": _value(first),
            "firstError": _error(first),
            "lastLoss": _value(last),
            "lastError": _error(last),
            "averaged": first.count if first else 0,
            "errorsFallen": losses.errors_fallen,
            "rise": None if rise is None else asdict(rise),
            "curve": _curve(losses),
            "utilisation": utilisation,
            "noiseScale": None if noise is None else finite(noise.whole.value),
            "recompilations": recompilations,
            "notFinite": max(losses.broken, not_finite),
            "findings": dict(self._findings.most_common(MOST_FINDINGS)),
            "unseen": [*unseen],
            "evaluated": [*evaluated][:MOST_EVALUATED],
        }


def _curve(losses: LossTrend) -> dict[str, list[float]]:
    """Returns the curve in few characters: six digits of the means, two of their errors."""
    points = [*losses.curve]
    return {
        "steps": [step for step, _, _ in points],
        "losses": [float(f"{loss:.6g}") for _, loss, _ in points],
        "errors": [float(f"{error:.2g}") for _, _, error in points],
    }


def _value(mean: Mean | None) -> float | None:
    return None if mean is None else finite(mean.value)


def _error(mean: Mean | None) -> float | None:
    return None if mean is None else finite(mean.error)
