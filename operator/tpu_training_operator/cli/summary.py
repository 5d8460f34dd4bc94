"""The table of a job before it runs: tuned on, runs on, and the rule between them. Used by `plan` and `run`."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tpu_training_operator.api.slice import Hardware
from tpu_training_operator.cli.job_file import JobFile
from tpu_training_operator.domain.checkpointing import interval_text
from tpu_training_operator.domain.comparison import comparison
from tpu_training_operator.domain.cost import Cost

_NARROWEST = 100


def print_summary(file: JobFile, warnings: list[str], cost: Cost | None = None) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        # A pipe has no width; the default of 80 would break the rules over many lines.
        console = Console(highlight=False, width=_NARROWEST + 40)
    console.print(_table(file, cost))
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
    for row in comparison(spec.recipe, file.resolution):
        table.add_row(row.name, row.tuned_on, row.runs_on, escape(row.rule))
    if (checkpoint := spec.checkpoint) is not None:
        rule = f"in {checkpoint.uri}; the newest {checkpoint.keep} are kept"
        table.add_row("checkpoint", "", interval_text(checkpoint), escape(rule))
    for name, value in (cost.lines() if cost else {}).items():
        table.add_row(name, "", value, "one training without interruptions")
    return table
