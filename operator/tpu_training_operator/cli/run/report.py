"""`tpujob report`: the page about a training, made from the history that its trainer left behind."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from tpu_training_operator.api.validation import Problem
from tpu_training_operator.cli.common.cluster import Connection, Target, cluster_options, find_job
from tpu_training_operator.cli.common.errors import BadInput
from tpu_training_operator.cli.run.job_end import job_end, rungs_of
from tpu_training_operator.domain.objects.run_spec import run_spec
from tpu_training_operator.html_report.ending import JobEnd
from tpu_training_operator.html_report.history import HISTORY, SCHEMA, UnreadableHistory, parse_history
from tpu_training_operator.html_report.ladder import RungRow
from tpu_training_operator.html_report.page import render

if TYPE_CHECKING:
    from tpu_training_operator.cli.common.job_file import JobFile
    from tpu_training_operator.local.run import RunOutcome

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
        target.run(lambda connection: _write_job_page(connection, job, place, output))
    if place is None:
        raise click.UsageError("give a PLACE or --job NAME")
    write_page(read_history(place), place, output, None if is_uri(place) else job_end(Path(place)))
    click.echo(output)


async def _write_job_page(connection: Connection, name: str, place: str | None, output: Path) -> int:
    job = await find_job(connection, name)
    place = place or _report_uri(name, job)
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


def _report_uri(name: str, job: Mapping[str, Any]) -> str:
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
    return _read_from_bucket(place) if is_uri(place) else _read_from_directory(Path(place))


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


def run_history(file: "JobFile", outcome: "RunOutcome", directory: Path) -> tuple[bytes, str] | None:
    """The file, and the place it is from. None if there is no page to make: a loop of the user's own need not leave a
    history, and a job that never began has none."""
    own, report = str(directory), file.job.spec.report
    place = report.uri if report is not None and report.uri else own
    try:
        document = read_history(place)
        if place == own or _is_written_since(document, datetime.now(UTC) - timedelta(seconds=outcome.seconds)):
            return document, place
    except BadInput as error:
        if is_uri(place):
            error.show()
    if file.job.spec.trainer.entrypoint is None or not outcome.status.attempt:
        return None
    return lost_history(file, outcome), place


def lost_history(file: "JobFile", outcome: "RunOutcome") -> bytes:
    """Of a run whose worker was killed before it could leave one: what the operator has heard."""
    status, losses = outcome.status, outcome.curves.losses
    number = max(1, status.attempt)
    told = status.progress.step if status.progress else 0
    attempt = {"number": number, "first": 0, "last": max(told, *losses, 0), "split": {}}
    points = [
        {"step": step, "count": 1, "mean": loss, "low": loss, "high": loss, "broken": int(loss is None)}
        for step, loss in losses.items()
    ]
    document = {
        "schema": SCHEMA,
        "runSpec": run_spec(file.job, file.resolution, number),
        "written": datetime.now(UTC).isoformat(),
        "recorded": {"attempts": [attempt], "losses": points},
    }
    return json.dumps(document).encode()


def _is_written_since(document: bytes, begun: datetime) -> bool:
    """Whether it was written since then: a place for reports may hold an earlier run's. An unreadable one is reported
    when the page is made."""
    try:
        return parse_history(document).written >= begun
    except UnreadableHistory:
        return True


def _read_from_directory(directory: Path) -> bytes:
    try:
        with (directory / HISTORY).open("rb") as file:
            return _read_bounded(file, str(directory))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing_history(str(directory)) from error
    except OSError as error:
        raise BadInput(str(directory), [Problem("", f"cannot be read: {error.strerror or error}")]) from error


def _read_from_bucket(uri: str) -> bytes:
    try:
        import fsspec  # type: ignore[import-untyped]

        with fsspec.open(f"{uri.rstrip('/')}/{HISTORY}") as file:
            return _read_bounded(file, uri)
    except BadInput:
        raise
    except ImportError as error:
        scheme, _, _ = uri.partition("://")
        needed = "pip install 'tpu-training-operator[gcs]', or download the file and name its directory"
        raise BadInput(uri, [Problem("", f"reading {scheme}:// needs fsspec and gcsfs: {needed}")]) from error
    except FileNotFoundError as error:
        raise _missing_history(uri) from error
    except Exception as error:
        # Each file system has errors of its own for denied access and lost connections.
        said = (str(error).strip().splitlines() or [""])[-1]
        raise BadInput(uri, [Problem("", f"cannot be read: {type(error).__name__}: {said}")]) from error


def _read_bounded(file: BinaryIO, place: str) -> bytes:
    document = file.read(_LARGEST_HISTORY + 1)
    if len(document) > _LARGEST_HISTORY:
        problem = f"{HISTORY} has more than {_LARGEST_HISTORY // 1024**2} MiB, which no trainer writes"
        raise BadInput(place, [Problem("", problem)])
    return document


def _missing_history(place: str) -> BadInput:
    return BadInput(place, [Problem("", f"no {HISTORY} here; the trainer writes it to spec.report.uri")])
