"""Examples per second of the steps that did not compile anything."""

from __future__ import annotations

WARM_STEPS = 3
"""XLA compiles in step 1, and again in step 2 when the optimizer's state has become an input; 3 leaves one to spare."""


class Throughput:
    """Told when a step's results had arrived; `rate` is over all steps since the first such moment past WARM_STEPS."""

    def __init__(self, global_batch: int) -> None:
        self._global_batch = global_batch
        self._start: tuple[int, float] | None = None
        self.rate: float | None = None

    def arrived(self, step: int, now: float) -> None:
        """`step`: steps done; `now`: monotonic seconds."""
        if self._start is None:
            self._start = (step, now) if step >= WARM_STEPS else None
            return
        first, since = self._start
        if step > first and now > since:
            self.rate = (step - first) * self._global_batch / (now - since)
