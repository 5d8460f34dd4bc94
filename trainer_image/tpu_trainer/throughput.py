"""Examples per second of the steps that did not compile anything."""

from __future__ import annotations

WARM_STEPS = 3
"""XLA compiles in the first step of a process, and again in the second when the optimizer's state has become an input;
3 leaves one to spare."""


class Throughput:
    """Told when a step's results had arrived. `rate` and `step_seconds` are over all steps since the first such moment
    past WARM_STEPS steps of this process; None before there are two."""

    def __init__(self, global_batch: int, step: int = 0) -> None:
        self._global_batch = global_batch
        self._warm = step + WARM_STEPS
        self._start: tuple[int, float] | None = None
        self.step_seconds: float | None = None

    @property
    def rate(self) -> float | None:
        return None if self.step_seconds is None else self._global_batch / self.step_seconds

    def arrived(self, step: int, now: float) -> None:
        """`step`: steps done; `now`: seconds on a clock that stands still while no step is made."""
        if self._start is None:
            self._start = (step, now) if step >= self._warm else None
            return
        first, since = self._start
        if step > first and now > since:
            self.step_seconds = (now - since) / (step - first)
