"""Errors of the commands: one line each on stderr, and exit status 2."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    # Importing it would load pydantic for `tpujob --help`.
    from tpu_training_operator.api.validation import Problem


def program_name() -> str:
    """Returns what the user typed: kubectl runs the program `kubectl-tpujob` for `kubectl tpujob`."""
    return "kubectl tpujob" if Path(sys.argv[0]).stem == "kubectl-tpujob" else "tpujob"


class CommandError(click.ClickException):
    """Ends the command with exit status 2 and its message, each line after the program's name."""

    exit_code = 2

    def show(self, file: object = None) -> None:
        for line in self.message.splitlines():
            click.echo(f"{program_name()}: {line}", err=True)


class BadInput(CommandError):
    """The input is wrong; the message has one line for each problem."""

    def __init__(self, source: Path | str, problems: "list[Problem]") -> None:
        super().__init__("\n".join(f"{source}: {problem}" for problem in problems))
