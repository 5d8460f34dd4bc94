"""`tpujob status`: what the jobs of a cluster do; of one job everything, in words."""

import json
from datetime import UTC, datetime
from typing import Any

import click

from tpu_training_operator.cli.cluster import Connection, Target, cluster_options, find_job
from tpu_training_operator.cli.job_report import as_json, report_rows
from tpu_training_operator.cli.job_rows import headline, state_style
from tpu_training_operator.cli.job_table import HEADER, json_entry, table_row
from tpu_training_operator.cli.job_view import JobView, job_view
from tpu_training_operator.cli.program import program_name
from tpu_training_operator.domain.hosts import Host, host_of
from tpu_training_operator.domain.naming import gang_selector
from tpu_training_operator.kube.client import Selection
from tpu_training_operator.kube.cluster import JOBS, PODS


@click.command()
@click.argument("name", required=False)
@click.option("-A", "--all-namespaces", is_flag=True, help="The jobs of every namespace.")
@click.option("-o", "--output", type=click.Choice(["text", "json", "yaml"]), default="text", show_default=True)
@cluster_options
def status(name: str | None, all_namespaces: bool, output: str, target: Target) -> None:
    """Say what a job does and why; without NAME, list the jobs."""
    if name is None:
        target.run(lambda connection: _list(connection, None if all_namespaces else connection.namespace, output))
    elif all_namespaces:
        raise click.UsageError("a NAME is in one namespace: give --namespace instead of --all-namespaces")
    else:
        target.run(lambda connection: _show(connection, name, output))


async def _show(connection: Connection, name: str, output: str) -> int:
    job = await find_job(connection, name)
    view = job_view(job, await _hosts(connection, name), datetime.now(UTC))
    if output != "text":
        _print(as_json(view, job.get("status") or {}, program_name()), output)
        return 0
    from tpu_training_operator.cli.screen import console, screen

    title = f"{headline(view)} (namespace {view.namespace})"
    console().print(screen(title, state_style(view), report_rows(view, program_name())))
    return 0


async def _hosts(connection: Connection, name: str) -> list[Host]:
    hosts: list[Host] = []
    async for page in connection.client.pages(Selection(PODS, connection.namespace, gang_selector(name)), host_of):
        hosts += page.kept
    return hosts


async def _list(connection: Connection, namespace: str | None, output: str) -> int:
    now = datetime.now(UTC)
    views: list[JobView] = []
    async for page in connection.client.pages(Selection(JOBS, namespace), lambda job: job_view(job, (), now)):
        views += page.kept
    if output != "text":
        _print([json_entry(view) for view in views], output)
        return 0
    if not views:
        where = f"namespace {namespace!r}" if namespace is not None else "the cluster"
        click.echo(f"there are no jobs in {where}", err=True)
        return 0
    rows = [HEADER, *map(table_row, views)]
    if namespace is not None:
        rows = [row[1:] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _print(document: Any, output: str) -> None:
    if output == "json":
        click.echo(json.dumps(document, indent=2))
        return
    import yaml

    click.echo(yaml.safe_dump(document, sort_keys=False, width=120), nl=False)
