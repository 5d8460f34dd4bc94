"""`tpujob plan` shows a job on its slice without a cluster: numbers, rules, warnings, objects.

Functions that print tables are imported where they are called: importing rich takes as long as half of the API.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from tpu_training_operator.api.ladder import Begin
from tpu_training_operator.api.slice import V2_NEEDS_CPU
from tpu_training_operator.cli.common.changes import apply_options, set_option, slice_option
from tpu_training_operator.cli.common.job_file import JobFile, filename_option, load, with_uid
from tpu_training_operator.cli.common.prices import Prices, load_prices, prices_option
from tpu_training_operator.cli.common.terminal import print_document
from tpu_training_operator.cli.plan.compile_results_file import OPTION, CompiledSteps
from tpu_training_operator.cli.plan.ladder import budget_warnings, planned_rungs, print_ladder
from tpu_training_operator.cli.plan.step_times import GivenTime, step_seconds_option, step_times, unknown_times
from tpu_training_operator.domain.job.naming import workers
from tpu_training_operator.domain.job.recipe.cost import StepTime, cost_of
from tpu_training_operator.domain.job.recipe.warnings import checkpoint_warnings
from tpu_training_operator.domain.objects.entry_check_pod import entry_check_config_map, entry_check_pod
from tpu_training_operator.domain.objects.shared import config_map, env_config_map, service
from tpu_training_operator.domain.objects.worker_pod import worker_pod
from tpu_training_operator.domain.plan.checks.entry_check import is_wanted

_FIRST_ATTEMPT = 1
_LADDER_WIDTH = 140


@click.command()
@filename_option
@slice_option
@set_option
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "yaml", "json", "html"]),
    default="table",
    show_default=True,
    help="html: a page with a picture, for --compare.",
)
@click.option("--compare", metavar="TYPE,TYPE,...", help="Show the recipe on these accelerator types, side by side.")
@step_seconds_option
@click.option(
    OPTION,
    "compiled_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Show memory and best speed from this file, which `tpujob compile-check -o json` has written.",
)
@prices_option
def plan(
    filename: Path,
    on_slice: str | None,
    values: tuple[str, ...],
    output: str,
    compare: str | None,
    given: tuple[GivenTime, ...],
    measured_file: Path | None,
    compiled_file: Path | None,
    prices: Path | None,
) -> None:
    """Show the slice, the scaled recipe and the objects of a job."""

    file = load(filename, except_rules=(V2_NEEDS_CPU,), change=lambda body: apply_options(body, values, on_slice))
    compiled = None if compiled_file is None else CompiledSteps(compiled_file)
    times, table = step_times(file, given, measured_file), None if prices is None else load_prices(prices)
    if compare is None:
        if output == "html":
            raise click.UsageError("-o html is for --compare")
        _plan(file, output, times, compiled, table)
        return
    from tpu_training_operator.cli.plan.compare import compare_slices, print_comparison

    comparison = compare_slices(file, compare, times, table, compiled)
    if output == "html":
        click.echo(comparison.as_html(), nl=False)
    elif output == "table":
        print_comparison(comparison)
    else:
        print_document(comparison.as_json(), output)


def _plan(
    file: JobFile, output: str, times: list[StepTime], compiled: CompiledSteps | None, prices: Prices | None
) -> None:
    warnings = [*file.warnings, *checkpoint_warnings(file.job.spec, file.resolution.recipe.train_steps)]
    on_gke = not V2_NEEDS_CPU.is_broken_by(file.job.spec.slice)
    if not on_gke:
        warnings.append(f"a cluster will refuse this job: {V2_NEEDS_CPU.message}")
    if compiled is not None and compiled.of(file.resolution) is None:
        warnings.append(f"{OPTION}: the file has no answer for {file.resolution.layout} with this batch")
    resolutions = [option.resolution for option in (*file.lower_rungs, file.options[0])]
    times = times or (compiled.times(resolutions) if compiled else [])
    cost, rungs = cost_of(file.resolution, times), planned_rungs(file, times)
    money = prices.money(str(file.resolution.layout), cost.chip_hours) if prices else None
    price = prices.text(money) if prices and money is not None else None
    warnings += unknown_times(times, [resolution.layout for resolution in resolutions])
    warnings += budget_warnings(file, cost, rungs)
    if output == "table":
        from tpu_training_operator.cli.plan.summary import print_summary

        print_summary(file, warnings, cost, compiled, price)
        ladder = file.job.spec.ladder
        print_ladder(rungs, ladder is None or ladder.begin is Begin.SCRATCH, _LADDER_WIDTH)
        return
    document = {
        "resolved": file.resolution.resolved.as_json(),
        "warnings": warnings,
        "cost": cost.as_json() | ({"money": price} if price else {}),
        "alternatives": [
            {
                "slice": str(option),
                "waitForPreviousSeconds": option.choice.wait_seconds,
                "resolved": option.resolution.resolved.as_json(),
            }
            for option in file.options[1:]
        ],
        **({"ladder": [rung.as_json() for rung in rungs]} if rungs else {}),
    }
    objects = _objects(file) if on_gke else iter(())
    if output == "json":
        # One object per line and one at a time: indentation would rule out Python's fast encoder, and thousands of pods
        # in memory would keep the garbage collector busy.
        lines = ",\n".join(map(json.dumps, objects))
        click.echo(f'{json.dumps(document)[:-1]}, "objects": [\n{lines}\n]}}')
        return
    print_document({**document, "objects": list(objects)}, output)


def _objects(file: JobFile) -> Iterator[dict[str, Any]]:
    """Yields the objects of the entry check, then those of the first attempt."""
    first = (*file.lower_rungs, *file.options)[0]
    job = with_uid(first.job)
    first = replace(first, job=job)
    if is_wanted(job.spec):
        yield entry_check_config_map(first)
        yield entry_check_pod(job, first.resolution)
    yield service(job)
    yield config_map(job, first.resolution, _FIRST_ATTEMPT)
    yield env_config_map(job, first.resolution, _FIRST_ATTEMPT)
    for worker in workers(first.layout, _FIRST_ATTEMPT):
        yield worker_pod(job, first.resolution, worker)
