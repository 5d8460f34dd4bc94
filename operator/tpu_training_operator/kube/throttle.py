"""A token bucket. It limits how fast this process sends requests to the API server (`kube.turns`), where each waits for
its turn, and how fast workers may report to this process, where a request that comes too early is refused."""

from collections.abc import Callable


class Throttle:
    """Admits `burst` requests at once and `per_second` on average. `clock` returns seconds."""

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float]) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._tokens = float(burst)
        self._filled_at = clock()

    def take(self) -> float:
        """Take a token, on credit if none is left, and return the seconds until it is due."""
        self._fill()
        self._tokens -= 1
        return max(0.0, -self._tokens / self._per_second)

    def give_back(self) -> None:
        """Return a token that was taken but not used."""
        self._fill()
        self._tokens = min(self._burst, self._tokens + 1)

    def due(self) -> float:
        """The seconds until the next token; 0 if there is one now. Takes none."""
        self._fill()
        return max(0.0, (1 - self._tokens) / self._per_second)

    def _fill(self) -> None:
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._per_second)
        self._filled_at = now
