"""The table of a job before it runs: the recipe as tuned, as it runs, and the rule between them."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tpu_training_operator.api.slice import Hardware
from tpu_training_operator.cli.job_file import JobFile
from tpu_training_operator.domain.recipe.checkpointing import folder, interval_text
from tpu_training_operator.domain.recipe.comparison import comparison
from tpu_training_operator.domain.recipe.cost import Cost

_NARROWEST = 100
# For a loop of the user's own nobody does what these rows say, unless the loop does it.
_TRAINERS_ROWS = (
    "evaluate every",
    "EMA decay",
    "milestones",
    "rate on a plateau",
    "stop early",
    "gradient clip norm",
    "precision",
)
_LEFT_TO_COMMAND = "left to your command"
_OWN_LOOP = (
    "your command does the training: it finds these numbers in TPUJOB_* variables and in the JSON file that"
    " TPUJOB_RUN_SPEC names, and has to apply them itself"
)


def print_summary(file: JobFile, warnings: list[str], cost: Cost | None = None) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        # A pipe has no width, and the default of 80 would break the rules into many lines.
        console = Console(highlight=False, width=_NARROWEST + 40)
    hardware = "" if file.job.spec.slice.hardware is Hardware.TPU else ", rehearsed on CPU"
    # Not as the table's title, which would be padded with spaces to its width.
    console.print(f"[bold]{file.job.name}: {file.resolution.layout}{hardware}[/bold]", soft_wrap=True)
    console.print(_table(file, cost))
    if file.job.spec.trainer.command is not None:
        console.print(f"note: {_OWN_LOOP}", soft_wrap=True)
    for warning in warnings:
        # Always one line: a terminal wraps it, and the output of a pipe stays searchable.
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}", soft_wrap=True)


def _table(file: JobFile, cost: Cost | None) -> Table:
    spec = file.job.spec
    table = Table()
    table.add_column("")
    table.add_column("recipe" if spec.recipe.tuned_on is None else "tuned on", justify="right")
    table.add_column("runs on", justify="right", style="bold")
    table.add_column("rule", style="dim", overflow="fold")
    is_own_loop = spec.trainer.command is not None
    for row in comparison(spec.recipe, file.resolution):
        left = is_own_loop and row.name in _TRAINERS_ROWS
        rule = f"{row.rule}; {_LEFT_TO_COMMAND}" if left else row.rule
        table.add_row(row.name, row.tuned_on, row.runs_on, escape(rule))
    if (checkpoint := spec.checkpoint) is not None:
        best = f" and the best by {checkpoint.keep_best.metric}" if checkpoint.keep_best else ""
        kept = _LEFT_TO_COMMAND if is_own_loop else f"keeps the newest {checkpoint.keep}{best}"
        rule = f"in {folder(file.job, checkpoint)}; {kept}"
        table.add_row("checkpoint", "", interval_text(checkpoint), escape(rule))
        if checkpoint.resume_from is not None:
            table.add_row("starts from", "", "", escape(checkpoint.resume_from))
        if checkpoint.init_from is not None:
            weights = f"the weights of {checkpoint.init_from.uri}"
            rule = f"{weights}; {_LEFT_TO_COMMAND}" if is_own_loop else weights
            table.add_row("starts with", "", "", escape(rule))
    for name, value in (cost.lines() if cost else {}).items():
        table.add_row(name, "", value, "one training without interruption")
    return table
