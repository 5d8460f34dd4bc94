"""Labelled lines on a terminal or in a pipe, drawn by rich."""

from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

# A pipe has no width; lines of this length can be read and searched.
_PIPE_WIDTH = 120
_LABEL_WIDTH = 11


def console() -> Console:
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def screen(
    headline: str, style: str, rows: Iterable[tuple[str, Sequence[str], str]], note: str | None = None
) -> RenderableType:
    """`rows`: a label, its lines and their style. `note`: a last line about the display itself."""
    table = Table.grid(padding=(0, 1))
    table.add_column(width=_LABEL_WIDTH, style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, lines, line_style in rows:
        for index, line in enumerate(lines):
            table.add_row("" if index else f" {label}", Text(line, style=line_style))
    parts: list[RenderableType] = [Text(headline, style=f"bold {style}".strip()), table]
    return Group(*parts, Text(note, style="yellow")) if note else Group(*parts)
