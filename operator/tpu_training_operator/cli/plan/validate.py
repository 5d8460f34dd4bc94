"""`tpujob validate` checks whether a cluster would accept a job."""

from pathlib import Path

import click

from tpu_training_operator.api.words import count
from tpu_training_operator.cli.code.image_contents import image_warnings
from tpu_training_operator.cli.code.option import code_option, code_warnings, pack_code
from tpu_training_operator.cli.common.changes import apply_options, set_option, slice_option
from tpu_training_operator.cli.common.job_file import filename_option, load
from tpu_training_operator.domain.job.recipe.warnings import checkpoint_warnings


@click.command()
@filename_option
@slice_option
@set_option
@code_option
def validate(filename: Path, on_slice: str | None, values: tuple[str, ...], code: Path | None) -> None:
    """Check a job without a cluster."""
    file = load(filename, change=lambda body: apply_options(body, values, on_slice))
    layout, packed = file.resolution.layout, pack_code(file, code)
    for warning in (
        *file.warnings,
        *checkpoint_warnings(file.job.spec, file.resolution.recipe.train_steps),
        *code_warnings(file, packed, [] if code is None else [code]),
        *image_warnings(file.job.spec.trainer, code, packed),
    ):
        click.echo(f"warning: {warning}", err=True)
    click.echo(f"{file.job.name} is valid: {count(layout.hosts, 'host')} of {layout}")
