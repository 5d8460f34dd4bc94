"""Writes the last part of docs/cli.md, every command and option of `tpujob`, from the commands: `make crds`."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click

from tpu_training_operator.cli.main import main

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"

_HEADING = "## Every command and option\n"
_SHARED = 3
"""Commands that must take an option for it to be described only once."""

Option = tuple[str, str]
"""An option as it is written, and its meaning."""

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
    options = {name: _options(click.Context(command, context, name)) for name, command in found}
    uses = Counter(option for of_command in options.values() for option in of_command)
    shared = [option for option, count in uses.items() if count >= _SHARED]
    common = "\n".join(["### Options of several commands\n", *_table(shared), ""])
    parts = ["\n".join(_command(name, command, context, options[name], shared)) for name, command in found]
    return above + "\n".join([heading, _INTRODUCTION, common, *parts])


def _options(context: click.Context) -> list[Option]:
    options = (option for option in context.command.params if isinstance(option, click.Option))
    records = (option.get_help_record(context) for option in options)
    return [record for record in records if record is not None]


def _command(
    name: str, command: click.Command, parent: click.Context, options: list[Option], shared: list[Option]
) -> Iterator[str]:
    context = click.Context(command, parent, name)
    arguments = [piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]"]
    yield f"### tpujob {' '.join([name, *arguments])}\n"
    also = ", ".join(f"`{option.split()[0].rstrip(',')}`" for option, meaning in options if (option, meaning) in shared)
    yield f"{' '.join((command.help or '').split())}{also and f' Also takes {also}.'}\n"
    own = [option for option in options if option not in shared]
    if own:
        yield from [*_table(own), ""]


def _table(options: list[Option]) -> Iterator[str]:
    yield "| option | meaning |\n|---|---|"
    yield from (f"| `{_cell(option)}` | {_cell(meaning)} |" for option, meaning in options)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
