"""The options of `tpujob plan` that say how long a step takes, and on which slice that was measured."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import click

from tpu_training_operator.api.words import read_number
from tpu_training_operator.cli.common.job_file import JobFile
from tpu_training_operator.cli.plan.moved import moved
from tpu_training_operator.domain.job.recipe.cost import StepTime
from tpu_training_operator.domain.job.topology import SliceLayout

_OPTION = "--step-seconds"
_LONGEST = 1e9


@dataclass(frozen=True)
class GivenTime:
    """A measured time of a step. `accelerator_type`: None for the job's own slice."""

    seconds: float
    accelerator_type: str | None


def _read(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> tuple[GivenTime, ...]:
    return tuple(map(_given_time, texts))


def _given_time(text: str) -> GivenTime:
    number, _, accelerator_type = text.partition("@")
    seconds = read_number(number)
    if seconds is None or not 0 < seconds < _LONGEST:
        example = "such as 0.36 or 0.36@v5litepod-16"
        raise click.BadParameter(f"{number!r} is not a number of seconds above 0 and below {_LONGEST:g}, {example}")
    return GivenTime(seconds, accelerator_type or None)


def step_seconds_option(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        _OPTION,
        "given",
        callback=_read,
        metavar="SECONDS[@TYPE]",
        multiple=True,
        help="Measured time of one step on this accelerator type, by default the job's own, to show hours and"
        " chip-hours. Other slices of its generation follow from it. Can be repeated.",
    )(command)


def step_times(file: JobFile, given: Sequence[GivenTime]) -> list[StepTime]:
    """Returns the times with what a replica computed in them. Raises BadInput for a type that the job cannot run on."""
    elsewhere = iter(moved(file, [time.accelerator_type for time in given if time.accelerator_type], _OPTION))
    return [
        StepTime.of(next(elsewhere) if time.accelerator_type else file.resolution, time.seconds, "measured on")
        for time in given
    ]


def unknown_times(times: Sequence[StepTime], layouts: Iterable[SliceLayout]) -> Iterator[str]:
    """Yields a sentence for each generation of which no step was measured, if one was on another generation."""
    known = {time.layout.shape.generation for time in times}
    first = {layout.shape.generation: layout.shape.accelerator_type for layout in reversed([*layouts])}
    for generation, accelerator_type in first.items() if known else ():
        if generation not in known:
            yield (
                f"no step was measured on {generation}, and one on {', '.join(sorted(known))} says nothing about it;"
                f" measure one and add {_OPTION} SECONDS@{accelerator_type}"
            )
