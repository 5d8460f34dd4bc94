"""`tpujob plan --compare`: one recipe on several slices, side by side."""

from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from tpu_training_operator.api.job import Spec
from tpu_training_operator.api.slice import Slice
from tpu_training_operator.api.validation import InvalidJob, Problem
from tpu_training_operator.api.words import count
from tpu_training_operator.cli.common.errors import BadInput
from tpu_training_operator.cli.common.job_file import JobFile
from tpu_training_operator.cli.common.terminal import console
from tpu_training_operator.cli.plan.compile_results_file import CompiledSteps
from tpu_training_operator.domain.job.recipe.cost import Cost, cost_of
from tpu_training_operator.domain.job.recipe.resolve import Resolution, resolve


@dataclass(frozen=True)
class Column:
    """The job on one slice."""

    resolution: Resolution
    cost: Cost


def columns(file: JobFile, accelerator_types: list[str], step_seconds: float | None) -> list[Column]:
    """Resolves the job for each accelerator type. Raises BadInput with a problem for each that it cannot run on."""
    results: list[Column] = []
    problems: list[Problem] = []
    for name in accelerator_types:
        target = Slice(accelerator_type=name, count=file.job.spec.slice.count, hardware=file.job.spec.slice.hardware)
        broken = [rule.text(target) for rule in Slice.rules if rule.is_broken_by(target)]
        if broken:
            problems.append(Problem("--compare", broken[0]))
            continue
        try:
            resolution = resolve(Spec.model_validate(dict(file.job.spec) | {"slice": target}))
        except InvalidJob as error:
            problems += [Problem(f"--compare {name}", str(problem)) for problem in error.problems]
        else:
            results.append(Column(resolution, cost_of(resolution, step_seconds)))
    if problems:
        raise BadInput(file.path, problems)
    return results


def as_json(results: list[Column]) -> list[dict[str, Any]]:
    return [
        {
            "resolved": column.resolution.resolved.as_json(),
            "warnings": list(column.resolution.warnings),
            "cost": column.cost.as_json(),
        }
        for column in results
    ]


def print_comparison(file: JobFile, results: list[Column], compiled: CompiledSteps | None = None) -> None:
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
    row("train steps", [r.recipe.train_steps for r in resolutions])
    row("warm-up steps", [r.recipe.warmup_steps for r in resolutions])
    row("learning rate", [r.recipe.learning_rate for r in resolutions])
    for name in results[0].cost.lines():
        row(name, [column.cost.lines()[name] for column in results])
    for name, values in (compiled.lines(resolutions) if compiled else {}).items():
        row(name, list(values))
    out = console(40 + 24 * len(results))
    out.print(table)
    for resolution in resolutions:
        for warning in resolution.warnings:
            out.print(f"[yellow]warning:[/yellow] {escape(f'{resolution.layout}: {warning}')}")
