"""Prints a job before it runs: the recipe as tuned, as it runs, and the rule between the two."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from rich.markup import escape
from rich.table import Table

from tpu_contract.protocol import DEFAULT_FACTOR
from tpu_contract.run_spec import ScalingRow, ScheduleName
from tpu_training_operator.api.recipe import Recipe
from tpu_training_operator.api.run_policy import OnExceeded
from tpu_training_operator.api.slice import Hardware
from tpu_training_operator.api.words import count, span
from tpu_training_operator.cli.common.job_file import JobFile
from tpu_training_operator.cli.common.terminal import console
from tpu_training_operator.cli.plan.compile_results_file import CompiledSteps
from tpu_training_operator.domain.job.recipe.checkpointing import folder, interval_text
from tpu_training_operator.domain.job.recipe.comparison import comparison
from tpu_training_operator.domain.job.recipe.cost import SECONDS_PER_STEP, Cost, cost_rows

_PIPE_WIDTH = 140
# On a narrower terminal the column of rules would be one word wide.
_NARROWEST_TABLE = 80
# With a command, these rows take effect only if the user's own loop applies them.
_TRAINERS_ROWS = (
    "evaluate every",
    "EMA decay",
    "milestones",
    "rate on a plateau",
    "stop early",
    "gradient clip norm",
    "precision",
    "sharding",
)
_LEFT_TO_COMMAND = "left to your command"
_OWN_LOOP = (
    "your command does the training: it finds these numbers in TPUJOB_* variables and in the JSON file that"
    " TPUJOB_RUN_SPEC names, and has to apply them itself"
)


def print_summary(
    file: JobFile,
    warnings: list[str],
    cost: Cost | None = None,
    compiled: CompiledSteps | None = None,
    money: str | None = None,
) -> None:
    out = console(_PIPE_WIDTH)
    hardware = "" if file.job.spec.slice.hardware is Hardware.TPU else ", rehearsed on CPU"
    # Not the table's title, which rich would pad with spaces.
    out.print(f"[bold]{file.job.name}: {file.resolution.layout}{hardware}[/bold]", soft_wrap=True)
    rows = [*_rows(file, cost, money), *_compiled_rows(file, compiled)]
    tuned_on = "recipe" if file.job.spec.recipe.tuned_on is None else "tuned on"
    out.print(_table(rows, tuned_on) if out.width >= _NARROWEST_TABLE else _list(rows))
    if len(file.options) > 1:
        out.print(_alternatives(file, compiled))
    if left_out := list(_skipped_counts(file)):
        slices = f"{', '.join(map(str, left_out))} slice{'s' if left_out != [1] else ''}"
        batch = file.resolution.recipe.batch.total
        out.print(
            f"note: the job does not run on {slices}: the global batch of {batch} does not divide over them",
            soft_wrap=True,
        )
    if file.job.spec.trainer.command is not None:
        out.print(f"note: {_OWN_LOOP}", soft_wrap=True)
    for warning in warnings:
        # Always one line: a terminal wraps it, and piped output stays searchable.
        out.print(f"[yellow]warning:[/yellow] {escape(warning)}", soft_wrap=True)


def _table(rows: Iterable[ScalingRow], tuned_on: str) -> Table:
    table = Table()
    table.add_column("")
    table.add_column(tuned_on, justify="right")
    table.add_column("runs on", justify="right", style="bold")
    table.add_column("rule", style="dim", overflow="fold")
    for row in rows:
        table.add_row(row.name, row.tuned_on, row.runs_on, escape(row.rule))
    return table


def _alternatives(file: JobFile, compiled: CompiledSteps | None) -> Table:
    """Makes a table of the slices that the job may run on, and of how the batch is divided on each."""
    table = Table(title="Alternatives, in order of preference", title_justify="left")
    for name in ("slice", "hosts", "chips", "per replica", "accumulation", "global batch", "steps", "moves here"):
        table.add_column(name, justify="left" if name in ("slice", "moves here") else "right", overflow="fold")
    if compiled is not None:
        table.add_column("compiled", overflow="fold")
    for option in file.options:
        layout, recipe = option.layout, option.resolution.recipe
        numbers = (layout.hosts, layout.chips, recipe.batch.per_replica, recipe.batch.accumulation, recipe.batch.total)
        what = "all of them" if option.is_own else "nodes"
        when = f"after {span(option.choice.wait_seconds)} without {what}" if option.number else "first"
        result = compiled.of(option.resolution) if compiled else None
        memory = "no" if result is None else f"{result.short_verdict}: {result.memory}"
        table.add_row(str(option), *map(str, numbers), recipe.steps, when, *([memory] if compiled else []))
    return table


def _skipped_counts(file: JobFile) -> Iterator[int]:
    """Yields the slice counts between placement.count.min and the preferred count on which the job does not run."""
    placement, used = file.job.spec.placement, {option.layout.slices for option in file.options if option.is_own}
    if placement is not None and placement.count is not None:
        yield from (n for n in range(placement.count.min, file.resolution.layout.slices) if n not in used)


def _compiled_rows(file: JobFile, compiled: CompiledSteps | None) -> Iterator[ScalingRow]:
    result = compiled.of(file.resolution) if compiled else None
    if result is not None:
        yield ScalingRow("HBM", "", result.memory, f"{result.short_verdict}; compiled, not run")
        if all(result.at_best):
            yield ScalingRow("step at best", "", *result.at_best)


def _list(rows: Iterable[ScalingRow]) -> Table:
    """Makes a list for a narrow terminal, with every rule below its numbers."""
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        changed = row.tuned_on not in ("", "-", row.runs_on)
        table.add_row(
            row.name, f"{row.tuned_on} -> [bold]{row.runs_on}[/bold]" if changed else f"[bold]{row.runs_on}[/bold]"
        )
        if row.rule:
            table.add_row("", f"[dim]{escape(row.rule)}[/dim]")
    return table


def _rows(file: JobFile, cost: Cost | None, money: str | None) -> Iterator[ScalingRow]:
    spec = file.job.spec
    is_own_loop = spec.trainer.command is not None
    for row in comparison(spec.recipe, file.resolution):
        left = is_own_loop and row.name in _TRAINERS_ROWS
        yield replace(row, rule=f"{row.rule}; {_LEFT_TO_COMMAND}") if left else row
    for row in _kept_rows(spec.recipe):
        yield replace(row, rule=", ".join(filter(None, (row.rule, _LEFT_TO_COMMAND if is_own_loop else ""))))
    if (checkpoint := spec.checkpoint) is not None:
        best = f" and the best by {checkpoint.keep_best.metric}" if checkpoint.keep_best else ""
        retention = _LEFT_TO_COMMAND if is_own_loop else f"keeps the newest {checkpoint.keep}{best}"
        yield ScalingRow("checkpoint", "", interval_text(checkpoint), f"in {folder(file.job, checkpoint)}; {retention}")
        if checkpoint.resume_from is not None:
            yield ScalingRow("starts from", "", "", checkpoint.resume_from)
        if checkpoint.init_from is not None:
            weights = f"the weights of {checkpoint.init_from.uri}"
            yield ScalingRow("starts with", "", "", f"{weights}; {_LEFT_TO_COMMAND}" if is_own_loop else weights)
    if (budget := spec.run_policy.budget) is not None:
        chips = file.resolution.layout.chips
        then = "it fails" if budget.on_exceeded is OnExceeded.FAIL else "it is suspended"
        rule = f"{budget.chip_hours / chips:.3g} hours on {count(chips, 'chip')}; then {then}"
        yield ScalingRow("budget", "", count(budget.chip_hours, "chip-hour"), rule)
    for name, (value,) in (cost_rows([cost]) if cost else {}).items():
        rule = str(cost.measured) if cost and name == SECONDS_PER_STEP else "one training without interruption"
        yield ScalingRow(name, "", value, rule)
    if money:
        yield ScalingRow("cost", "", money, "by your table of prices")


def _kept_rows(recipe: Recipe) -> Iterator[ScalingRow]:
    """Yields the choices of the recipe that no rule changes."""
    schedule, optimizer = recipe.schedule, recipe.optimizer
    falls = f"down to {schedule.factor or 0} of the rate after warm-up"
    steps = f"x {DEFAULT_FACTOR if schedule.factor is None else schedule.factor} at every milestone"
    rules = {ScheduleName.LINEAR: falls, ScheduleName.COSINE: falls, ScheduleName.STEP: steps}
    yield ScalingRow("schedule", schedule.name, schedule.name, rules.get(schedule.name, "after warm-up"))
    momentum = "" if optimizer.momentum is None else f"momentum {optimizer.momentum}"
    yield ScalingRow("optimizer", optimizer.name, optimizer.name, momentum)
