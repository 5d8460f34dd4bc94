"""`tpujob plan` shows a job on its slice without a cluster: numbers, rules, warnings, objects.

Tables are imported only where one is printed, because rich takes as long to import as half of the API.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.slice import V2_NEEDS_CPU
from tpu_training_operator.cli.changes import move, set_option, set_values, slice_option
from tpu_training_operator.cli.job_file import JobFile, filename_option, load
from tpu_training_operator.domain.naming import workers
from tpu_training_operator.domain.objects.shared import config_map, service
from tpu_training_operator.domain.objects.worker_pod import worker_pod
from tpu_training_operator.domain.recipe.cost import cost_of
from tpu_training_operator.domain.recipe.warnings import checkpoint_warnings

# The API server assigns the real one.
_UID = "00000000-0000-0000-0000-000000000000"
_FIRST_ATTEMPT = 1


@click.command()
@filename_option
@slice_option
@set_option
@click.option("-o", "--output", type=click.Choice(["table", "yaml", "json"]), default="table", show_default=True)
@click.option("--compare", metavar="TYPE,TYPE,...", help="Show the recipe on these accelerator types, side by side.")
@click.option(
    "--step-seconds", type=click.FloatRange(min=0, min_open=True), help="Measured time of one step, to show chip-hours."
)
def plan(
    filename: Path,
    on_slice: str | None,
    values: tuple[str, ...],
    output: str,
    compare: str | None,
    step_seconds: float | None,
) -> None:
    """Show the slice, the scaled recipe and the objects of a job."""

    def change(body: dict[str, Any]) -> None:
        set_values(body, values)
        if on_slice is not None:
            move(body, on_slice)

    file = load(filename, except_rules=(V2_NEEDS_CPU,), change=change)
    if compare is None:
        _plan(file, output, step_seconds)
        return
    from tpu_training_operator.cli.compare import as_json, columns, print_comparison

    found = columns(file, [name.strip() for name in compare.split(",")], step_seconds)
    if output == "table":
        print_comparison(file, found)
    else:
        click.echo(_as_text(as_json(found), output))


def _plan(file: JobFile, output: str, step_seconds: float | None) -> None:
    warnings = [*file.resolution.warnings, *checkpoint_warnings(file.job.spec)]
    on_gke = not V2_NEEDS_CPU.is_broken_by(file.job.spec.slice)
    if not on_gke:
        warnings.append(f"a cluster will refuse this job: {V2_NEEDS_CPU.message}")
    cost = cost_of(file.resolution, step_seconds)
    if output == "table":
        from tpu_training_operator.cli.summary import print_summary

        print_summary(file, warnings, cost)
        return
    document = {
        "resolved": file.resolution.resolved.as_json(),
        "warnings": warnings,
        "cost": cost.as_json(),
    }
    objects = _objects(file) if on_gke else iter(())
    if output == "json":
        # One object per line and one at a time: indentation would rule out Python's fast encoder, and thousands of pods
        # in memory would keep the garbage collector busy.
        lines = ",\n".join(map(json.dumps, objects))
        click.echo(f'{json.dumps(document)[:-1]}, "objects": [\n{lines}\n]}}')
        return
    click.echo(_as_text({**document, "objects": list(objects)}, output))


def _objects(file: JobFile) -> Iterator[dict[str, Any]]:
    """The objects of the first attempt."""
    job = TPUTrainingJob.model_validate(dict(file.job) | {"metadata": {**file.job.metadata, "uid": _UID}})
    yield service(job)
    yield config_map(job, file.resolution, _FIRST_ATTEMPT)
    for worker in workers(file.resolution.layout, _FIRST_ATTEMPT):
        yield worker_pod(job, file.resolution, worker)


def _as_text(document: Any, output: str) -> str:
    if output == "json":
        return json.dumps(document, indent=2)
    import yaml

    return yaml.safe_dump(document, sort_keys=False, width=120)
