"""The table of a job before it runs: tuned on, runs on, and the rule between them. Used by `plan` and `run`."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tpu_training_operator.api.slice import Hardware
from tpu_training_operator.cli.job_file import JobFile
from tpu_training_operator.domain.recipe import own_loop
from tpu_training_operator.domain.recipe.checkpointing import folder, interval_text
from tpu_training_operator.domain.recipe.comparison import comparison
from tpu_training_operator.domain.recipe.cost import Cost

_NARROWEST = 100
# Rows that promise more than a number.
_TRAINERS_DOING = ("evaluate every", "EMA decay", "milestones")


def print_summary(file: JobFile, warnings: list[str], cost: Cost | None = None) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        # A pipe has no width; the default of 80 would break the rules over many lines.
        console = Console(highlight=False, width=_NARROWEST + 40)
    console.print(_table(file, cost))
    if file.job.spec.trainer.command is not None:
        console.print(f"note: {own_loop.NOTE}", soft_wrap=True)
    for warning in warnings:
        # One line, however long: a terminal wraps it by itself, and a pipe can be searched.
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}", soft_wrap=True)


def _table(file: JobFile, cost: Cost | None) -> Table:
    spec = file.job.spec
    hardware = "" if spec.slice.hardware is Hardware.TPU else ", rehearsed on CPU"
    title = f"{file.job.name}: {file.resolution.layout}{hardware}"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("tuned on", justify="right")
    table.add_column("runs on", justify="right", style="bold")
    table.add_column("rule", style="dim", overflow="fold")
    is_own_loop = spec.trainer.command is not None
    for row in comparison(spec.recipe, file.resolution):
        yours = is_own_loop and row.name in _TRAINERS_DOING
        table.add_row(
            row.name, row.tuned_on, row.runs_on, escape(f"{row.rule}; {own_loop.YOURS}" if yours else row.rule)
        )
    if (checkpoint := spec.checkpoint) is not None:
        kept = own_loop.YOURS if is_own_loop else f"the newest {checkpoint.keep} are kept"
        rule = f"in {folder(file.job, checkpoint)}; {kept}"
        table.add_row("checkpoint", "", interval_text(checkpoint), escape(rule))
        if checkpoint.resume_from is not None:
            table.add_row("begins with", "", "", escape(checkpoint.resume_from))
    for name, value in (cost.lines() if cost else {}).items():
        table.add_row(name, "", value, "one training without interruptions")
    return table
