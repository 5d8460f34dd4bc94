"""Shows a job: in full, live on a terminal, or in a pipe as a line for every change."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tpu_training_operator.cli.common.errors import program_name
from tpu_training_operator.cli.common.terminal import console
from tpu_training_operator.cli.watch.job_view import JobView
from tpu_training_operator.cli.watch.sections import headline, plain_lines, sections, state_style

# A pipe has no width; lines of this length can be read and searched.
_PIPE_WIDTH = 120
_LABEL_WIDTH = 11


def print_report(view: JobView) -> None:
    rows = [(section.label, section.full, section.style) for section in sections(view, program_name())]
    console(_PIPE_WIDTH).print(screen(f"{headline(view)} (namespace {view.namespace})", state_style(view), rows))


def screen(
    title: str, style: str, rows: Iterable[tuple[str, Sequence[str], str]], note: str | None = None
) -> RenderableType:
    """Lays out the title and the rows. `rows`: a label, its lines and their style. `note`: a last line."""
    table = Table.grid(padding=(0, 1))
    table.add_column(width=_LABEL_WIDTH, style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, lines, line_style in rows:
        for index, line in enumerate(lines):
            table.add_row("" if index else f" {label}", Text(line, style=line_style))
    parts: list[RenderableType] = [Text(title, style=f"bold {style}".strip()), table]
    return Group(*parts, Text(note, style="yellow")) if note else Group(*parts)


@contextmanager
def display(out: Console) -> Iterator["LiveTable | Lines"]:
    """Yields the display that fits the console. A dumb terminal cannot redraw in place."""
    if not out.is_terminal or out.is_dumb_terminal:
        yield Lines(err=out.stderr)
        return
    with Live(console=out, auto_refresh=False) as live:
        yield LiveTable(live)


class LiveTable:
    """A table that is redrawn in place. `trouble`: why the view may be out of date."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, view: JobView, trouble: str | None = None) -> None:
        rows = [(section.label, section.brief, section.style) for section in sections(view, program_name())]
        note = f"connection lost, trying again: {trouble}" if trouble else None
        self._live.update(screen(headline(view), state_style(view), rows, note), refresh=True)

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)


class Lines:
    """Prints the lines that differ from the last ones; with `err` to stderr."""

    def __init__(self, *, err: bool = False) -> None:
        self._err = err
        self._last: list[str] = []
        self._trouble: str | None = None

    def show(self, view: JobView, trouble: str | None = None) -> None:
        lines = plain_lines(view)
        for line in lines:
            if line not in self._last:
                click.echo(f"{view.now:%H:%M:%S} {line}", err=self._err)
        self._last = lines
        if trouble and not self._trouble:
            click.echo(f"{view.now:%H:%M:%S} connection lost, trying again: {trouble}", err=True)
        self._trouble = trouble

    def say(self, text: str) -> None:
        click.echo(text, err=self._err)
