"""What the trainer warns of, each cause once: a warning that repeats every minute is soon ignored."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

from tpu_contract.protocol import Check

WORSE = 10.0
"""A cause is reported again when it has become this many times worse."""


@dataclass(frozen=True)
class Finding:
    """A warning. `check`: a Check, or the name of another part of the trainer; `step`: steps done when it was found;
    `message`: the observation, in numbers, and what to do about it."""

    check: str
    step: int
    message: str


@dataclass(frozen=True)
class NumericalHealth:
    """What a checkpoint records about losses, gradients and weights that were not finite.

    clean: none of them went into its weights. skipped: steps left out because of them, over the life of the job;
    in_a_row: how many of the last steps were left out.
    """

    clean: bool = True
    skipped: int = 0
    in_a_row: int = 0


class FindingReporter:
    """Passes findings on to `tell`, each cause once until it becomes much worse."""

    def __init__(self, tell: Callable[[Finding], None]) -> None:
        self._tell = tell
        self._severities: dict[tuple[str, Hashable], float] = {}

    def report(self, check: Check, step: int, message: str, *, cause: Hashable = None, severity: float = 1.0) -> None:
        """Reports the first finding of a check and cause, and later ones only if `severity` is WORSE times as high."""
        reported = self._severities.get((check, cause))
        if reported is None or severity >= WORSE * reported:
            self._severities[check, cause] = severity
            self._tell(Finding(check, step, message))


def ranges(numbers: Sequence[int]) -> str:
    """Formats numbers as "3" or "0-2, 5": neighbours are joined, so that 256 of them fit on a line."""
    runs: list[str] = []
    for _, pairs in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(runs)
