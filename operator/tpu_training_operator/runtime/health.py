"""Is this process still doing its work? Asked by the liveness probe through `main`.

A slow API server, or one that answers with errors, is no reason to restart: the next process would meet the same one.
"""

import time
from typing import Protocol

# One request takes 30 s at most, and is made five times with pauses of 30 s where the API server is overloaded.
_LONGEST_STANDSTILL_SECONDS = 300.0
# The resync reads the API every 300 s; three of them without one answer is not a hiccup.
_LONGEST_SILENCE_SECONDS = 900.0


class _Passes(Protocol):
    is_running: bool

    def longest_standstill_seconds(self) -> float: ...


class _Answers(Protocol):
    last_answer: float


class Unhealthy(Exception):
    """The process should be restarted; the message says why."""


class Health:
    def __init__(self, controller: _Passes, cluster: _Answers) -> None:
        self._controller = controller
        self._cluster = cluster

    def check(self) -> dict[str, float]:
        """The two ages in seconds. Raises Unhealthy when one of them shows that nothing moves any more."""
        if not self._controller.is_running:
            raise Unhealthy("the controller has stopped")
        standstill = self._controller.longest_standstill_seconds()
        silence = time.monotonic() - self._cluster.last_answer
        if standstill > _LONGEST_STANDSTILL_SECONDS:
            raise Unhealthy(f"one pass has done nothing for {standstill:.0f} s")
        if silence > _LONGEST_SILENCE_SECONDS:
            raise Unhealthy(f"no answer of the API server for {silence:.0f} s")
        return {"longestStandstillSeconds": round(standstill, 1), "secondsSinceLastAnswer": round(silence, 1)}
