"""The options of `tpujob plan` that say how long a step takes, and on which slice that was measured."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import click

from tpu_training_operator.api.slice import Hardware
from tpu_training_operator.api.status import Status
from tpu_training_operator.api.words import read_number
from tpu_training_operator.cli.common.job_file import JobFile
from tpu_training_operator.cli.plan.moved import moved
from tpu_training_operator.domain.job.recipe.cost import StepTime, times_in
from tpu_training_operator.domain.job.topology import SliceLayout

_OPTION = "--step-seconds"
_FROM_JOB = "--from-job"
_LONGEST = 1e9


GivenTime = tuple[float, str]
"""A measured time of a step in seconds, and its accelerator type; "" for the job's own slice."""


def _read(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> tuple[GivenTime, ...]:
    return tuple(map(_given_time, texts))


def _given_time(text: str) -> GivenTime:
    number, _, accelerator_type = text.partition("@")
    seconds = read_number(number)
    if seconds is None or not 0 < seconds < _LONGEST:
        example = "such as 0.36 or 0.36@v5litepod-16"
        raise click.BadParameter(f"{number!r} is not a number of seconds above 0 and below {_LONGEST:g}, {example}")
    return seconds, accelerator_type


def step_seconds_option(command: Callable[..., None]) -> Callable[..., None]:
    """Gives the command the times as `given` and `measured_file`, which `step_times` takes."""
    from_job = click.option(
        _FROM_JOB,
        "measured_file",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="Take the times from this job and from its rungs: what `kubectl get tpujob NAME -o json` printed.",
    )
    return click.option(
        _OPTION,
        "given",
        callback=_read,
        metavar="SECONDS[@TYPE]",
        multiple=True,
        help="Measured time of one step on this accelerator type, by default the job's own, to show hours and"
        " chip-hours. Other slices of its generation follow from it. Can be repeated.",
    )(from_job(command))


def step_times(file: JobFile, given: Sequence[GivenTime], measured_file: Path | None) -> list[StepTime]:
    """Returns the times with what a replica computed in them. Raises BadInput for a type that the job cannot run on."""
    elsewhere = iter(moved(file, [accelerator_type for _, accelerator_type in given if accelerator_type], _OPTION))
    times = [StepTime.of(next(elsewhere) if on else file.resolution, seconds, "measured on") for seconds, on in given]
    return times if measured_file is None else [*times, *_times_of_job(measured_file)]


def _times_of_job(path: Path) -> list[StepTime]:
    """Returns the times that a job's status tells. Raises UsageError if the file is not a job, or tells of none."""
    try:
        job = json.loads(path.read_bytes())
        hardware, name = job["spec"]["slice"].get("hardware"), str(job["metadata"]["name"])
        times = list(times_in(Status.read(job.get("status")), name))
    except OSError as error:
        raise click.UsageError(f"{_FROM_JOB} {path}: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        expected = "what `kubectl get tpujob NAME -o json` prints"
        raise click.UsageError(f"{_FROM_JOB} {path}: expected {expected}, got something else") from None
    if hardware == Hardware.CPU:
        raise click.UsageError(f"{_FROM_JOB} {path}: {name} ran on hardware CPU, whose speed says nothing of chips")
    if not times:
        raise click.UsageError(f"{_FROM_JOB} {path}: the status of {name} has no examplesPerSecond yet")
    return times


def unknown_times(times: Sequence[StepTime], layouts: Iterable[SliceLayout]) -> Iterator[str]:
    """Yields a sentence for each generation of which no step was measured, if one was on another generation."""
    known = {time.generation for time in times}
    first = {layout.shape.generation: layout.shape.accelerator_type for layout in reversed([*layouts])}
    for generation, accelerator_type in first.items() if known else ():
        if generation not in known:
            yield (
                f"no step was measured on {generation}, and one on {', '.join(sorted(known))} says nothing about it;"
                f" measure one and add {_OPTION} SECONDS@{accelerator_type}"
            )
