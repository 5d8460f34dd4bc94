"""Which host keeps the others waiting, decided from one row of numbers per process.

A synchronous step lasts as long as its slowest host's work, and the others wait for the difference. So step times are
alike on all replicas, and only their own work distinguishes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from statistics import median_low

from tpu_contract.protocol import Check
from tpu_trainer.contract.findings import FindingReporter

SHORTEST_SECONDS = 2.0
"""A shorter interval says more about the operating system's scheduling than about the host."""

SLOW_FACTOR, SLOW_SHARE = 1.5, 0.05
"""A slow host's work takes this many times as long as the others', and costs at least this part of the time."""

INPUT_SHARE = 0.1
"""A run that waits longer than this part of its time for data is bound by its input."""


@dataclass(frozen=True)
class Vitals:
    """One process since the last checkup that was long enough. Seconds: `work` is the host's own, including the wait
    for `input`; `total` adds the wait for the device and the peers.

    compilations: in its steps, after the warm-up. digest: of its parameters.
    """

    host: int
    input: float
    work: float
    total: float
    compilations: int
    digest: int = 0

    def row(self) -> list[float]:
        """Returns the row to gather; integers are below 2**24, so float32 holds them exactly."""
        return [*astuple(self)]

    @staticmethod
    def of(row: Sequence[float]) -> Vitals:
        host, waited, work, total, compilations, digest = row
        return Vitals(int(host), waited, work, total, int(compilations), int(digest))


@dataclass(frozen=True)
class SlowHost:
    """A host that others wait for. `factor`: its work over the median of the others'; `share`: the part of the time
    that the others lose."""

    host: int
    factor: float
    share: float
    input_bound: bool


class SlowHostDetector:
    """Reports a host that is slow in two intervals in a row: any host is slow once."""

    def __init__(self, findings: FindingReporter) -> None:
        self._findings = findings
        self._suspect: SlowHost | None = None
        self._judged = 0

    def judge(self, step: int, vitals: Sequence[Vitals], *, last: bool = False) -> bool:
        """Judges an interval; returns False if it was too short, and so continues until the next checkup. `last`: there
        is no next one; if it is also the first, it counts even if short, and one slow interval is enough."""
        is_short = max(process.total for process in vitals) < SHORTEST_SECONDS
        if is_short and not (last and self._judged == 0):
            if last and self._judged == 1 and self._suspect is not None:
                self._report(step, self._suspect)
            return False
        self._judged += 1
        host, share = input_share(vitals)
        if share > INPUT_SHARE:
            self._findings.report(Check.INPUT_BOUND, step, _INPUT_BOUND.format(share=share, host=host), severity=share)
        slow = find_slow_host(vitals)
        again = slow is not None and self._suspect is not None and slow.host == self._suspect.host
        if slow is not None and (again or (last and self._judged == 1)):
            self._report(step, slow)
        self._suspect = slow
        return True

    def _report(self, step: int, slow: SlowHost) -> None:
        reason = _SLOW_INPUT if slow.input_bound else _SLOW_WORK
        message = _STRAGGLER.format(host=slow.host, factor=slow.factor, share=slow.share) + reason
        self._findings.report(Check.STRAGGLER_HOST, step, message, cause=slow.host, severity=slow.factor)


def find_slow_host(vitals: Sequence[Vitals]) -> SlowHost | None:
    """Returns the host of the slowest process, if it is slow enough to matter."""
    if len({process.host for process in vitals}) < 2:
        return None
    slowest = max(vitals, key=lambda process: process.work)
    others = median_low(process.work for process in vitals if process.host != slowest.host)
    lost = slowest.work - others
    if slowest.work <= SLOW_FACTOR * others or lost <= SLOW_SHARE * slowest.total:
        return None
    factor = slowest.work / max(others, 1e-9)
    return SlowHost(slowest.host, factor, lost / slowest.total, slowest.input > 0.5 * slowest.work)


def input_share(vitals: Sequence[Vitals]) -> tuple[int, float]:
    """Returns the host that waits longest for its input, and for which part of its time; the others wait for it."""
    worst = max(vitals, key=lambda process: process.input / max(process.total, 1e-9))
    return worst.host, worst.input / max(worst.total, 1e-9)


_INPUT_BOUND = (
    "{share:.0%} of the time is spent waiting for the next batch (host {host} most). Raise the task's workers, make "
    "reading and transforming an example cheaper or do it beforehand, use larger files, keep the data in the region of "
    "the slice"
)
_STRAGGLER = (
    "host {host} is slow: its own work takes {factor:.1f} times as long as the others', who wait {share:.0%} of the "
    "time for it. "
)
_SLOW_INPUT = "Most of it is waiting for its input: look at that host's disk, network and share of the data"
_SLOW_WORK = "Look at what else runs on that machine, and for work that the task does on one host only"
