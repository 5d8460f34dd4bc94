"""Rows on a terminal or in a pipe, by rich. Used by `tpujob watch` and `tpujob status`."""

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tpu_training_operator.cli.job_rows import Row

# A pipe has no width; lines that long can be read and searched.
_PIPE_WIDTH = 120
_LABEL_WIDTH = 11


def console() -> Console:
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def screen(headline: str, style: str, rows: Sequence[Row], note: str | None = None) -> RenderableType:
    """`note`: a last line about the picture itself."""
    table = Table.grid(padding=(0, 1))
    table.add_column(width=_LABEL_WIDTH, style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(f" {row.label}", Text(row.text, style=row.style))
    parts: list[RenderableType] = [Text(headline, style=f"bold {style}".strip()), table]
    return Group(*parts, Text(note, style="yellow")) if note else Group(*parts)
