"""The losses of a rung by the examples that it has seen, and how far those of two rungs are apart."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tpu_training_operator.api.status import RungLoss
from tpu_training_operator.api.words import number_text, read_number
from tpu_training_operator.domain.job.trainer_report import ReportedCurve

FEWEST_FOLLOWED = 40
"""The fewest steps in which a rung can follow the one before. A momentum of 0.9 makes the loss lag ten steps, which are
more examples on the larger slice."""

_SHARE = 0.25
_CERTAIN = 2.33
"""Standard errors by which noise alone lifts one of 100 differences, or fewer."""


@dataclass(frozen=True)
class Difference:
    """The mean losses of two rungs between the same numbers of examples, with the standard error of each."""

    first: int
    last: int
    here: tuple[float, float]
    before: tuple[float, float]

    @property
    def excess(self) -> float:
        return self.here[0] - self.before[0]

    @property
    def noise(self) -> float:
        """Returns the largest excess that noise alone makes, with an error of 1 %."""
        return _CERTAIN * math.hypot(self.here[1], self.before[1])


def loss_points(curve: ReportedCurve | None, batch: int) -> list[RungLoss]:
    """Returns the curve for the status; an empty one for a curve that is not in order."""
    if curve is None or not len(curve.steps) == len(curve.losses) == len(curve.errors):
        return []
    if not all(earlier < later for earlier, later in pairwise((0, *curve.steps))):
        return []
    # The loss of a step is that of the weights before it: a step counts as the middle of its batch.
    numbers = zip(curve.steps, map(number_text, curve.losses), map(number_text, curve.errors), strict=True)
    return [
        RungLoss(examples=step * batch - batch // 2, loss=loss, error=error)
        for step, loss, error in numbers
        if loss and error
    ]


def compare(here: Sequence[RungLoss], before: Sequence[RungLoss]) -> Difference | None:
    """Returns how the losses differ in the last quarter of the examples that both rungs have seen; None if one of them
    has no curve."""
    if not here or not before:
        return None
    last = min(here[-1].examples, before[-1].examples)
    first = math.floor(last * (1 - _SHARE))
    means = _mean(here, first, last), _mean(before, first, last)
    return None if means[0] is None or means[1] is None else Difference(first, last, means[0], means[1])


def _mean(points: Sequence[RungLoss], first: int, last: int) -> tuple[float, float] | None:
    """Returns the mean loss between these numbers of examples, and its standard error. A point that is partly inside
    counts with that part."""
    weighed = total = squares = 0.0
    begin = 0
    for point in points:
        weight = min(point.examples, last) - max(begin, first)
        loss, error = read_number(point.loss), read_number(point.error)
        if weight > 0 and loss is not None and error is not None:
            weighed, total, squares = weighed + weight, total + weight * loss, squares + (weight * error) ** 2
        begin = point.examples
    return (total / weighed, math.sqrt(squares) / weighed) if weighed else None
