"""The summed signals of the steps, from the device to the loop: losses, wishes, what was not finite, and squares.

Reading a value makes the host wait for the device, so it is done for several steps at once, and where the device works
ahead of the host the newest step is left out: its successor is traced while its results are still being made. Every
replica reads the same sums after the same step, so all decide alike without another exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpu_trainer.backends.base import Backend
from tpu_trainer.bucket import BROKEN, LOSS, SAVE, SQUARE, STOP, WEIGHT

if TYPE_CHECKING:
    from torch import Tensor

MOST_STEPS = 10
"""Steps between two readings at most, and between two reports."""

STOP_SECONDS = 1.0
"""A request to stop should not wait longer than this for its reading; a step that takes longer is read by itself."""


@dataclass(frozen=True)
class Reading:
    """losses: the global loss of every step read; finite: whether that loss and the gradients of its step were.

    stopping, saving: a replica asked for the end, or for a checkpoint, in one of them.

    squares: per step the mean over the replicas of their own gradient's square, and the square of the global gradient;
    empty where the noise scale is not wanted.
    """

    losses: tuple[float, ...]
    finite: tuple[bool, ...]
    stopping: bool = False
    saving: bool = False
    squares: tuple[tuple[float, float], ...] = ()

    def then(self, later: Reading) -> Reading:
        return Reading(
            self.losses + later.losses,
            self.finite + later.finite,
            self.stopping or later.stopping,
            self.saving or later.saving,
            self.squares + later.squares,
        )


class Signals:
    """Holds the signals that have not been read yet. `read_through` is the last step that has been."""

    def __init__(self, backend: Backend, step: int) -> None:
        self._backend = backend
        self._unread: list[Tensor] = []
        self._globals: list[Tensor] = []
        # Until the pace is known: the first steps compile, and a request to stop may have waited for that already.
        self._every = 1
        self.read_through = step

    def add(self, summed: Tensor, global_square: Tensor | None) -> None:
        """One step's summed signals, and the square of its global gradient where that is wanted."""
        self._unread.append(summed)
        if global_square is not None:
            self._globals.append(global_square)

    def due(self, step: int) -> bool:
        return step % self._every == 0

    def settle_interval(self, step_seconds: float) -> None:
        """Called by all replicas after the same step, each with its own measure: they agree on the slowest."""
        if not self._backend.reads_free:
            slowest = max(seconds for (seconds,) in self._backend.gather([step_seconds]))
            self._every = max(1, min(MOST_STEPS, int(STOP_SECONDS / max(slowest, 1e-9))))

    def read(self, *, whole: bool) -> Reading | None:
        """Waits for the results; of all steps if `whole`, else without the newest where the device works ahead.

        None where there is nothing to read. A reading that stops the run, or asks for a checkpoint, is of all steps.
        """
        kept = 0 if whole or self._backend.reads_free else 1
        count = len(self._unread) - kept
        if count < 1:
            return None
        reading = self._take(count)
        rest = self._take(kept) if (reading.stopping or reading.saving) and kept else None
        return reading if rest is None else reading.then(rest)

    def _take(self, count: int) -> Reading:
        """The `count` oldest."""
        here = self._backend.to_host([*self._unread[:count], *self._globals[:count]])
        signals, squares = [tensor.tolist() for tensor in here[:count]], [float(tensor) for tensor in here[count:]]
        del self._unread[:count], self._globals[:count]
        self.read_through += count
        return _reading(signals, squares, self._backend.terms)


def _reading(values: Sequence[Sequence[float]], squares: Sequence[float], terms: int) -> Reading:
    losses = tuple(row[LOSS] / row[WEIGHT] if row[WEIGHT] else math.nan for row in values)
    return Reading(
        losses=losses,
        finite=tuple(math.isfinite(loss) and row[BROKEN] == 0 for loss, row in zip(losses, values, strict=True)),
        stopping=any(row[STOP] > 0 for row in values),
        saving=any(row[SAVE] > 0 for row in values),
        squares=tuple((row[SQUARE] / terms, whole) for row, whole in zip(values, squares, strict=False)),
    )
