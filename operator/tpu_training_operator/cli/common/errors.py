"""Errors of the commands: one line each on stderr, and an exit status as kubectl and click have it."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    # Importing it would load pydantic for `tpujob --help`.
    from tpu_training_operator.api.validation import Problem


def program_name() -> str:
    """Returns what the user typed: kubectl runs the program `kubectl-tpujob` for `kubectl tpujob`."""
    return "kubectl tpujob" if Path(sys.argv[0]).stem == "kubectl-tpujob" else "tpujob"


class CommandError(click.ClickException):
    """Ends the command with exit status 1 and its message, each line after the program's name."""

    def show(self, file: object = None) -> None:
        for line in self.message.splitlines():
            click.echo(f"{program_name()}: {line}", err=True)


class WrongOption(CommandError):
    """An option has a value that no job could make right: exit status 2, as click's own."""

    exit_code = 2


class VerdictCommand(click.Command):
    """A command whose exit status 1 is a verdict, so that an error, which leaves none, has 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CommandError as error:
            error.show()
            ctx.exit(2)


class BadInput(CommandError):
    """The input is wrong; the message has one line for each problem."""

    def __init__(self, source: Path | str, problems: "list[Problem]") -> None:
        super().__init__("\n".join(f"{source}: {problem}" for problem in problems))
