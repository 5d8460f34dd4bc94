"""Rounds of alternating runs, and their statistics: medians, and ratios within a round.

A machine's speed drifts by more than the differences measured here. Two runs of one round are close in time, so their
ratio holds even where their rates do not. Every second round is in reverse order, so that no loop is always first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.trainer.reports import Pace


@dataclass(frozen=True)
class Spread:
    """The median, minimum and maximum of the rounds."""

    median: float
    least: float
    greatest: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))


def interleaved(names: Sequence[str], rounds: int, run: Callable[[str], Pace]) -> dict[str, list[Pace]]:
    """Returns the results of `run` for each name, per round."""
    results: dict[str, list[Pace]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            results[name].append(run(name))
    return results


def ratios(rates: Mapping[str, Sequence[float]], of: str, to: str) -> Spread:
    """Returns how many times as large `of` was as `to`, within each round."""
    return Spread.of([a / b for a, b in zip(rates[of], rates[to], strict=True)])
