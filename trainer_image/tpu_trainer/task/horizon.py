"""The schedulers that a task brings, and whether they were built for as many steps as this run has.

A recipe's steps follow from its epochs, its data and the slice's batch, so a number that a script contains or computes
from its own batch is often wrong. Schedulers are recognized by the attributes of torch's, which others share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch.optim.lr_scheduler import OneCycleLR, PolynomialLR

from tpu_trainer.contract.errors import UserCodeError

_LENGTHS = ("total_steps", "T_max", "total_iters", "num_training_steps")
"""The attributes in which schedulers keep the number of steps they are built for; the last is transformers'."""


@dataclass(frozen=True)
class SteppedScheduler:
    """A scheduler that is stepped after every `frequency`-th "step" or "epoch" of the run, or with `monitor`, with that
    metric after every evaluation."""

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None


def find_differences(schedulers: Sequence[SteppedScheduler], steps: int, epochs: int | None) -> Iterator[str]:
    """Yields one text for each way in which a scheduler does not fit a run of so many steps and epochs; `epochs` is
    None if they are unknown.

    Raises:
        UserCodeError: a scheduler would raise in the middle of the run.
    """
    for scheduled in schedulers:
        count = steps if scheduled.interval == "step" else epochs
        if count is not None and scheduled.monitor is None:
            unit = f"{scheduled.interval}s" if scheduled.frequency == 1 else "calls of step()"
            yield from _find_in(scheduled.scheduler, count // scheduled.frequency, unit)


def _find_in(scheduler: Any, count: int, unit: str) -> Iterator[str]:
    """Does the same for one scheduler, which is stepped `count` times."""
    name = type(scheduler).__name__
    inner, starts = getattr(scheduler, "_schedulers", None), getattr(scheduler, "_milestones", None)
    if inner is not None and starts is not None:
        yield from _find_unreached(name, starts, count, unit)
        for part, (begin, end) in zip(inner, pairwise([0, *starts, count]), strict=False):
            if begin < count:
                yield from _find_in(part, min(end, count) - begin, unit)
        return
    for part in inner or ():
        yield from _find_in(part, count, unit)
    yield from _find_unreached(name, getattr(scheduler, "milestones", ()), count, unit)
    for setting, built in _lengths(scheduler):
        text = f"{name} is built for {built} {unit} ({setting}), and this run steps it {count} times"
        remedy = "Build it with the run's own number (docs/tasks.md)"
        if isinstance(scheduler, OneCycleLR) and count > built:
            raise UserCodeError(f"{text}: it would end the run there. {remedy}")
        # One step more or less does not matter.
        slack = max(1, count // 100)
        if built > count + slack:
            yield f"{text}: it does not reach its end. {remedy}"
        elif built < count - slack and _ends_badly(scheduler, setting):
            yield f"{text}: its rates after that are arbitrary. {remedy}"


def _lengths(scheduler: Any) -> Iterator[tuple[str, int]]:
    # transformers' schedulers are functools.partial objects in a LambdaLR.
    of_functions = [getattr(function, "keywords", {}) for function in getattr(scheduler, "lr_lambdas", ())]
    for values in (getattr(scheduler, "__dict__", {}), *of_functions):
        yield from ((name, values[name]) for name in _LENGTHS if isinstance(values.get(name), int))


def _ends_badly(scheduler: Any, setting: str) -> bool:
    """Returns whether the rate after the scheduler's end is useless: 0, or rising. A finished warm-up is fine."""
    if setting != "total_iters":
        return True
    return isinstance(scheduler, PolynomialLR) or getattr(scheduler, "end_factor", None) == 0


def _find_unreached(name: str, milestones: Any, count: int, unit: str) -> Iterator[str]:
    if late := [str(milestone) for milestone in sorted(milestones) if milestone >= count]:
        yield (
            f"{name} never reaches its milestones {', '.join(late)}: this run steps it {count} times, counted in {unit}"
        )
