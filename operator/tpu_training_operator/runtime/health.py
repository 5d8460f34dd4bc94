"""Decides for /healthz whether this process still works, by the pulse of each pass, its watches and its requests.

A slow or failing API server is no reason for a restart: the next process would have the same API server.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from tpu_training_operator.runtime.resync import RESYNC_SECONDS

# A request takes up to 30 s, and is tried five times with pauses of up to 30 s if the API server is overloaded.
_LONGEST_STANDSTILL_SECONDS = 300.0
# Three resyncs in a row without an answer are more than a short outage.
_LONGEST_SILENCE_SECONDS = 3 * RESYNC_SECONDS


class Pulse:
    """`at`: when the API server last answered a pass, in monotonic seconds. It distinguishes a slow pass from a stuck
    one."""

    def __init__(self) -> None:
        self.at = time.monotonic()


# A context variable, because the tasks that a pass starts inherit it.
_current: ContextVar[Pulse | None] = ContextVar("pulse", default=None)


@contextmanager
def pulse() -> Iterator[Pulse]:
    """Gives everything that runs in this context a pulse, until the block ends."""
    started = Pulse()
    token = _current.set(started)
    try:
        yield started
    finally:
        _current.reset(token)


def beat() -> None:
    """Notes that a request of this context was answered or timed out: its pass makes progress."""
    if current := _current.get():
        current.at = time.monotonic()


class Unhealthy(Exception):
    """The process should be restarted; the message says why."""


class _PassRunner(Protocol):
    is_running: bool

    def longest_standstill_seconds(self) -> float: ...


class _ApiClient(Protocol):
    last_answer: float


class _WatchRunner(Protocol):
    is_running: bool

    def longest_standstill_seconds(self) -> float: ...

    def longest_silence_seconds(self) -> float: ...


class Liveness:
    """`clients`: the API server is reachable if it answers any of them."""

    def __init__(self, controller: _PassRunner, clients: Sequence[_ApiClient], watching: _WatchRunner) -> None:
        self._controller = controller
        self._clients = clients
        self._watching = watching

    def check(self) -> dict[str, float]:
        """Returns ages in seconds. Raises Unhealthy if one of them shows that this process is stuck."""
        if not self._controller.is_running:
            raise Unhealthy("the controller has stopped")
        if not self._watching.is_running:
            raise Unhealthy("watching has stopped")
        standstill = self._controller.longest_standstill_seconds()
        silence = time.monotonic() - max(client.last_answer for client in self._clients)
        unwatched = self._watching.longest_standstill_seconds()
        if standstill > _LONGEST_STANDSTILL_SECONDS:
            raise Unhealthy(f"a pass has been stuck for {standstill:.0f} s")
        if silence > _LONGEST_SILENCE_SECONDS:
            raise Unhealthy(f"the API server has not answered for {silence:.0f} s")
        if unwatched > _LONGEST_STANDSTILL_SECONDS:
            raise Unhealthy(f"a watch has been stuck for {unwatched:.0f} s")
        return {
            "longestStandstillSeconds": round(standstill, 1),
            "secondsSinceLastAnswer": round(silence, 1),
            "secondsSinceLastNews": round(self._watching.longest_silence_seconds(), 1),
        }
