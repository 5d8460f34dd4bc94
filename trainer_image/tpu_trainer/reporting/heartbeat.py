"""Tells the operator every few seconds how the run is doing, also while nothing happens. Held by `telling`.

In a thread of its own, which no step waits for: the operator is told of the run, it is not needed for it. The thread
works while the training hangs in native code, as long as that has let go of the interpreter; when it does not, the
operator's own clock says so.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

from tpu_trainer.contract import ExitCode, ReportPhase
from tpu_trainer.environment import ProgressService
from tpu_trainer.outcome import Outcome
from tpu_trainer.reporting.endpoint import Endpoint, RefusedError
from tpu_trainer.reporting.report import Report, kubeflow_body, operator_body
from tpu_trainer.reporting.stacks import stacks

EVERY_SECONDS = 5.0
"""Between two reports. The operator and Kubeflow Trainer's own clients agree on it."""

LONGEST_SECONDS = 60.0
"""Between two tries while the service is away, and the longest that it may ask for."""

TIMEOUT_SECONDS = 10.0

LAST_SECONDS = 3.0
"""The last report is waited for so long: less than what a pod that is deleted has to spare."""


class Heartbeat:
    """Sends `present()` from `start` until `end`. Its thread dies with the process."""

    def __init__(self, service: ProgressService, present: Callable[[], Report]) -> None:
        self._present = present
        self._endpoint, self._kubeflow = Endpoint(service), service.kubeflow
        self._last: Report | None = None
        self._stacks: str | None = None
        self._pauses = Pauses()
        self._failing_since: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self, outcome: Outcome) -> None:
        """The last report, of a run that ended well; of a failure the termination message tells, and nothing after it.

        Returns when it is sent, or after LAST_SECONDS.
        """
        if outcome.well:
            last = self._present()
            done = outcome.code is ExitCode.Succeeded
            self._last = replace(last, phase=ReportPhase.DONE, remaining_seconds=0) if done else last
        self._over.set()
        if outcome.well:
            self._thread.join(LAST_SECONDS)

    def _run(self) -> None:
        pause = 0.0
        while not self._over.wait(pause):
            pause = self._beat()
        if self._last is not None:
            with suppress(Exception):
                self._send(self._last, LAST_SECONDS)
        self._endpoint.close()

    def _beat(self) -> float:
        """Sends one report; how many seconds until the next."""
        try:
            report = replace(self._present(), stacks=self._stacks)
            answer = self._send(report, TIMEOUT_SECONDS)
            self._worked()
            self._stacks = None
            if report.stacks is None and isinstance(answer, dict) and answer.get("stacks") is True:
                self._stacks = stacks()
                _say(f"the operator asks where this worker is:\n{self._stacks}")
                return 0.0
            return self._pauses.after(None)
        except Exception as error:
            self._failed(error)
            return self._pauses.after(error)

    def _send(self, report: Report, seconds: float) -> object:
        body = kubeflow_body(report, datetime.now(UTC)) if self._kubeflow else operator_body(report)
        return self._endpoint.post(body, seconds)

    def _worked(self) -> None:
        if self._failing_since is not None:
            _say(f"delivered again, after {time.monotonic() - self._failing_since:.0f} s")
            self._failing_since = None

    def _failed(self, error: Exception) -> None:
        """Once: a service that is away would fill the log."""
        if self._failing_since is None:
            self._failing_since = time.monotonic()
            _say(f"not delivered: {_reason(error)}; the training is not affected")


class Pauses:
    """Between two reports: longer and longer while they fail, and what the service asks for where it says so."""

    def __init__(self) -> None:
        self._next = EVERY_SECONDS

    def after(self, error: Exception | None) -> float:
        """Seconds after a report that was taken (None) or was not."""
        if error is None:
            self._next = EVERY_SECONDS
            return EVERY_SECONDS
        pause, self._next = self._next, min(2 * self._next, LONGEST_SECONDS)
        if isinstance(error, RefusedError) and error.retry_after is not None:
            pause = max(EVERY_SECONDS, error.retry_after)
        return min(pause, LONGEST_SECONDS)


def open_heartbeat(service: ProgressService | None, present: Callable[[], Report]) -> Heartbeat | None:
    """None where nobody is to be told."""
    if service is None:
        return None
    heartbeat = Heartbeat(service, present)
    heartbeat.start()
    return heartbeat


def _reason(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, RefusedError) else f"{type(error).__name__}: {text}"


def _say(line: str) -> None:
    print(f"progress reports: {line}", file=sys.stderr, flush=True)
