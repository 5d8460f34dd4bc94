"""`tpujob plan --compare`: one recipe on several slices, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from tpu_training_operator.api.words import count
from tpu_training_operator.cli.common.job_file import JobFile
from tpu_training_operator.cli.common.terminal import console
from tpu_training_operator.cli.plan.compile_results_file import CompiledSteps
from tpu_training_operator.cli.plan.moved import moved
from tpu_training_operator.cli.plan.step_times import unknown_times
from tpu_training_operator.domain.job.recipe.cost import Cost, StepTime, cost_of, cost_rows
from tpu_training_operator.domain.job.recipe.resolve import Resolution


@dataclass(frozen=True)
class Column:
    """The job on one slice."""

    resolution: Resolution
    cost: Cost


def columns(file: JobFile, compare: str, times: Sequence[StepTime] = ()) -> list[Column]:
    """Moves the job to each accelerator type that `compare` lists. Raises BadInput with a problem for each that it
    cannot run on."""
    slices = moved(file, compare.split(","), "--compare")
    return [Column(resolution, cost_of(resolution, times)) for resolution in slices]


def as_json(results: list[Column]) -> list[dict[str, Any]]:
    return [
        {
            "resolved": column.resolution.resolved.as_json(),
            "warnings": list(column.resolution.warnings),
            "cost": column.cost.as_json(),
        }
        for column in results
    ]


def print_comparison(
    file: JobFile, results: list[Column], times: Sequence[StepTime], compiled: CompiledSteps | None = None
) -> None:
    table = Table(
        title=f"{file.job.name}: one recipe on {count(len(results), 'slice')}", title_justify="left", title_style="bold"
    )
    table.add_column("")
    for column in results:
        table.add_column(str(column.resolution.layout), justify="right")

    def row(name: str, values: list[object]) -> None:
        table.add_row(name, *(str(value) for value in values))

    resolutions = [column.resolution for column in results]
    row("topology", [r.layout.shape.topology for r in resolutions])
    row("hosts", [r.layout.hosts for r in resolutions])
    row("chips", [r.layout.chips for r in resolutions])
    row("replicas", [r.layout.replicas for r in resolutions])
    row("global batch", [r.recipe.batch.total for r in resolutions])
    row("accumulation", [r.recipe.batch.accumulation for r in resolutions])
    row("train steps", [r.recipe.steps for r in resolutions])
    row("warm-up steps", [r.recipe.warmup_steps for r in resolutions])
    row("learning rate", [r.recipe.learning_rate for r in resolutions])
    for name, values in cost_rows([column.cost for column in results]).items():
        row(name, list(values))
    for name, values in (compiled.lines(resolutions) if compiled else {}).items():
        row(name, list(values))
    out = console(40 + 24 * len(results))
    out.print(table)
    for resolution in resolutions:
        for warning in resolution.warnings:
            out.print(f"[yellow]warning:[/yellow] {escape(f'{resolution.layout}: {warning}')}", soft_wrap=True)
    for note in (*times, *unknown_times(times, [resolution.layout for resolution in resolutions])):
        out.print(f"note: {escape(str(note))}", soft_wrap=True)
