"""The line that every loop prints once it has read a loss, and the stopwatch that reads it from outside.

A loop's own claims about its speed are ignored: only the arrival times of its lines count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from bench.trainer.process import Line

READ_EVERY = 10
"""Steps between two losses read from the device: as often as this trainer does."""

_LINE = re.compile(r"step (\d+)(?:/\d+)?: loss ([^\s,]+)")


@dataclass(frozen=True)
class Report:
    """After `step` steps the loss was `loss`; the line arrived at `at` (monotonic seconds), when the main thread had
    been `busy` for so many seconds."""

    step: int
    loss: float
    at: float
    busy: float


class Pace(NamedTuple):
    """host: milliseconds of a processor that the main thread uses in a step."""

    steps_per_second: float
    host: float


class NotComparable(Exception):
    """A run that trained nothing, or too little to be timed; the message says which."""


def due(step: int, steps: int) -> bool:
    return step % READ_EVERY == 0 or step == steps


def report(step: int, loss: float) -> None:
    # A progress bar leaves the cursor in the middle of a line.
    print(f"\nstep {step}: loss {loss:.6g}", flush=True)


def parse(line: Line) -> Report | None:
    """None for a line that is not a report."""
    found = _LINE.match(line.text)
    return Report(int(found[1]), float(found[2]), line.at, line.busy) if found else None


def pace(reports: Sequence[Report], warm_up: int) -> Pace:
    """Returns the pace over all steps after the first report with at least `warm_up` steps done.

    Raises NotComparable if there are fewer than two such reports.
    """
    timed = [report for report in reports if report.step >= warm_up and report.busy]
    if len(timed) < 2:
        raise NotComparable(f"fewer than two reports after {warm_up} steps of warm-up")
    first, last = timed[0], timed[-1]
    steps = last.step - first.step
    return Pace(steps / (last.at - first.at), 1e3 * (last.busy - first.busy) / steps)


def check_learned(reports: Sequence[Report], chance: float) -> None:
    """Raises NotComparable if the last loss is not better than `chance`: not training at all is the fastest."""
    last = reports[-1]
    # Written so that a NaN does not pass.
    if not last.loss < 0.9 * chance:
        raise NotComparable(f"nothing was learned: loss {last.loss} after {last.step} steps, {chance:.3g} is chance")
