"""The `tpujob` command, which is also `kubectl tpujob`.

Exit status: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted.
"""

import difflib
import errno
import importlib
import os
import sys
from typing import Any

import click

from tpu_training_operator.cli.common.errors import program_name

# Each command with its room, or with its module and function, in the order of a job's life. The help texts stand here
# so that `--help` imports no command, which would take ten times as long.
_COMMANDS = {
    "validate": ("plan", "Check a job without a cluster."),
    "plan": ("plan", "Show the slice, the scaled recipe and the objects of a job."),
    "compile-check": (
        "compile",
        "Compile a job's step for its slice without a TPU: whether it fits, and its speed at best.",
    ),
    "run": ("run", "Train a job on this machine, without a cluster."),
    "check-slice": ("run", "Check a slice before it trains: pods, network, storage, chips, a short training."),
    "submit": ("run", "Create a job on a cluster, with a folder of code if you like."),
    "list": ("watch.status:list_jobs", "List the jobs: state, slice, step, time left."),
    "status": ("watch", "Show what a job does and why; without NAME, list the jobs."),
    "watch": ("watch", "Follow a job until it ends: hosts, steps, speed, failures."),
    "logs": ("watch", "Print the logs of a job's workers; by default of host 0, which reports the progress."),
    "suspend": (
        "run.lifecycle:suspend",
        "Stop a job's workers and keep the job: it gives its chips back, and `resume` continues it from its"
        " checkpoint.",
    ),
    "resume": ("run.lifecycle:resume", "Let a suspended job go on."),
    "delete": ("run.lifecycle:delete", "Delete a job and its workers; its checkpoints stay."),
    "report": ("run", "Write the report page of a job; PLACE is its spec.report.uri, or a directory."),
    "topologies": ("plan", "List the TPU slices that a job can run on."),
    "crd": ("plan", "Print the CustomResourceDefinition."),
    "completion": ("common", "Print the completion of `tpujob` for a shell, to be sourced."),
}
_ALIASES = {"ls": "list"}
_FAILED = 1
_INTERRUPTED = 130


class _Commands(click.Group):
    """Imports a command only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        cmd_name = _ALIASES.get(cmd_name, cmd_name)
        if cmd_name not in _COMMANDS:
            return None
        place, name = _COMMANDS[cmd_name][0], cmd_name.replace("-", "_")
        module, _, function = (place if ":" in place else f"{place}.{name}:{name}").partition(":")
        command: click.Command = getattr(importlib.import_module(f"tpu_training_operator.cli.{module}"), function)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in {*_COMMANDS, *_ALIASES}:
            near = ", ".join(difflib.get_close_matches(args[0], _COMMANDS))
            ctx.fail(f"No such command {args[0]!r}." + (near and f" Nearest: {near}."))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Makes usage lines show what the user typed."""
        return super().make_context(program_name(), args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # The interrupt may also come while a command is being imported.
            sys.exit(_INTERRUPTED)

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().main(*args, **extra)
        except OSError as error:
            _give_up(error)


def _give_up(error: OSError) -> None:
    """Reports a full disk or a directory without write permission in one line."""
    what = (error.strerror or str(error)).lower()
    click.echo(f"{program_name()}: {f'{error.filename}: ' if error.filename else ''}{what}", err=True)
    # Flushing the rest of stdout at exit would fail again.
    if sys.stdout is not None and error.errno == errno.ENOSPC:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(_FAILED)


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        # Imported here, because it asks git or the environment's packages.
        from tpu_training_operator.version import version

        click.echo(f"tpujob, version {version()}")
        ctx.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def main() -> None:
    """Plan, check and run TPUTrainingJobs without a cluster; submit them to one and watch them."""
