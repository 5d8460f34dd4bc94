"""The watchdog ends a process that makes no progress, with the reason, and leaves alone one that was merely asleep."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from syrupy.assertion import SnapshotAssertion

from tpu_contract.protocol import ExitCode, Phase
from tpu_trainer.contract.clock import WARM_UP_STEPS, Clock, StepPace
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.doctor import hang


def running(phase: Phase) -> tuple[Clock, StepPace]:
    """A process that is in `phase` after step 120."""
    clock, pace = Clock(), StepPace()
    for step in range(120 - WARM_UP_STEPS + 1, 121):
        pace.step_done(step)
    clock.enter(phase)
    return clock, pace


def never() -> bool:
    return False


class Grave:
    """What would end the process."""

    def __init__(self) -> None:
        self.dug = threading.Event()
        self.outcomes: list[Outcome] = []

    def __call__(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.dug.set()


@pytest.fixture
def stacks(tmp_path: Path) -> Iterator[TextIO]:
    with (tmp_path / "stacks").open("w+") as file:
        yield file


def test_a_phase_that_does_not_end_is_named_with_step_place_and_all_stacks(
    stacks: TextIO, snapshot: SnapshotAssertion
) -> None:
    clock, pace = running(Phase.INPUT)
    grave = Grave()
    with hang.watchdog(clock, pace, grave, never, 0.05, stacks):
        grave.dug.wait()
    (outcome,) = grave.outcomes
    assert (outcome.code, outcome.step) == (ExitCode.Hung, 120)
    what, _, where = outcome.message.partition("; it is at ")
    assert "0 s" in what
    assert "step 120" in what
    assert what == snapshot
    # The line that waits, in this very file.
    assert where.startswith(f"{__file__}:")
    assert "grave.dug.wait()" in where
    assert "TPU_TRAINER_HANG_SECONDS" in where
    stacks.seek(0)
    assert "test_doctor_hang.py" in stacks.read()


def test_a_run_that_makes_progress_is_left_alone_however_long_it_takes(stacks: TextIO) -> None:
    """Far more time passes than the limit, in phases that are each shorter: the clock is set by hand."""
    times = itertools.count()
    clock, pace = Clock(lambda: next(times) / 1000), StepPace()
    asked = threading.Event()
    grave = Grave()

    class Lively(Clock):
        def current(self) -> tuple[Phase, float]:
            clock.enter(Phase.HOST)
            if next(counted) == 20:
                asked.set()
            return clock.current()

    counted = itertools.count()
    for step in range(WARM_UP_STEPS):
        pace.step_done(step)
    with hang.watchdog(Lively(), pace, grave, never, 0.01, stacks):
        asked.wait()
    assert grave.outcomes == []


def test_a_process_that_was_stopped_as_a_whole_starts_its_limit_again(
    stacks: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after SIGSTOP or a laptop's sleep: the watchdog itself has not run for an hour either."""
    hours = itertools.count(0, 3600)
    monkeypatch.setattr(hang, "monotonic", lambda: next(hours))
    _, pace = running(Phase.DEVICE)
    looked, grave = threading.Event(), Grave()

    class Asleep(Clock):
        def current(self) -> tuple[Phase, float]:
            if next(counted) == 5:
                looked.set()
            return Phase.DEVICE, 3600.0

    counted = itertools.count()
    with hang.watchdog(Asleep(), pace, grave, never, 0.05, stacks):
        looked.wait()
    assert grave.outcomes == []


def test_the_stuck_code_is_found_in_the_thread_that_reads_ahead() -> None:
    reading, release = threading.Event(), threading.Event()

    def read_ahead() -> None:
        reading.set()
        release.wait()

    reader = threading.Thread(target=read_ahead)
    reader.start()
    reading.wait()
    frames = {thread: frame for thread, frame in sys._current_frames().items() if thread == reader.ident}
    place = hang.user_frame(frames, first=threading.get_ident())
    release.set()
    reader.join()
    assert place.endswith(("in read_ahead: release.wait()", "in read_ahead: reading.set()"))


def test_threads_in_library_code_show_no_place_of_the_users() -> None:
    done = threading.Event()
    library = threading.Thread(target=done.wait)
    library.start()
    frames = {thread: frame for thread, frame in sys._current_frames().items() if thread == library.ident}
    place = hang.user_frame(frames, first=threading.get_ident())
    done.set()
    library.join()
    assert place is None


def test_a_process_that_is_told_to_stop_and_hangs_shows_it_once_in_time() -> None:
    told = iter([False, True])
    ignored_stop = hang.IgnoredStop(lambda: next(told))
    shown = [now for now in range(0, 60, 5) if ignored_stop.detect(Phase.DEVICE, 100.0 + now, float(now))]
    # Told between 0 and 5, of a grace period of 30 seconds.
    assert shown == [20]


@pytest.mark.parametrize(("phase", "lasted"), [(Phase.DEVICE, 9.0), (Phase.CHECKPOINT, 100.0)])
def test_a_process_that_makes_progress_or_writes_its_last_checkpoint_is_not_reluctant(
    phase: Phase, lasted: float
) -> None:
    ignored_stop = hang.IgnoredStop(lambda: True)
    assert not any(ignored_stop.detect(phase, lasted, float(now)) for now in range(0, 60, 5))
