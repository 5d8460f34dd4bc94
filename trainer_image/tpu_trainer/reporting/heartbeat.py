"""Reports to the operator every few seconds how the run is doing, even while nothing happens.

No step waits for the heartbeat's thread: the operator is informed of the run, not needed for it. The thread works while
the training hangs in native code that has released the interpreter lock; without the lock no report is sent, and the
operator notices that.
"""

from __future__ import annotations

import faulthandler
import json
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from http.client import HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit

from tpu_contract.protocol import STACKS_LIMIT, ExitCode, ReportPhase
from tpu_trainer.contract.environment import ProgressEndpoint
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.reporting.report import ProgressReport, kubeflow_body, operator_body

EVERY_SECONDS = 5.0
"""The time between two reports. The operator and Kubeflow Trainer's own clients use the same."""

LONGEST_SECONDS = 60.0
"""The longest time between two attempts while the service is away, and the longest pause that it may ask for."""

TIMEOUT_SECONDS = 10.0

LAST_SECONDS = 3.0
"""How long the end of a run waits for the last report: within the grace period of a pod that is deleted."""

_ANSWER_LIMIT = 64 * 1024


class Heartbeat:
    """Sends `present()` from `start` until `end`. Its thread dies with the process."""

    def __init__(self, service: ProgressEndpoint, present: Callable[[], ProgressReport]) -> None:
        self._present = present
        self._endpoint, self._kubeflow = Endpoint(service), service.kubeflow
        self._last: ProgressReport | None = None
        self._stacks: str | None = None
        self._pauses = Pauses()
        self._failing_since: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self, outcome: Outcome) -> None:
        """Sends the last report of a run that ended well; only the termination message reports a failure.

        Returns when it is sent, or after LAST_SECONDS.
        """
        if outcome.ended_well:
            last = self._present()
            done = outcome.code is ExitCode.Succeeded
            self._last = replace(last, phase=ReportPhase.DONE, remaining_seconds=0) if done else last
        self._over.set()
        if outcome.ended_well:
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
        """Sends one report; returns the seconds until the next."""
        try:
            report = replace(self._present(), stacks=self._stacks)
            answer = self._send(report, TIMEOUT_SECONDS)
        except Exception as error:
            # Logged once: a service that is away would fill the log.
            if self._failing_since is None:
                self._failing_since = time.monotonic()
                _say(f"not delivered: {_reason(error)}; the training is not affected")
            return self._pauses.after(error)
        if self._failing_since is not None:
            _say(f"delivered again, after {time.monotonic() - self._failing_since:.0f} s")
            self._failing_since = None
        self._stacks = None
        if report.stacks is None and isinstance(answer, dict) and answer.get("stacks") is True:
            self._stacks = stacks()
            _say(f"the operator asks where this worker is:\n{self._stacks}")
            return 0.0
        return self._pauses.after(None)

    def _send(self, report: ProgressReport, seconds: float) -> object:
        body = kubeflow_body(report, datetime.now(UTC)) if self._kubeflow else operator_body(report)
        return self._endpoint.post(body, seconds)


class Pauses:
    """The pauses between reports. They grow while reports fail, unless the service names one."""

    def __init__(self) -> None:
        self._next = EVERY_SECONDS

    def after(self, error: Exception | None) -> float:
        """Returns the seconds to wait after a report that was accepted (None) or failed."""
        if error is None:
            self._next = EVERY_SECONDS
            return EVERY_SECONDS
        pause, self._next = self._next, min(2 * self._next, LONGEST_SECONDS)
        if isinstance(error, RefusedError) and error.retry_after is not None:
            pause = max(EVERY_SECONDS, error.retry_after)
        return min(pause, LONGEST_SECONDS)


class RefusedError(Exception):
    """The service answered, but did not accept the report. `retry_after`: seconds, if it named them."""

    def __init__(self, message: str, retry_after: int | None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Endpoint:
    """Posts to the progress service over one connection, which stays open as long as the service permits.

    Token and certificate are files that are replaced during the run: the token is read for every report, the
    certificate for every connection.
    """

    def __init__(self, service: ProgressEndpoint) -> None:
        self._service = service
        self._open: HTTPSConnection | None = None

    def post(self, body: bytes, seconds: float) -> object:
        """Returns the answer's JSON; None if it is not JSON. `seconds`: how long the service may be silent.

        Raises:
            RefusedError: the answer is not a success.
            Exception: whatever else can go wrong with a file, a name, a connection or a certificate.
        """
        connection, self._open = self._open, None
        if connection is not None:
            try:
                return self._exchange(connection, body, seconds)
            except TimeoutError:
                raise
            except OSError:
                # The service closed it since the last report, which only shows now. A report may arrive twice.
                pass
        return self._exchange(self._connection(), body, seconds)

    def close(self) -> None:
        if self._open is not None:
            self._open.close()

    def _connection(self) -> HTTPSConnection:
        where = urlsplit(self._service.url)
        if where.hostname is None:
            raise ValueError(f"{self._service.url} is not a URL")
        # TLS whatever the URL's scheme, because the token is secret.
        context = ssl.create_default_context(cafile=self._service.ca_file)
        return HTTPSConnection(where.hostname, where.port, context=context)

    def _exchange(self, connection: HTTPSConnection, body: bytes, seconds: float) -> object:
        try:
            token = self._service.token_file.read_text(encoding="ascii").strip()
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            connection.timeout = seconds
            if connection.sock is not None:
                connection.sock.settimeout(seconds)
            connection.request("POST", urlsplit(self._service.url).path, body, headers)
            response = connection.getresponse()
            answer = response.read(_ANSWER_LIMIT)
        except Exception:
            connection.close()
            raise
        if connection.sock is not None and response.isclosed():
            self._open = connection
        else:
            # The service closes the connection, or its answer is longer than what was read.
            connection.close()
        return _parse_answer(response, answer)


def open_heartbeat(service: ProgressEndpoint | None, present: Callable[[], ProgressReport]) -> Heartbeat | None:
    """Starts the heartbeat; None without a service to report to."""
    if service is None:
        return None
    heartbeat = Heartbeat(service, present)
    heartbeat.start()
    return heartbeat


def _parse_answer(response: HTTPResponse, answer: bytes) -> object:
    try:
        document = json.loads(answer)
    except ValueError:
        document = None
    if response.status // 100 == 2:
        return document
    message = document.get("message") if isinstance(document, dict) else None
    seconds = response.headers.get("Retry-After", "")
    raise RefusedError(f"{response.status} {message or response.reason}", int(seconds) if seconds.isdecimal() else None)


def _reason(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, RefusedError) else f"{type(error).__name__}: {text}"


def _say(line: str) -> None:
    print(f"progress reports: {line}", file=sys.stderr, flush=True)


def stacks() -> str:
    """Returns the stacks of all threads: newest frames first, the main thread last; the last STACKS_LIMIT bytes of
    them.

    faulthandler writes to a file and without Python's help; it does not read source files, which may be on the very
    storage that hangs.
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(max(0, file.tell() - STACKS_LIMIT))
        return file.read().decode("utf-8", "replace")
