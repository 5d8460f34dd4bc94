"""Writes the history and the event files of a run: every few minutes, at each checkpoint and evaluation, at its end.

A separate thread of one replica writes the files: no step waits for a slow bucket, and no failure of a bucket ends a
run.
"""

from __future__ import annotations

import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tpu_contract.protocol import HISTORY_FILE
from tpu_contract.run_spec import RunSpec
from tpu_trainer.contract.clock import Clock
from tpu_trainer.contract.errors import TrainerError
from tpu_trainer.contract.findings import Finding
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.reporting.history import (
    AttemptRecord,
    FirstLossTime,
    RunHistory,
    Sample,
    dump_history,
    load_history,
    newest_attempt,
)
from tpu_trainer.reporting.tensorboard import EventFile
from tpu_trainer.storage import open_store
from tpu_trainer.storage.store import MissingError, ObjectStore
from tpu_trainer.task.logbook import LoggedCurve

EVERY_SECONDS = 180.0
"""The time between two versions of the files during the run."""

EVERY_SECONDS_HERE = 5.0
"""The same in `tpujob run`, whose directory takes them at once: a worker that is killed leaves almost all."""

LAST_SECONDS = 10.0
"""How long the end waits for the last version: a third of a pod's default grace period."""

PACKAGES = (
    "torch",
    "torch_xla",
    "libtpu",
    "numpy",
    "torchvision",
    "pytorch-lightning",
    "lightning",
    "torchmetrics",
    "transformers",
    "accelerate",
    "datasets",
    "scikit-learn",
)
"""Packages whose version changes what a training computes, or how fast."""


class Reporter:
    """Does nothing without a store. One thread calls it, in the order in which things happen."""

    def __init__(
        self,
        spec: RunSpec,
        store: ObjectStore | None,
        clock: Clock,
        environment: Mapping[str, str],
        now: Callable[[], float] = time.monotonic,
        every: float = EVERY_SECONDS,
    ) -> None:
        self._spec, self._store, self._clock, self._environment, self._now = spec, store, clock, environment, now
        self._every = every
        self._silenced = self._is_due = False
        self._written = now()
        self._writing: threading.Thread | None = None
        self._files: threading.Thread | None = None
        self.history = self._read_before() if store else RunHistory()
        self._first = self._step = self.history.last_step
        self._first_loss: FirstLossTime | None = None
        self._events = EventFile(spec.job.attempt) if store and spec.report.tensor_board else None

    def begin(self, step: int) -> None:
        """Starts, or continues, the training after `step` steps. Forgets later steps of earlier attempts."""
        self.history.forget_after(step)
        self._first = self._step = step

    def add_first_loss(self, found: FirstLossTime) -> None:
        self._first_loss = found

    def add_sample(self, sample: Sample) -> None:
        if not self._store:
            return
        self._step = sample.step
        self.history.add_sample(sample)
        if self._events:
            self._events.add_sample(sample)
        if self._is_due or self._now() - self._written >= self._every:
            self._begin_writing(None)

    def write_soon(self) -> None:
        """Writes what there is now, or with the next sample if a version is being written. For a checkpoint and an
        evaluation: a run that continues from there makes none of these steps again."""
        if self._store:
            self._is_due = True
            self._begin_writing(None)

    def add_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._store:
            return
        self._step = max(self._step, step)
        self.history.add_evaluation(step, metrics)
        if self._events:
            self._events.add_evaluation(step, metrics)
        self.write_soon()

    def add_curves(self, curves: Sequence[LoggedCurve]) -> None:
        if not self._store:
            return
        self.history.add_curves(curves)
        if self._events:
            self._events.add_curves(curves)

    @property
    def has_place(self) -> bool:
        return self._store is not None

    def add_profile(self, files: Mapping[str, bytes], what: str) -> None:
        """Writes the files of a profiler trace of `what` beside the history."""
        self._environment = {**self._environment, "Profile": f"{what}: {', '.join(files)}"}
        self._files = threading.Thread(target=self._put_all, args=(files,), daemon=True)
        self._files.start()

    def _put_all(self, files: Mapping[str, bytes]) -> None:
        assert self._store
        try:
            for name, content in files.items():
                self._store.put(name, content)
        except Exception as error:
            self._print(f"the profile is not written: {_reason(error)}")

    @property
    def without_events(self) -> str | None:
        """Returns why there is no event file; None if there is one."""
        if not self._store:
            return "no place for the report is named (spec.report.uri)"
        return None if self._events else "spec.report.tensorBoard is not true"

    def summary(self, step: int, summary: Any) -> bool:
        """Adds a Summary of TensorBoard's to the event file; returns whether it had room for it."""
        return self._events is not None and self._events.summary(step, summary)

    def add_finding(self, finding: Finding) -> None:
        self.history.add_finding(finding)

    def end(self, outcome: Outcome) -> None:
        """Writes the last version; returns when it and the profile are written or LAST_SECONDS have passed."""
        if not self._store:
            return
        self._step = self._step if outcome.step is None else max(self._step, outcome.step)
        until = time.monotonic() + LAST_SECONDS
        _wait(self._writing, until)
        self._begin_writing(outcome)
        if not _wait(self._writing, until):
            self._say(f"not written within {LAST_SECONDS:.0f} s")
        if not _wait(self._files, until):
            self._print(f"the profile is not written within {LAST_SECONDS:.0f} s")

    def _begin_writing(self, outcome: Outcome | None) -> None:
        """Starts writing what there is now, unless an earlier version is still being written."""
        if self._writing and self._writing.is_alive():
            return
        self._written, self._is_due = self._now(), False
        name = outcome.code.name if outcome else None
        split = self._clock.seconds()
        attempt = AttemptRecord(self._spec.job.attempt, self._first, self._step, split, name, self._first_loss)
        recorded = self.history.as_recorded(attempt)
        events = {self._events.name: self._events.content()} if self._events else {}
        self._writing = threading.Thread(target=self._write, args=(recorded, events, outcome), daemon=True)
        self._writing.start()

    def _write(self, recorded: Mapping[str, Any], events: Mapping[str, bytes], outcome: Outcome | None) -> None:
        assert self._store
        try:
            document = dump_history(recorded, self._spec, outcome, self._environment, datetime.now(UTC))
            if self._has_successor():
                self._say("not written: a later attempt of this job writes it now")
                return
            self._store.put(HISTORY_FILE, document)
            for name, content in events.items():
                self._store.put(name, content)
        except Exception as error:
            self._say(f"not written: {_reason(error)}")

    def _has_successor(self) -> bool:
        """Returns whether a later attempt has already written: then this gang was cut off, and still trains beside
        it."""
        assert self._store
        try:
            return newest_attempt(self._store.read(HISTORY_FILE), self._spec.job.uid) > self._spec.job.attempt
        except Exception:
            # The file is missing, or the write will fail and report why.
            return False

    def _read_before(self) -> RunHistory:
        assert self._store
        try:
            return load_history(self._store.read(HISTORY_FILE), self._spec.job.uid) or RunHistory()
        except MissingError:
            return RunHistory()
        except Exception as error:
            self._say(f"earlier attempts are missing from it: {_reason(error)}")
            return RunHistory()

    def _say(self, trouble: str) -> None:
        """Prints the first trouble only: a bucket that refuses writes would fill the log."""
        if not self._silenced:
            self._silenced = True
            self._print(trouble)

    def _print(self, trouble: str) -> None:
        print(f"report: {trouble}; the training is not affected", file=sys.stderr, flush=True)


def _wait(thread: threading.Thread | None, until: float) -> bool:
    """Waits for the thread's end; returns whether it came in time."""
    if thread is None:
        return True
    thread.join(max(0.0, until - time.monotonic()))
    return not thread.is_alive()


def open_reporter(spec: RunSpec, directory: Path | None, clock: Clock, device: str, reports: bool) -> Reporter:
    """Opens the run's reporter. `directory`: where the files go if the run spec names no place. `reports`: True in the
    reporting replica.

    Raises:
        BadSpecError: report.uri is not a valid place.
    """
    place = spec.report.uri or (str(directory.absolute()) if directory else None)
    store = open_store(place, "report.uri") if place and reports else None
    every = EVERY_SECONDS if spec.report.uri else EVERY_SECONDS_HERE
    return Reporter(spec, store, clock, _environment(device) if store else {}, every=every)


def _environment(device: str) -> dict[str, str]:
    """Returns the versions of what the run uses, by name. `device`: the model's, as torch names it."""
    machine = f"{platform.machine()}, {platform.system()} {platform.release()}"
    versions = {"Device": device, "Machine": machine, "Python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _reason(error: Exception) -> str:
    """Returns one line. A TrainerError's text says what is wrong; any other error needs its type."""
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, TrainerError) else f"{type(error).__name__}: {text}"
