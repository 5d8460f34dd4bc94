"""`tpujob report`: the page about a training, made from the history that its trainer left behind."""

from pathlib import Path

import click

from tpu_training_operator.api.validation import Problem
from tpu_training_operator.cli.errors import BadInput
from tpu_training_operator.cli.job_end import job_end
from tpu_training_operator.report.ending import JobEnd
from tpu_training_operator.report.history import HISTORY, UnreadableHistory, parse_history
from tpu_training_operator.report.page import render

PAGE = "report.html"


@click.command()
@click.argument("place")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=PAGE,
    show_default=True,
    help="Where to write the page.",
)
def report(place: str, output: Path) -> None:
    """Write the report page of a job; PLACE is its spec.report.uri, or a directory."""
    write_page(read_history(place), place, output, None if is_uri(place) else job_end(Path(place)))
    click.echo(output)


def is_uri(place: str) -> bool:
    return "://" in place


def read_history(place: str) -> bytes:
    """Raises BadInput if there is none, or it cannot be read."""
    return _from_bucket(place) if is_uri(place) else _from_directory(Path(place))


def write_page(document: bytes, place: str, output: Path, end: JobEnd | None = None) -> None:
    """Raises BadInput if the document, read from `place`, is not a history."""
    try:
        page = render(parse_history(document), end)
    except UnreadableHistory as error:
        raise BadInput(f"{place.rstrip('/')}/{HISTORY}", [Problem("", str(error))]) from error
    # A name that a trainer took from a file system may hold bytes that have no UTF-8 form.
    output.write_text(page, encoding="utf-8", errors="replace")


def _from_directory(directory: Path) -> bytes:
    try:
        return (directory / HISTORY).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing(str(directory)) from error


def _from_bucket(uri: str) -> bytes:
    try:
        import fsspec  # type: ignore[import-untyped]

        document: bytes = fsspec.open(f"{uri.rstrip('/')}/{HISTORY}").open().read()
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
    return document


def _missing(place: str) -> BadInput:
    return BadInput(place, [Problem("", f"no {HISTORY} here; the trainer writes it to spec.report.uri")])
