"""Ends a process that makes no progress and reports why, so that the job restarts instead of paying for idle chips.

Neither a collective on TPU nor a dataset on dead storage has a time limit. A thread watches how long the clock's
current phase has lasted.
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

from tpu_contract.protocol import ENV_HANG_SECONDS, ExitCode, Phase
from tpu_trainer.contract.clock import WARM_UP_STEPS, Clock, StepPace
from tpu_trainer.contract.outcome import Outcome

LEAST_SECONDS = 300.0
MEDIAN_STEPS = 10
LONG_SECONDS = 1800.0
"""The limit while programs are compiled: before and in the first steps, and in an evaluation, which has other programs;
and for a checkpoint, which may be large and its storage slow."""

PEER_SECONDS = 60.0
"""The extra time for a replica that waits for the others, so that the stuck replica reports first."""

STOP_SECONDS = 10.0
"""The limit of a phase after the process was asked to stop; the rest of the grace period (30 s by default) is for the
log."""

_LONGEST_POLL = 5.0


def limit_seconds(phase: Phase, pace: StepPace, override: float | None = None) -> float:
    """Returns how long a phase may last. `override` replaces the limit after the first steps, and raises the others to
    it."""
    usual = max(MEDIAN_STEPS * pace.median_seconds, LEAST_SECONDS) if override is None else override
    long = phase in (Phase.START, Phase.EVALUATE, Phase.CHECKPOINT) or pace.steps < WARM_UP_STEPS
    limit = max(usual, LONG_SECONDS) if long else usual
    return limit + PEER_SECONDS if phase is Phase.DEVICE else limit


@contextmanager
def watchdog(
    clock: Clock,
    pace: StepPace,
    die: Callable[[Outcome], None],
    stop_requested: Callable[[], bool],
    seconds: float | None = None,
    dump: TextIO | None = None,
) -> Iterator[None]:
    """Calls `die` if a phase lasts too long while the block runs, after all threads' stacks were written to `dump`.

    The watchdog's thread calls `die`, which must end the process without the other threads. `seconds`: replaces the
    usual limit. A process that hangs after `stop_requested` will soon be killed, so it writes its stacks first. Works
    while the block is in native code that has released the interpreter lock, as torch's waits do. After the whole
    process was stopped (SIGSTOP, a suspended laptop), the limit starts again.
    """
    over = threading.Event()
    watched = threading.get_ident()
    poll = _LONGEST_POLL if seconds is None else min(_LONGEST_POLL, seconds / 10)
    out = dump or sys.stderr

    def watch() -> None:
        running_since = before = monotonic()
        ignored_stop = IgnoredStop(stop_requested)
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
            if ignored_stop.detect(phase, lasted, now):
                print(f"asked to stop, and still in phase {phase}; the stacks of all threads:", file=out, flush=True)
                faulthandler.dump_traceback(out, all_threads=True)

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class IgnoredStop:
    """Detects, once, that a process was asked to stop and does not."""

    def __init__(self, stop_requested: Callable[[], bool]) -> None:
        self._stop_requested = stop_requested
        self._since: float | None = None
        self._detected = False

    def detect(self, phase: Phase, lasted: float, now: float) -> bool:
        """`lasted`: seconds of the current phase so far."""
        if self._since is None and self._stop_requested():
            self._since = now
        # The last checkpoint may take long to write, and reports its own failures.
        if self._since is None or self._detected or phase is Phase.CHECKPOINT:
            return False
        self._detected = min(lasted, now - self._since) > STOP_SECONDS
        return self._detected


def user_frame(frames: Mapping[int, FrameType], first: int) -> str | None:
    """Returns where the user's own code is, as "file:line in function: source"; looks at thread `first` before others.

    A separate thread often reads a batch, while the one that waits for it is in the trainer's code. None if no thread
    is in code outside of Python, its packages and the trainer.
    """
    for thread in sorted(frames, key=lambda thread: thread != first):
        frame: FrameType | None = frames[thread]
        while frame is not None:
            file = frame.f_code.co_filename
            if _is_user_file(file):
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


def _is_user_file(file: str) -> bool:
    return not file.startswith((*_LIBRARIES, "<")) and "site-packages" not in file and "dist-packages" not in file
