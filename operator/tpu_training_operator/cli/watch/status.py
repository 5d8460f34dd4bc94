"""`tpujob status` lists the jobs of a cluster, or shows one job in full."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from tpu_training_operator.api.constants import RESOURCE_NAME
from tpu_training_operator.api.words import duration
from tpu_training_operator.cli.common.cluster import Connection, Target, cluster_options, find_job
from tpu_training_operator.cli.common.errors import program_name
from tpu_training_operator.cli.common.prices import Prices, load_prices, prices_option
from tpu_training_operator.cli.common.terminal import print_columns, print_document
from tpu_training_operator.cli.watch.job_view import JobView, job_view
from tpu_training_operator.cli.watch.sections import advice
from tpu_training_operator.domain.cluster_state.hosts import Host, host_of
from tpu_training_operator.domain.cluster_state.observed import format_time
from tpu_training_operator.domain.job.naming import gang_selector
from tpu_training_operator.kube.client import Selection
from tpu_training_operator.kube.cluster import JOBS, PODS

HEADER = ("NAMESPACE", "NAME", "STATE", "SLICE", "HOSTS", "ATTEMPT", "STEP", "LEFT", "RESTARTS", "GOODPUT", "AGE")


@click.command()
@click.argument("name", required=False)
@click.option("-A", "--all-namespaces", is_flag=True, help="The jobs of every namespace.")
@click.option("-o", "--output", type=click.Choice(["text", "json", "yaml"]), default="text", show_default=True)
@prices_option
@cluster_options
def status(name: str | None, all_namespaces: bool, output: str, prices: Path | None, target: Target) -> None:
    """Show what a job does and why; without NAME, list the jobs."""
    if prices is not None and name is None:
        raise click.UsageError("--prices is about one job: give its NAME")
    table = None if prices is None else load_prices(prices)
    if name is None:
        target.run(lambda connection: _list(connection, None if all_namespaces else connection.namespace, output))
    elif all_namespaces:
        raise click.UsageError("a NAME is in one namespace: give --namespace instead of --all-namespaces")
    else:
        target.run(lambda connection: _show(connection, name, output, table))


@click.command("list")
@click.option("-A", "--all-namespaces", is_flag=True, help="The jobs of every namespace.")
@click.option(
    "-l", "--selector", default="", help="The jobs with these labels, as for kubectl: team=vision,stage!=test."
)
@click.option("-o", "--output", type=click.Choice(["text", "name", "json", "yaml"]), default="text", show_default=True)
@cluster_options
def list_jobs(all_namespaces: bool, selector: str, output: str, target: Target) -> None:
    """List the jobs: state, slice, step, time left."""
    target.run(lambda connection: _list(connection, None if all_namespaces else connection.namespace, output, selector))


async def _show(connection: Connection, name: str, output: str, prices: Prices | None) -> int:
    job = await find_job(connection, name)
    hosts: list[Host] = []
    async for page in connection.client.pages(Selection(PODS, connection.namespace, gang_selector(name)), host_of):
        hosts += page.items
    view = replace(job_view(job, hosts, datetime.now(UTC)), prices=prices)
    if output != "text":
        print_document(as_json(view, job.get("status") or {}), output)
        return 0
    from tpu_training_operator.cli.watch.display import print_report

    print_report(view)
    return 0


async def _list(connection: Connection, namespace: str | None, output: str, selector: str = "") -> int:
    now = datetime.now(UTC)
    views: list[JobView] = []
    # A key without a value is sent as it stands.
    selection = Selection(JOBS, namespace, {selector: None} if selector else {})
    async for page in connection.client.pages(selection, lambda job: job_view(job, (), now)):
        views += page.items
    if output == "name":
        for view in views:
            click.echo(f"{RESOURCE_NAME}/{view.name}")
        return 0
    if output != "text":
        print_document([_entry(view) for view in views], output)
        return 0
    if not views:
        where = f"namespace {namespace!r}" if namespace is not None else "the cluster"
        click.echo(f"there are no jobs in {where}{f' with labels {selector}' if selector else ''}", err=True)
        return 0
    rows = [HEADER, *map(table_row, views)]
    if namespace is not None:
        rows = [row[1:] for row in rows]
    print_columns(rows)
    return 0


def table_row(view: JobView) -> tuple[str, ...]:
    """Returns the cells under HEADER."""
    progress, resolved, left = view.status.progress, view.status.resolved, _seconds_left(view)
    return (
        view.namespace,
        view.name,
        "Deleting" if view.is_being_deleted else view.state_word or "-",
        view.slice or "-",
        str(resolved.hosts) if resolved else "-",
        str(view.status.attempt),
        f"{progress.step}/{progress.total_steps}" if progress else "-",
        duration(left) if left is not None else "-",
        str(view.status.restarts.total),
        (view.goodput and view.goodput.ratio) or "-",
        duration((view.now - view.created).total_seconds()),
    )


def _seconds_left(view: JobView) -> int | None:
    progress = view.status.progress
    return progress.estimated_remaining_seconds if progress and not view.is_over else None


def _entry(view: JobView) -> dict[str, Any]:
    progress, resolved = view.status.progress, view.status.resolved
    return {
        "name": view.name,
        "namespace": view.namespace,
        "state": view.state_word or None,
        "isBeingDeleted": view.is_being_deleted,
        "slice": view.slice or None,
        "hosts": resolved.hosts if resolved else None,
        "attempt": view.status.attempt,
        "step": progress.step if progress else None,
        "totalSteps": progress.total_steps if progress else None,
        "remainingSeconds": _seconds_left(view),
        "restarts": dict(view.status.restarts.by_class),
        "goodput": view.goodput.ratio if view.goodput else None,
        "creationTime": format_time(view.created),
    }


def as_json(view: JobView, raw_status: dict[str, Any]) -> dict[str, Any]:
    """Returns the status as the operator wrote it, and what follows from it, the pods and the clock."""
    hosts, goodput = view.hosts, view.goodput
    return {
        "name": view.name,
        "namespace": view.namespace,
        "time": format_time(view.now),
        "status": raw_status,
        "hosts": hosts
        and {
            "total": hosts.total,
            "ready": hosts.ready,
            "finished": hosts.finished,
            "notReady": [{"why": group.why, "hosts": list(group.places)} for group in hosts.others],
        },
        "budgets": {
            each.failure_class.value: {"restarts": each.total, "counting": each.counting, "limit": each.limit}
            for each in view.restarts_by_class
        },
        **_cost(view),
        "goodputNow": goodput and goodput.as_json(),
        "toDo": advice(view, program_name()),
    }


def _cost(view: JobView) -> dict[str, Any]:
    usage = view.status.usage
    if view.prices is None or usage is None:
        return {}
    known = {"soFar": usage.chip_hours, "whenItEnds": usage.forecast_chip_hours}
    return {"cost": {when: view.prices.cost(chip_hours, view.status) for when, chip_hours in known.items()}}
