"""Errors for people: one line each on stderr, and the exit status that goes with them."""

from pathlib import Path

import click

from tpu_training_operator.api.validation import Problem
from tpu_training_operator.cli.program import program_name


class BadInput(click.ClickException):
    """The input is wrong: one line for every problem, exit status 2."""

    exit_code = 2

    def __init__(self, source: Path | str, problems: list[Problem]) -> None:
        super().__init__("\n".join(f"{source}: {problem}" for problem in problems))

    def show(self, file: object = None) -> None:
        for line in self.message.splitlines():
            click.echo(f"{program_name()}: {line}", err=True)
