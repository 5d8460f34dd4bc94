"""Measures a rung of a ladder, for the gates by which the operator judges it.

The numbers go into the termination message, which Kubernetes keeps with the pod; a report to the operator may be lost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tpu_trainer.contract.findings import Finding
from tpu_trainer.contract.outcome import finite
from tpu_trainer.reporting.history import Sample

SHARE = 4
"""The losses are divided into this many parts, and the means of the first and the last are compared: the loss of a
single step is mostly noise."""

MOST_FINDINGS = 24
"""Kinds of findings in the message, which has little room."""

MOST_EVALUATED = 40
"""Names of metrics in the message."""


class RungNumbers:
    def __init__(self) -> None:
        self._losses: list[float] = []
        self._findings: Counter[str] = Counter()

    def add_sample(self, sample: Sample) -> None:
        self._losses += sample.losses

    def add_finding(self, finding: Finding) -> None:
        self._findings[finding.check] += 1

    def as_json(
        self, recompilations: int, not_finite: int, unseen: Sequence[str] = (), evaluated: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Returns the rung's numbers.

        recompilations: programs that were compiled after the warm-up. not_finite: steps whose loss or gradients were
        not finite. unseen: checks that found nothing because they could not look. evaluated: metrics of the last
        evaluation; the message has other metrics, too, such as the loss and what the task has logged.
        """
        part = math.ceil(len(self._losses) / SHARE)
        broken = sum(not math.isfinite(loss) for loss in self._losses)
        return {
            "firstLoss": finite(_mean(self._losses[:part])),
            "lastLoss": finite(_mean(self._losses[len(self._losses) - part :])),
            "averaged": part,
            "recompilations": recompilations,
            "notFinite": max(broken, not_finite),
            "findings": dict(self._findings.most_common(MOST_FINDINGS)),
            "unseen": [*unseen],
            "evaluated": [*evaluated][:MOST_EVALUATED],
        }


def _mean(losses: Sequence[float]) -> float | None:
    """Returns the mean of the finite losses; None if there are none."""
    known = [loss for loss in losses if math.isfinite(loss)]
    return math.fsum(known) / len(known) if known else None
