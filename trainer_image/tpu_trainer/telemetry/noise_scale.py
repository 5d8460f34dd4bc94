"""The gradient noise scale: up to which batch a larger one still buys fewer steps. Fed by `instruments`."""

from __future__ import annotations

DECAY = 0.98
"""Of the running means: a memory of 50 steps. One step's estimate is mostly noise."""

ENOUGH = 10
"""Steps before there is a number."""


class NoiseScale:
    """The simple noise scale S / |G|^2 of McCandlish et al. 2018, appendix A.1, in examples.

    With the gradient of b examples (a replica's) and that of B (their mean over all replicas),
    |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b) and S = (|g_b|^2 - |g_B|^2) / (1/b - 1/B) are unbiased. Their ratio is
    not, and a step's may even be negative: each is averaged over the steps by itself, and the means are divided.
    """

    def __init__(self, replica_batch: int, global_batch: int) -> None:
        """Examples behind a replica's gradient, accumulated passes included, and behind the global one."""
        self._small, self._big = replica_batch, global_batch
        self._noise = self._signal = 0.0
        self._steps = 0

    def add(self, replica_square: float, global_square: float) -> None:
        """One step's |g_b|^2, averaged over the replicas, and |g_B|^2. A step that is not finite is passed over."""
        small, big = self._small, self._big
        if big <= small:
            return
        signal = (big * global_square - small * replica_square) / (big - small)
        noise = (replica_square - global_square) / (1 / small - 1 / big)
        if not (abs(signal) < float("inf") and abs(noise) < float("inf")):
            return
        # Both begin at 0 and lag alike, which leaves their ratio as it is: no correction of the start is needed.
        self._signal += (1 - DECAY) * (signal - self._signal)
        self._noise += (1 - DECAY) * (noise - self._noise)
        self._steps += 1

    @property
    def value(self) -> float | None:
        """In examples. None with one replica, in the first steps, and while the gradient cannot be told from noise."""
        if self._steps < ENOUGH or self._signal <= 0:
            return None
        return max(0.0, self._noise) / self._signal
