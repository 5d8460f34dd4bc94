"""The schedulers that a task brings, and whether they were built for as many steps as this run has.

A recipe's steps follow from its epochs, its data and the batch that the slice has, so that a number written into a
script, or computed with a batch of its own, is often another one. Schedulers are known by the attributes of torch's,
which others share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch.optim.lr_scheduler import OneCycleLR, PolynomialLR

from tpu_trainer.contract.errors import UserCodeError

_LENGTHS = ("total_steps", "T_max", "total_iters", "num_training_steps")
"""What schedulers call the number of steps for which they are built; the last is transformers'."""


@dataclass(frozen=True)
class SteppedScheduler:
    """A scheduler, stepped after every `frequency`-th "step" or "epoch" of the run. With `monitor` it is stepped with
    that metric instead, after every evaluation."""

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None


def find_differences(schedulers: Sequence[SteppedScheduler], steps: int, epochs: int | None) -> Iterator[str]:
    """Yields one text for each way in which a scheduler does not fit a run of so many steps and epochs; `epochs` is
    None if they are unknown.

    Raises:
        UserCodeError: it would raise in the middle of the run.
    """
    for each in schedulers:
        count = steps if each.interval == "step" else epochs
        if count is not None and each.monitor is None:
            unit = f"{each.interval}s" if each.frequency == 1 else "calls of step()"
            yield from _differences(each.scheduler, count // each.frequency, unit)


def _differences(scheduler: Any, count: int, unit: str) -> Iterator[str]:
    """Yields the same for one scheduler, which is stepped `count` times."""
    name = type(scheduler).__name__
    inner, starts = getattr(scheduler, "_schedulers", None), getattr(scheduler, "_milestones", None)
    if inner is not None and starts is not None:
        yield from _never_reached(name, starts, count, unit)
        for each, (begin, end) in zip(inner, pairwise([0, *starts, count]), strict=False):
            if begin < count:
                yield from _differences(each, min(end, count) - begin, unit)
        return
    for each in inner or ():
        yield from _differences(each, count, unit)
    yield from _never_reached(name, getattr(scheduler, "milestones", ()), count, unit)
    for setting, built in _lengths(scheduler):
        said = f"{name} is built for {built} {unit} ({setting}), and this run steps it {count} times"
        remedy = "Build it with the run's own number (docs/tasks.md)"
        if isinstance(scheduler, OneCycleLR) and count > built:
            raise UserCodeError(f"{said}: it would end the run there. {remedy}")
        # One more or less is a matter of taste.
        slack = max(1, count // 100)
        if built > count + slack:
            yield f"{said}: it does not come to its end. {remedy}"
        elif built < count - slack and _goes_on(scheduler, setting):
            yield f"{said}: for the rest of the run the rate is what it makes of steps it was not built for. {remedy}"


def _lengths(scheduler: Any) -> Iterator[tuple[str, int]]:
    # transformers' schedulers are functools.partial objects in a LambdaLR.
    of_functions = [getattr(each, "keywords", {}) for each in getattr(scheduler, "lr_lambdas", ())]
    for values in (getattr(scheduler, "__dict__", {}), *of_functions):
        yield from ((name, values[name]) for name in _LENGTHS if isinstance(values.get(name), int))


def _goes_on(scheduler: Any, setting: str) -> bool:
    """Whether the rate is another after the end than a user wants: 0, or rising. A warm-up that is over is none."""
    if setting != "total_iters":
        return True
    return isinstance(scheduler, PolynomialLR) or getattr(scheduler, "end_factor", None) == 0


def _never_reached(name: str, milestones: Any, count: int, unit: str) -> Iterator[str]:
    if late := [str(milestone) for milestone in sorted(milestones) if milestone >= count]:
        yield (
            f"{name} never reaches its milestones {', '.join(late)}: this run steps it {count} times, counted in {unit}"
        )
