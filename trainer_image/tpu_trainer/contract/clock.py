"""Where the run's time goes: every moment belongs to one phase.

The telemetry reads how the time was split, the doctor whether the input or a host is slow, and the hang watchdog, from
its own thread, how long the present phase has lasted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from statistics import median

WARM_UP_STEPS = 3
"""Steps of this process that may compile: the first; the second, when the optimizer has state; and a spare one."""

_KEPT_STEPS = 64


class Phase(StrEnum):
    """What the replica is doing. `DEVICE` is waiting for results: the device's own work, or a peer that is late."""

    START = "start"
    INPUT = "input"
    HOST = "host"
    DEVICE = "device"
    CHECKPOINT = "checkpoint"
    EVALUATE = "evaluate"


class Clock:
    """`seconds`: monotonic time spent in each phase that has ended. One thread enters phases, any may read.

    `before`: seconds that passed before there was a clock, which belong to the start: the imports.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, before: float = 0.0) -> None:
        self._now = now
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._seconds[Phase.START] = before
        # One value, so that a reader in another thread never sees the phase of one entry with the time of another.
        self._present = (Phase.START, now())

    def enter(self, phase: Phase) -> None:
        before, since = self._present
        moment = self._now()
        self._seconds[before] += moment - since
        self._present = (phase, moment)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """The phase inside the block; then the one before it continues."""
        before, _ = self._present
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self) -> dict[Phase, float]:
        """Seconds per phase up to now, the present one included."""
        phase, since = self._present
        return {**self._seconds, phase: self._seconds[phase] + self._now() - since}

    def present(self) -> tuple[Phase, float]:
        """The present phase and how many seconds it has lasted."""
        phase, since = self._present
        return phase, self._now() - since


class StepPace:
    """How fast steps are made. The loop's thread writes it, the watchdog's and the heartbeat's read it.

    `steps`: how many this process has made; `last`: the number of the last one in the run, None before it.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.steps = 0
        self.last: int | None = None
        self._now = now
        self._since = now()
        # A ring that is never resized, so that another thread may read it at any time.
        self._seconds: list[float] = [0.0] * _KEPT_STEPS

    def step_done(self, step: int) -> None:
        moment = self._now()
        self._seconds[self.steps % _KEPT_STEPS] = moment - self._since
        self._since, self.last = moment, step
        self.steps += 1

    @property
    def median_seconds(self) -> float:
        """Of the newest steps, at most 64; 0 before the first."""
        count = min(self.steps, _KEPT_STEPS)
        return median(self._seconds[:count]) if count else 0.0


def process_seconds() -> float | None:
    """How long this process has existed, its imports included; None where /proc does not tell (proc_pid_stat(5))."""
    try:
        # The name may contain spaces and parentheses; starttime is the 20th field after it.
        _, _, fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
        started = int(fields.split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, IndexError, ValueError):
        return None
