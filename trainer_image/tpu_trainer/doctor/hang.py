"""Ends a process that makes no progress, with the reason, so that the job restarts instead of paying for idle chips.

Neither a collective on TPU nor a dataset on dead storage has a time limit of its own. A thread watches how long the
clock's present phase has lasted.
"""

from __future__ import annotations

import faulthandler
import linecache
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import TextIO

from tpu_trainer.contract.clock import WARM_UP_STEPS, Clock, Phase, StepPace
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.contract.protocol import ENV_HANG_SECONDS, ExitCode

LEAST_SECONDS = 300.0
MEDIAN_STEPS = 10
LONG_SECONDS = 1800.0
"""While programs are compiled: before and in the first steps, and in an evaluation, which has programs of its own. And
while a checkpoint is waited for, which may be large and its storage slow."""

PEER_SECONDS = 60.0
"""Longer for a replica that waits for the others, so that the one that is stuck reports first and is the one named."""

STOP_SECONDS = 10.0
"""In one phase after the process was told to stop; the rest of the grace period, 30 s by default, is for the log."""

_LONGEST_POLL = 5.0


def limit_seconds(phase: Phase, pace: StepPace, override: float | None = None) -> float:
    """How long a phase may last. `override` replaces the limit of a run under way, and raises the others to it."""
    usual = max(MEDIAN_STEPS * pace.median_seconds, LEAST_SECONDS) if override is None else override
    long = phase in (Phase.START, Phase.EVALUATE, Phase.CHECKPOINT) or pace.steps < WARM_UP_STEPS
    limit = max(usual, LONG_SECONDS) if long else usual
    return limit + PEER_SECONDS if phase is Phase.DEVICE else limit


@contextmanager
def watchdog(
    clock: Clock,
    pace: StepPace,
    die: Callable[[Outcome], None],
    told_to_stop: Callable[[], bool],
    seconds: float | None = None,
    dump: TextIO | None = None,
) -> Iterator[None]:
    """While the block runs, a phase that lasts too long ends in `die`, after all threads' stacks went to `dump`.

    The watchdog's thread calls `die`, which must end the process without the help of the others. `seconds`: instead of
    the usual limit. A process that is `told_to_stop` and hangs will soon be killed, so it leaves its stacks first.
    Works while the block is in native code that has released the interpreter lock, as torch's waits do. A process that
    was stopped as a whole (SIGSTOP, a suspended laptop) starts its limit again.
    """
    over = threading.Event()
    watched = threading.get_ident()
    poll = _LONGEST_POLL if seconds is None else min(_LONGEST_POLL, seconds / 10)
    out = dump or sys.stderr

    def watch() -> None:
        running_since = before = monotonic()
        reluctance = IgnoredStop(told_to_stop)
        while not over.wait(poll):
            now = monotonic()
            if now - before > 2 * poll + 1.0:
                running_since = now
            before = now
            phase, lasted = clock.current()
            limit = limit_seconds(phase, pace, seconds)
            if min(lasted, now - running_since) > limit:
                message = _message(phase, lasted, limit, pace, sys._current_frames(), watched)
                faulthandler.dump_traceback(out, all_threads=True)
                die(Outcome(ExitCode.Hung, message, pace.last))
                return
            if reluctance.shows(phase, lasted, now):
                print(f"told to stop, and still in phase {phase}; the stacks of all threads:", file=out, flush=True)
                faulthandler.dump_traceback(out, all_threads=True)

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class IgnoredStop:
    """Whether a process was told to stop and does not. Shows once."""

    def __init__(self, told_to_stop: Callable[[], bool]) -> None:
        self._told_to_stop = told_to_stop
        self._told_at: float | None = None
        self._shown = False

    def shows(self, phase: Phase, lasted: float, now: float) -> bool:
        """`lasted`: seconds of the present phase so far."""
        if self._told_at is None and self._told_to_stop():
            self._told_at = now
        # The last checkpoint may take long to write, and reports its own trouble.
        if self._told_at is None or self._shown or phase is Phase.CHECKPOINT:
            return False
        self._shown = min(lasted, now - self._told_at) > STOP_SECONDS
        return self._shown


def user_frame(frames: Mapping[int, FrameType], first: int) -> str | None:
    """Where the user's own code is, as "file:line in function: source"; thread `first` before all others.

    A batch is often read by a thread of its own, while the one that waits for it is in the trainer's code. None if no
    thread is in code outside of Python, its packages and the trainer.
    """
    for thread in sorted(frames, key=lambda thread: thread != first):
        frame: FrameType | None = frames[thread]
        while frame is not None:
            file = frame.f_code.co_filename
            if _is_users(file):
                source = linecache.getline(file, frame.f_lineno).strip()
                return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}{f': {source}' if source else ''}"
            frame = frame.f_back
    return None


def _message(
    phase: Phase, lasted: float, limit: float, pace: StepPace, frames: Mapping[int, FrameType], watched: int
) -> str:
    place = user_frame(frames, watched)
    return (
        f"hung for {lasted:.0f} s in phase {phase} after step {pace.last or 0}: {_REASONS[phase]}"
        f"{f'; it is at {place}' if place else ''}. The stacks of all threads are in the log. The limit is "
        f"{limit:.0f} s; {ENV_HANG_SECONDS} sets another"
    )


_REASONS = {
    Phase.START: "the start did not finish: loading the task, meeting the other hosts, or the first programs",
    Phase.INPUT: "the task's dataset did not give the next batch",
    Phase.HOST: "the task's own code did not return",
    Phase.DEVICE: "the device returned no result, or another replica did not arrive at the exchange",
    Phase.CHECKPOINT: "a checkpoint was not written, or the one before it is still being written",
    Phase.EVALUATE: "the evaluation did not finish",
}

_TRAINER = str(Path(__file__).parents[1])
_LIBRARIES = (_TRAINER, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))


def _is_users(file: str) -> bool:
    return not file.startswith((*_LIBRARIES, "<")) and "site-packages" not in file and "dist-packages" not in file
