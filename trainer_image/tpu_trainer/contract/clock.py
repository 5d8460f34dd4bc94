"""Where the run's time goes: every moment belongs to one phase.

Throughput is computed from it, the doctor finds slow input and slow hosts with it, and the hang watchdog reads from its
own thread how long the current phase has lasted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from tpu_contract.protocol import Phase, StartPhase

WARM_UP_STEPS = 3
"""Steps of this process that may compile: the first; the second, when the optimizer has state; and a spare one."""

_KEPT_STEPS = 64


class Clock:
    """Measures the monotonic time spent in each phase. One thread enters phases; any thread may read.

    `before`: seconds that passed before the clock existed, in imports; they count as start.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, before: float = 0.0) -> None:
        self._now = now
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._seconds[Phase.START] = before
        # One value, so that a reader in another thread never sees the phase of one entry with the time of another.
        self._current = (Phase.START, now())

    def enter(self, phase: Phase) -> None:
        before, since = self._current
        moment = self._now()
        self._seconds[before] += moment - since
        self._current = (phase, moment)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Spends the block in `phase`, then returns to the phase before it."""
        before, _ = self._current
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self) -> dict[Phase, float]:
        """Returns the seconds spent in each phase up to now, including the current one."""
        phase, since = self._current
        return {**self._seconds, phase: self._seconds[phase] + self._now() - since}

    def current(self) -> tuple[Phase, float]:
        """Returns the current phase and how many seconds it has lasted."""
        phase, since = self._current
        return phase, self._now() - since


class StartTimes:
    """How long each phase of the process's start has taken, by the monotonic clock: no phase is negative, and they add
    up to the time until the first step. One thread enters phases; any thread may read.

    `before`: as for `Clock`.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, before: float = 0.0) -> None:
        self._now = now
        # Replaced as a whole: the seconds of the phases that are over, and the present phase with its begin.
        self._state: tuple[dict[StartPhase, float], StartPhase | None, float] = ({}, StartPhase.IMPORTS, now() - before)

    @property
    def over(self) -> bool:
        return self._state[1] is None

    def enter(self, phase: StartPhase) -> None:
        self._state = self.seconds(), phase, self._now()

    def first_step_made(self, compiling: float) -> None:
        """Ends the start. `compiling`: the seconds in which programs were compiled; those of the last phase are a phase
        of their own."""
        seconds, phase = self.seconds(), self._state[1]
        assert phase is not None
        compiled = min(compiling, seconds[phase])
        ended = {**seconds, StartPhase.COMPILED: compiled, phase: seconds[phase] - compiled}
        self._state = ended, None, self._now()

    def seconds(self) -> dict[StartPhase, float]:
        """Returns the seconds of each phase up to now, the present one included."""
        before, phase, since = self._state
        return before if phase is None else {**before, phase: before.get(phase, 0.0) + self._now() - since}

    def __str__(self) -> str:
        seconds = self.seconds()
        parts = ", ".join(f"{phase} {seconds[phase]:.1f}" for phase in StartPhase if phase in seconds)
        return f"first step made after {sum(seconds.values()):.1f} s: {parts}"


class StepPace:
    """How fast steps are made. The loop's thread writes it; the watchdog's and the heartbeat's threads read it.

    `steps`: how many this process has made; `last`: the run's number of the last one, None before it.
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
        """The median duration of the newest steps, at most 64; 0 before the first."""
        count = min(self.steps, _KEPT_STEPS)
        return median(self._seconds[:count]) if count else 0.0


def process_seconds(pid: int | str = "self") -> float | None:
    """Returns the age of a process, by default this one, which includes its imports; None without a readable /proc
    (proc_pid_stat(5))."""
    try:
        # The name may contain spaces and parentheses; starttime is the 20th field after it.
        _, _, fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
        started = int(fields.split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, IndexError, ValueError):
        return None
