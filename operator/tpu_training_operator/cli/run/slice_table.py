"""Prints the table of `tpujob check-slice`: for people, for programs, and as a page."""

import io
import json
from collections import Counter
from collections.abc import Iterator

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tpu_contract.slice_check import LineVerdict, SliceTable, to_json
from tpu_training_operator.api.text import plain
from tpu_training_operator.api.words import count
from tpu_training_operator.cli.common.terminal import console, print_document

_PIPE_WIDTH = 140
_WORDS = {
    LineVerdict.OK: ("ok", ""),
    LineVerdict.FAILED: ("failed", "bold red"),
    LineVerdict.NOT_TRIED: ("no verdict", "yellow"),
}


def print_slice_check(check: SliceTable, kind: str, output: str) -> None:
    """Prints the table as `output` says: table, json or html. All its texts are a worker's, so they are made plain.
    `kind`: the accelerator type."""
    if output == "json":
        print_document({"acceleratorType": kind, "fit": check.passed, **json.loads(to_json(check))}, output)
    elif output == "html":
        page = Console(record=True, width=_PIPE_WIDTH, file=io.StringIO())
        _print(check, kind, page)
        click.echo(page.export_html())
    else:
        _print(check, kind, console(_PIPE_WIDTH))


def _print(check: SliceTable, kind: str, out: Console) -> None:
    table = Table(title=Text(f"{kind}: {_verdict(check)}", style="bold"), title_justify="left")
    for name in ("", "", "host", "measured", "expected", ""):
        table.add_column(name, overflow="fold")
    section = None
    for line in check.lines:
        if line.section is not section and section is not None:
            table.add_section()
        word, style = _WORDS[line.verdict]
        first = "" if line.section is section else line.section.value
        cells = (first, line.name, line.place, line.measured, line.expected, word)
        table.add_row(*(Text(plain(cell)) for cell in cells), style=style)
        section = line.section
    out.print(table)
    for note in _notes(check):
        out.print(Text(plain(note)), soft_wrap=True)


def _verdict(check: SliceTable) -> str:
    counted = Counter(line.verdict for line in check.lines)
    numbers = ", ".join(f"{counted[verdict]} {word}" for verdict, (word, _) in _WORDS.items() if counted[verdict])
    fit = "fit" if check.passed else "not fit"
    return f"{fit} ({count(len(check.lines), 'line')}: {numbers})"


def _notes(check: SliceTable) -> Iterator[str]:
    """Yields what to do about each failed line, why others have no verdict, and the seconds."""
    for verdict, (word, _) in _WORDS.items():
        if verdict is not LineVerdict.OK:
            yield from (f"{word}: {line}" for line in check.lines if line.verdict is verdict)
    if check.seconds:
        yield f"seconds: {', '.join(f'{name} {value:.1f}' for name, value in check.seconds.items())}"
