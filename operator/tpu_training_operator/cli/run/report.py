"""`tpujob report`: the page about a training, made from the history that its trainer left behind."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import click

from tpu_training_operator.api.validation import Problem
from tpu_training_operator.cli.common.cluster import Connection, Target, cluster_options, find_job
from tpu_training_operator.cli.common.errors import BadInput
from tpu_training_operator.cli.run.job_end import job_end, rungs_of
from tpu_training_operator.html_report.ending import JobEnd
from tpu_training_operator.html_report.history import HISTORY, UnreadableHistory, parse_history
from tpu_training_operator.html_report.ladder import RungRow
from tpu_training_operator.html_report.page import render

PAGE = "report.html"
# A trainer's has at most some MiB, however long the run.
_LARGEST_HISTORY = 64 * 1024**2


@click.command()
@click.argument("place", required=False)
@click.option(
    "--job",
    help="A job of the cluster. The page also shows its ladder, and PLACE defaults to the job's spec.report.uri, if"
    " that is a bucket.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=PAGE,
    show_default=True,
    help="Where to write the page.",
)
@cluster_options
def report(place: str | None, job: str | None, output: Path, target: Target) -> None:
    """Write the report page of a job; PLACE is its spec.report.uri, or a directory."""
    if job is not None:
        target.run(lambda connection: _of_job(connection, job, place, output))
    if place is None:
        raise click.UsageError("give a PLACE or --job NAME")
    write_page(read_history(place), place, output, None if is_uri(place) else job_end(Path(place)))
    click.echo(output)


async def _of_job(connection: Connection, name: str, place: str | None, output: Path) -> int:
    job = await find_job(connection, name)
    place = place or _own_place(name, job)
    status = job.get("status") or {}
    # The library that reads buckets has an event loop of its own.
    document = await asyncio.to_thread(read_history, place)
    write_page(
        document,
        place,
        output,
        rungs=rungs_of(ladder.get("rungs") if isinstance(ladder := status.get("ladder"), dict) else None),
    )
    click.echo(output)
    return 0


def _own_place(name: str, job: Mapping[str, Any]) -> str:
    """Raises BadInput for a directory: the workers' is not this machine's, and whoever made the job chose the path."""
    place = ((job.get("spec") or {}).get("report") or {}).get("uri")
    if place is None:
        raise BadInput(name, [Problem("spec.report.uri", "is not set, so the job leaves no report")])
    if not str(place).startswith("gs://"):
        problem = f"{place} is a directory of the workers; if it is mounted here, name it: report {place} --job {name}"
        raise BadInput(name, [Problem("spec.report.uri", problem)])
    return str(place)


def is_uri(place: str) -> bool:
    return "://" in place


def read_history(place: str) -> bytes:
    """Raises BadInput if there is none, or it cannot be read."""
    return _from_bucket(place) if is_uri(place) else _from_directory(Path(place))


def write_page(
    document: bytes, place: str, output: Path, end: JobEnd | None = None, rungs: Sequence[RungRow] = ()
) -> None:
    """Raises BadInput if the document, read from `place`, is not a history."""
    try:
        page = render(parse_history(document), end, rungs)
    except UnreadableHistory as error:
        raise BadInput(f"{place.rstrip('/')}/{HISTORY}", [Problem("", str(error))]) from error
    # A name that a trainer took from a file system may hold bytes that have no UTF-8 form.
    output.write_text(page, encoding="utf-8", errors="replace")


def _from_directory(directory: Path) -> bytes:
    try:
        with (directory / HISTORY).open("rb") as file:
            return _bounded(file, str(directory))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing(str(directory)) from error
    except OSError as error:
        raise BadInput(str(directory), [Problem("", f"cannot be read: {error.strerror or error}")]) from error


def _from_bucket(uri: str) -> bytes:
    try:
        import fsspec  # type: ignore[import-untyped]

        with fsspec.open(f"{uri.rstrip('/')}/{HISTORY}") as file:
            return _bounded(file, uri)
    except BadInput:
        raise
    except ImportError as error:
        scheme, _, _ = uri.partition("://")
        needed = "pip install 'tpu-training-operator[gcs]', or download the file and name its directory"
        raise BadInput(uri, [Problem("", f"reading {scheme}:// needs fsspec and gcsfs: {needed}")]) from error
    except FileNotFoundError as error:
        raise _missing(uri) from error
    except Exception as error:
        # Each file system has errors of its own for denied access and lost connections.
        said = (str(error).strip().splitlines() or [""])[-1]
        raise BadInput(uri, [Problem("", f"cannot be read: {type(error).__name__}: {said}")]) from error


def _bounded(file: BinaryIO, place: str) -> bytes:
    document = file.read(_LARGEST_HISTORY + 1)
    if len(document) > _LARGEST_HISTORY:
        problem = f"{HISTORY} has more than {_LARGEST_HISTORY // 1024**2} MiB, which no trainer writes"
        raise BadInput(place, [Problem("", problem)])
    return document


def _missing(place: str) -> BadInput:
    return BadInput(place, [Problem("", f"no {HISTORY} here; the trainer writes it to spec.report.uri")])
