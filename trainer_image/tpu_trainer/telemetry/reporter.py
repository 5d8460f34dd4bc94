"""Where the loop's numbers go: the history, the event files, and a report that is written anew every few minutes.

Held by `replica`. Only the reporting replica's does anything, and only where there is a place for the files. Files
are written by a thread of their own: no step waits for a slow bucket, and no failure of a bucket ends a run.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from tpu_trainer.clock import Clock
from tpu_trainer.doctor.finding import Finding
from tpu_trainer.outcome import Outcome
from tpu_trainer.spec import RunSpec
from tpu_trainer.telemetry.folder import Folder, open_folder
from tpu_trainer.telemetry.history import Attempt, History, Recorded
from tpu_trainer.telemetry.memory import dump_history, load_history
from tpu_trainer.telemetry.report.page import render_report
from tpu_trainer.telemetry.sample import Sample
from tpu_trainer.telemetry.tensorboard import Events
from tpu_trainer.telemetry.versions import versions

REPORT = "report.html"
HISTORY = "history.json"

EVERY_SECONDS = 180.0
"""Between two versions of the report while the run goes on."""

LAST_SECONDS = 10.0
"""The last version is waited for so long: a third of the grace period that Kubernetes gives a pod by default."""


class Reporter:
    """Does nothing without a folder. Told everything in the order in which it happens, by one thread."""

    def __init__(
        self,
        spec: RunSpec,
        folder: Folder | None,
        clock: Clock,
        environment: Mapping[str, str],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec, self._folder, self._clock, self._environment, self._now = spec, folder, clock, environment, now
        self._silenced = False
        self._written = now()
        self._writing: threading.Thread | None = None
        self._before = self._read_before() if folder else Recorded()
        self._history = History(self._before)
        self._first = self._step = self._before.attempts[-1].last if self._before.attempts else 0
        self._events = Events(spec.job.attempt) if folder and spec.report.tensor_board else None

    def began(self, step: int) -> None:
        """The training starts, or goes on, after `step` steps. What earlier attempts recorded past it is forgotten."""
        self._history = History(self._before.until(step))
        self._first = self._step = step

    def sample(self, sample: Sample) -> None:
        if not self._folder:
            return
        self._step = sample.step
        self._history.sample(sample)
        if self._events:
            self._events.sample(sample)
        if self._now() - self._written >= EVERY_SECONDS:
            self._store(None)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._folder:
            return
        self._step = max(self._step, step)
        self._history.evaluated(step, metrics)
        if self._events:
            self._events.evaluated(step, metrics)

    def finding(self, finding: Finding) -> None:
        self._history.finding(finding)

    def ended(self, outcome: Outcome) -> None:
        """Writes the last version, and returns when it is there or LAST_SECONDS have passed."""
        if not self._folder:
            return
        self._step = self._step if outcome.step is None else max(self._step, outcome.step)
        until = time.monotonic() + LAST_SECONDS
        self._wait(until)
        self._store(outcome)
        self._wait(until)
        if self._writing and self._writing.is_alive():
            self._say(f"not written within {LAST_SECONDS:.0f} s")

    def _store(self, outcome: Outcome | None) -> None:
        """Starts to write what there is now; not while an earlier version is still being written."""
        if self._writing and self._writing.is_alive():
            return
        self._written = self._now()
        name = outcome.code.name if outcome else None
        attempt = Attempt(self._spec.job.attempt, self._first, self._step, self._clock.seconds(), name)
        recorded = self._history.recorded(attempt)
        events = {self._events.name: self._events.content()} if self._events else {}
        self._writing = threading.Thread(target=self._write, args=(recorded, events, outcome), daemon=True)
        self._writing.start()

    def _wait(self, until: float) -> None:
        if self._writing:
            self._writing.join(max(0.0, until - time.monotonic()))

    def _write(self, recorded: Recorded, events: Mapping[str, bytes], outcome: Outcome | None) -> None:
        assert self._folder
        try:
            written = datetime.now(UTC)
            page = render_report(recorded, self._spec, outcome, self._environment, written)
            self._folder.write(REPORT, page.encode("utf-8", "replace"))
            self._folder.write(HISTORY, dump_history(recorded, self._spec.job.uid))
            for name, content in events.items():
                self._folder.write(name, content)
        except Exception as error:
            self._say(f"not written: {_reason(error)}")

    def _read_before(self) -> Recorded:
        assert self._folder
        try:
            document = self._folder.read(HISTORY)
        except Exception as error:
            self._say(f"earlier attempts are not in it: {_reason(error)}")
            document = None
        return (document and load_history(document, self._spec.job.uid)) or Recorded()

    def _say(self, trouble: str) -> None:
        """Once: a bucket that cannot be written to would fill the log."""
        if not self._silenced:
            self._silenced = True
            print(f"report: {trouble}; the training is not affected", file=sys.stderr, flush=True)


def open_reporter(spec: RunSpec, directory: Path | None, clock: Clock, device: str, reports: bool) -> Reporter:
    """`directory`: where the files go if the run spec names no place. `reports`: this is the reporting replica."""
    place = spec.report.uri or (str(directory) if directory else None)
    folder = open_folder(place) if place and reports else None
    return Reporter(spec, folder, clock, versions(device))


def _reason(error: Exception) -> str:
    """One line; the storages' own clients raise whatever they like."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
