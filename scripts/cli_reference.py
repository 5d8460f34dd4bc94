"""Writes the last part of docs/cli.md, every command and option of `tpujob`, from the commands: `make crds`."""

from collections.abc import Iterator
from pathlib import Path

import click

from tpu_training_operator.cli.main import main

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"

_HEADING = "## Every command and option\n"
_INTRODUCTION = "Made by `make crds` from what `tpujob COMMAND --help` prints.\n"


def page(written: str) -> str:
    """Returns the page with a new last part; what is above its heading stays as `written`."""
    above, heading, _ = written.partition(_HEADING)
    if not heading:
        raise ValueError(f"{PAGE} has no heading {_HEADING.strip()!r}")
    # With the command's own settings: click remembers the help option that a command had in its first context.
    context = click.Context(main, info_name="tpujob", **main.context_settings)
    commands = {name: main.get_command(context, name) for name in main.list_commands(context)}
    found = sorted((name, command) for name, command in commands.items() if command is not None)
    parts = ["\n".join(_command(name, command, context)) for name, command in found]
    return above + "\n".join([heading, _INTRODUCTION, *parts])


def _command(name: str, command: click.Command, parent: click.Context) -> Iterator[str]:
    context = click.Context(command, parent, name)
    arguments = [piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]"]
    yield f"### tpujob {' '.join([name, *arguments])}\n"
    yield f"{' '.join((command.help or '').split())}\n"
    records = (option.get_help_record(context) for option in command.params if isinstance(option, click.Option))
    rows = [record for record in records if record is not None]
    if rows:
        yield "| option | meaning |\n|---|---|"
        yield from (f"| `{_cell(option)}` | {_cell(meaning)} |" for option, meaning in rows)
        yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
