"""Rounds of runs in turn, and what may be said of them: medians, and ratios within a round.

A machine's speed drifts by more than what is to be seen here. Two runs of one round are neighbours in time, so their
ratio holds even where both rates do not; and every second round goes backwards, so that nobody is always first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """The median of the rounds, and the least and the greatest of them."""

    median: float
    least: float
    greatest: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))


def interleaved(names: Sequence[str], rounds: int, run: Callable[[str], float]) -> dict[str, list[float]]:
    """What `run` returned for every name, per round."""
    results: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            results[name].append(run(name))
    return results


def ratios(rates: Mapping[str, Sequence[float]], of: str, to: str) -> Spread:
    """How many times as fast `of` was as `to`, in the same round."""
    return Spread.of([a / b for a, b in zip(rates[of], rates[to], strict=True)])
