"""`tpujob validate`: would a cluster accept this job? The words are those of the operator's status."""

from pathlib import Path

import click

from tpu_training_operator.cli.job_file import filename_option, load
from tpu_training_operator.domain.recipe import checkpointing


@click.command()
@filename_option
def validate(filename: Path) -> None:
    """Check a job without a cluster."""
    file = load(filename)
    for warning in (*file.resolution.warnings, *checkpointing.warnings(file.job.spec)):
        click.echo(f"warning: {warning}", err=True)
    click.echo(f"{file.job.name} is valid: {file.resolution.layout.hosts} hosts of {file.resolution.layout}")
