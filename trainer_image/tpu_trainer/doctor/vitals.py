"""Who keeps the others waiting: decided from one row of numbers per process, gathered at a checkup. Pure.

A synchronous step lasts as long as its slowest host's work, and the others spend the difference waiting; so the
replicas' step times are all alike and only their own work tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from statistics import median_low

SHORTEST_SECONDS = 2.0
"""A shorter interval says more about the operating system's scheduling than about the host."""

SLOW_FACTOR, SLOW_SHARE = 1.5, 0.05
"""A straggler's work is longer than the others' by this factor, and what it costs is this part of the time."""

INPUT_SHARE = 0.1
"""A run that waits longer than this part of its time for data is bound by its input."""


@dataclass(frozen=True)
class Vitals:
    """One process since the last checkup that counted. Seconds: `work` is the host's own, waiting for `input`
    included; `total` is work and waiting for the device or the peers.

    compilations: in its steps, after the warm-up. digest: of its parameters, in two halves.
    """

    host: int
    input: float
    work: float
    total: float
    compilations: int
    digest: tuple[int, int] = (0, 0)

    def row(self) -> list[float]:
        """For the gather; whole numbers are below 2**24, so float32 holds them exactly."""
        *numbers, digest = astuple(self)
        return [*numbers, *digest]

    @staticmethod
    def of(row: Sequence[float]) -> Vitals:
        host, waited, work, total, compilations, high, low = row
        return Vitals(int(host), waited, work, total, int(compilations), (int(high), int(low)))


def long_enough(vitals: Sequence[Vitals]) -> bool:
    return max(one.total for one in vitals) >= SHORTEST_SECONDS


@dataclass(frozen=True)
class Straggler:
    """`factor`: its work against the median of the others'; `share`: the part of the time that the others lose."""

    host: int
    factor: float
    share: float
    input_bound: bool


def straggler(vitals: Sequence[Vitals]) -> Straggler | None:
    """The host of the slowest process, if it is so much slower than the others that it is worth looking at."""
    if len({one.host for one in vitals}) < 2:
        return None
    slowest = max(vitals, key=lambda one: one.work)
    others = median_low(one.work for one in vitals if one.host != slowest.host)
    lost = slowest.work - others
    if slowest.work <= SLOW_FACTOR * others or lost <= SLOW_SHARE * slowest.total:
        return None
    factor = slowest.work / max(others, 1e-9)
    return Straggler(slowest.host, factor, lost / slowest.total, slowest.input > 0.5 * slowest.work)


def input_share(vitals: Sequence[Vitals]) -> tuple[int, float]:
    """The host that waits longest for its input, and which part of its time: the others wait for that host."""
    worst = max(vitals, key=lambda one: one.input / max(one.total, 1e-9))
    return worst.host, worst.input / max(worst.total, 1e-9)
