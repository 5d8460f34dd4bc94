"""What the commands print: a console of the right width, columns, documents, and ages."""

import json
import shutil
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from tpu_training_operator.api.words import duration

if TYPE_CHECKING:
    from rich.console import Console


def console(pipe_width: int) -> "Console":
    """Returns a console for stdout. A pipe has no width, and rich's default of 80 would break long lines into many."""
    # Importing rich takes as long as half of the API.
    from rich.console import Console

    default = Console(highlight=False)
    if not default.is_terminal:
        return Console(highlight=False, width=pipe_width)
    if default.is_dumb_terminal:
        # rich assumes that a dumb terminal has 80 columns.
        width, height = shutil.get_terminal_size()
        return Console(highlight=False, width=width, height=height)
    return default


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows as kubectl does, in columns as wide as their longest cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_document(document: Any, output: str) -> None:
    """Prints the document as `output` says: json or yaml."""
    if output == "json":
        click.echo(json.dumps(document, indent=2))
        return
    import yaml

    click.echo(yaml.safe_dump(document, sort_keys=False, width=120), nl=False)


def ago(moment: datetime, now: datetime) -> str:
    return f"{duration((now - moment).total_seconds())} ago"
