"""The `tpujob` command, as `kubectl tpujob` too. Exit status: 0 done, 1 the job failed, 2 bad input, or no answer from
the cluster, 130 interrupted."""

import importlib
from importlib.metadata import version
from typing import Any

import click

from tpu_training_operator.cli.program import program_name

_COMMANDS = ("crd", "logs", "plan", "run", "status", "topologies", "validate", "watch")


class _Commands(click.Group):
    """Imports a command when it is called: `plan` needs no asyncio, `crd` no tables."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"tpu_training_operator.cli.{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Usage lines say what the person typed."""
        return super().make_context(program_name(), args, parent, **extra)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("tpu-training-operator"), prog_name="tpujob")
def main() -> None:
    """Plan, check and run TPUTrainingJobs without a cluster; see what they do on one."""
