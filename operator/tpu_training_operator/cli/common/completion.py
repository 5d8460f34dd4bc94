"""`tpujob completion SHELL` prints the script with which a shell completes `tpujob`."""

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion of `tpujob` for a shell, to be sourced."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "tpujob", "_TPUJOB_COMPLETE").source())
