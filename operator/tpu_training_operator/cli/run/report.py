"""`tpujob report` writes the page about a training, made from the history that the trainer wrote."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from tpu_contract.protocol import HISTORY_FILE, HISTORY_SCHEMA
from tpu_training_operator.api.status import RungStatus
from tpu_training_operator.api.validation import Problem
from tpu_training_operator.cli.common.cluster import Connection, Target, cluster_options, find_job
from tpu_training_operator.cli.common.errors import BadInput
from tpu_training_operator.cli.run.job_end import job_end, rungs_of
from tpu_training_operator.domain.objects.run_spec import run_spec
from tpu_training_operator.html_report.ending import JobEnd
from tpu_training_operator.html_report.history import UnreadableHistory, parse_history
from tpu_training_operator.html_report.page import render

if TYPE_CHECKING:
    from tpu_training_operator.cli.common.job_file import JobFile
    from tpu_training_operator.local.run import RunOutcome

PAGE = "report.html"
# The trainer keeps a history within a few MiB, however long the run.
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
    # The library that reads buckets runs its own event loop.
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
    """Returns spec.report.uri. Raises BadInput for a directory: on the workers it is another than on this machine."""
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
    """Reads the history in a bucket or a directory. Raises BadInput if there is none, or it cannot be read."""
    return _read_from_bucket(place) if is_uri(place) else _read_from_directory(Path(place))


def write_page(
    document: bytes, place: str, output: Path, end: JobEnd | None = None, rungs: Sequence[RungStatus] = ()
) -> None:
    """Writes the page to `output`. Raises BadInput if the document, read from `place`, is not a history."""
    try:
        page = render(parse_history(document), end, rungs)
    except UnreadableHistory as error:
        raise BadInput(f"{place.rstrip('/')}/{HISTORY_FILE}", [Problem("", str(error))]) from error
    # A file name in a history may hold bytes that are not UTF-8.
    output.write_text(page, encoding="utf-8", errors="replace")


def run_history(file: "JobFile", outcome: "RunOutcome", directory: Path) -> tuple[bytes, str] | None:
    """Returns the history of a local run and where it is from: the worker's own, or else one made of its reports. None
    for a command that left none, and for a job that never began."""
    default, report = str(directory), file.job.spec.report
    place = report.uri if report is not None and report.uri else default
    try:
        document = read_history(place)
        if place == default or _is_written_since(document, datetime.now(UTC) - timedelta(seconds=outcome.seconds)):
            return document, place
    except BadInput as error:
        if is_uri(place):
            error.show()
    if file.job.spec.trainer.entrypoint is None or not outcome.status.attempt:
        return None
    return lost_history(file, outcome), place


def lost_history(file: "JobFile", outcome: "RunOutcome") -> bytes:
    """Makes a history from the reports of a worker that was killed before it could write one."""
    status, losses = outcome.status, outcome.losses
    number = max(1, status.attempt)
    reported = status.progress.step if status.progress else 0
    attempt = {"number": number, "first": 0, "last": max(reported, *losses, 0), "split": {}}
    points = [
        {"step": step, "count": 1, "mean": loss, "low": loss, "high": loss, "broken": int(loss is None)}
        for step, loss in losses.items()
    ]
    document = {
        "schema": HISTORY_SCHEMA,
        "runSpec": run_spec(file.job, file.resolution, number),
        "written": datetime.now(UTC).isoformat(),
        "recorded": {"attempts": [attempt], "losses": points},
    }
    return json.dumps(document).encode()


def _is_written_since(document: bytes, begun: datetime) -> bool:
    """Returns whether the document was written since then: the place may still hold an earlier run's. An unreadable one
    counts: the page's writer reports it."""
    try:
        return parse_history(document).written >= begun
    except UnreadableHistory:
        return True


def _read_from_directory(directory: Path) -> bytes:
    try:
        with (directory / HISTORY_FILE).open("rb") as file:
            return _read_bounded(file, str(directory))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing_history(str(directory)) from error
    except OSError as error:
        raise BadInput(str(directory), [Problem("", f"cannot be read: {error.strerror or error}")]) from error


def _read_from_bucket(uri: str) -> bytes:
    try:
        import fsspec  # type: ignore[import-untyped]

        with fsspec.open(f"{uri.rstrip('/')}/{HISTORY_FILE}") as file:
            return _read_bounded(file, uri)
    except BadInput:
        raise
    except ImportError as error:
        scheme, _, _ = uri.partition("://")
        needed = "pip install gcsfs, or download the file and name its directory"
        raise BadInput(uri, [Problem("", f"reading {scheme}:// needs fsspec and gcsfs: {needed}")]) from error
    except FileNotFoundError as error:
        raise _missing_history(uri) from error
    except Exception as error:
        # Each file system raises its own errors for denied access and lost connections.
        reason = (str(error).strip().splitlines() or [""])[-1]
        raise BadInput(uri, [Problem("", f"cannot be read: {type(error).__name__}: {reason}")]) from error


def _read_bounded(file: BinaryIO, place: str) -> bytes:
    document = file.read(_LARGEST_HISTORY + 1)
    if len(document) > _LARGEST_HISTORY:
        problem = f"{HISTORY_FILE} has more than {_LARGEST_HISTORY // 1024**2} MiB, which no trainer writes"
        raise BadInput(place, [Problem("", problem)])
    return document


def _missing_history(place: str) -> BadInput:
    return BadInput(place, [Problem("", f"no {HISTORY_FILE} here; the trainer writes it to spec.report.uri")])
