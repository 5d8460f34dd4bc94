"""Is this process still doing its work? Asked by the liveness probe through `main`."""

import time
from typing import Protocol

_LONGEST_PASS_SECONDS = 300.0
# The resync reads the API every 300 s; three of them without one answer is not a hiccup.
_LONGEST_SILENCE_SECONDS = 900.0


class _Passes(Protocol):
    is_running: bool

    def longest_pass_seconds(self) -> float: ...


class _Answers(Protocol):
    last_success: float


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
        longest_pass = self._controller.longest_pass_seconds()
        silence = time.monotonic() - self._cluster.last_success
        if longest_pass > _LONGEST_PASS_SECONDS:
            raise Unhealthy(f"one pass has been running for {longest_pass:.0f} s")
        if silence > _LONGEST_SILENCE_SECONDS:
            raise Unhealthy(f"no successful API request for {silence:.0f} s")
        return {"longestPassSeconds": round(longest_pass, 1), "secondsSinceLastAnswer": round(silence, 1)}
