"""A token bucket: how fast this process may talk to the API server, and how fast others may talk to this process.

Used by `runtime.kubernetes_cluster`, which waits for its turn, and by `runtime.progress`, which turns others away.
"""

import asyncio
from collections.abc import Callable


class Throttle:
    """Lets `burst` requests through at once and `per_second` on average; the others wait their turn."""

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float]) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._tokens = float(burst)
        self._filled_at = clock()

    async def wait(self) -> None:
        delay = self.take()
        if delay > 0:
            await asyncio.sleep(delay)

    def take(self) -> float:
        """Take a token, on credit if there is none, and return the seconds until it is due."""
        self._fill()
        self._tokens -= 1
        return max(0.0, -self._tokens / self._per_second)

    def give_back(self) -> None:
        """Return a token that was taken: what it stood for has not happened."""
        self._fill()
        self._tokens = min(self._burst, self._tokens + 1)

    def due(self) -> float:
        """The seconds until there is a token; 0 when there is one. Takes none."""
        self._fill()
        return max(0.0, (1 - self._tokens) / self._per_second)

    def _fill(self) -> None:
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._per_second)
        self._filled_at = now
