"""The gradient noise scale of a training, from what was measured in its steps.

The noise scale grows as a training goes on, and the rule for the steps, S proportional to 1 + Bn/B, wants one number
for all of it. At any moment a step makes 1 / (1 + Bn/B) of the progress of one with the largest batch (McCandlish et
al. 2018, section 2.2). So over the whole training the rule holds for the mean of Bn over this progress. Since
1 + Bn/B = (G + N/B) / G, with N the trace of the gradient's covariance and G the squared length of the gradient, that
mean is a ratio of averages of N and of G, each divided by the squared length that a step's gradient has:

    Bn = mean(N / (G + N/B)) / mean(G / (G + N/B))

A mean of the ratios N / G would follow the moments at which G is lost in the noise, and a ratio of the plain means of N
and G the first steps alone, whose gradients are many times longer than all later ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise

# Of a training, so that a part of it has enough of them to tell its spread.
WINDOWS = 30
_FEWEST = 5
_PARTS = 3


@dataclass(frozen=True)
class Window:
    """`count` neighbouring steps. `noise`, `signal`: sums of the estimates of N and G."""

    count: int
    noise: float
    signal: float


@dataclass(frozen=True)
class NoiseScale:
    """`value`: in examples. `error`: its standard error."""

    value: float
    error: float

    @property
    def text(self) -> str:
        """The value as a recipe takes it."""
        return f"{Decimal(f'{self.value:.3g}'):f}"

    def __str__(self) -> str:
        return f"{self.text} +- {Decimal(f'{self.error:.2g}'):f}"


@dataclass(frozen=True)
class MeasuredNoise:
    """`whole`: of the training. The parts are its thirds; None for a third whose gradients are lost in the noise."""

    whole: NoiseScale
    start: NoiseScale | None
    middle: NoiseScale | None
    end: NoiseScale | None


def measured_noise(steps: Sequence[Window], batch: int) -> MeasuredNoise | None:
    """Returns the noise scale of a training with `batch` examples a step; None if it cannot be told."""
    size = max(1, math.ceil(len(steps) / WINDOWS))
    windows = [_join(steps[first : first + size]) for first in range(0, len(steps), size)]
    whole = estimate(windows, batch)
    if whole is None:
        return None
    ends = [round(len(windows) * part / _PARTS) for part in range(_PARTS + 1)]
    return MeasuredNoise(whole, *(estimate(windows[begin:end], batch) for begin, end in pairwise(ends)))


def estimate(windows: Sequence[Window], batch: int) -> NoiseScale | None:
    """Returns the noise scale over these windows, with its error by the jackknife; None if it cannot be told."""
    parts = [part for window in windows if (part := _relative(window, batch)) is not None]
    noise, signal = sum(n for n, _ in parts), sum(g for _, g in parts)
    if len(parts) < _FEWEST or signal <= max(0.0, *(g for _, g in parts)):
        return None
    without = [(noise - n) / (signal - g) for n, g in parts]
    middle = sum(without) / len(without)
    error = math.sqrt(sum((one - middle) ** 2 for one in without) * (len(without) - 1) / len(without))
    value = max(0.0, noise / signal)
    return NoiseScale(value, error) if error <= max(value, batch) else None


def _relative(window: Window, batch: int) -> tuple[float, float] | None:
    """Returns the sums of N and G in units of the squared length of a step's gradient; None if that is not known."""
    square = (window.signal + window.noise / batch) / window.count
    return (window.noise / square, window.signal / square) if square > 0 else None


def _join(group: Sequence[Window]) -> Window:
    return Window(*(sum(getattr(one, name) for one in group) for name in ("count", "noise", "signal")))
