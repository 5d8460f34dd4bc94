"""`tpujob watch NAME`: a job of a cluster, live: a table on a terminal, a line for every change elsewhere."""

from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from datetime import UTC, datetime
from typing import Protocol

import click
from rich.console import Console
from rich.live import Live

from tpu_training_operator.cli.cluster import (
    ClusterProblem,
    Connection,
    Target,
    cluster_options,
    find_job,
    job_key,
)
from tpu_training_operator.cli.job_rows import Row, headline, live_rows, plain_rows, state_style
from tpu_training_operator.cli.job_view import JobView, job_view
from tpu_training_operator.cli.job_watch import watch_job
from tpu_training_operator.cli.screen import screen
from tpu_training_operator.domain.hosts import host_of

_TICK_SECONDS = 1.0
_FAILED = 1


class JobGone(ClusterProblem):
    """Deleted while it was watched."""

    exit_code = _FAILED


@click.command()
@click.argument("name")
@cluster_options
def watch(name: str, target: Target) -> None:
    """Follow a job until it ends: hosts, steps, speed, failures. Exit status 0: it succeeded, 1: it failed."""
    target.run(lambda connection: _watch(connection, name))


class Display(Protocol):
    def show(self, view: JobView, trouble: str | None) -> None:
        """`trouble`: why the picture may be old."""
        ...


@contextmanager
def display(console: Console) -> Iterator[Display]:
    """The one that fits the console."""
    if not console.is_terminal:
        yield Lines()
        return
    with Live(console=console, auto_refresh=False) as live:
        yield Table(live)


class Table:
    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, view: JobView, trouble: str | None) -> None:
        note = f"connection lost, trying again: {trouble}" if trouble else None
        self._live.update(screen(headline(view), state_style(view), live_rows(view), note), refresh=True)


class Lines:
    """What has changed since the last time."""

    def __init__(self) -> None:
        self._last: list[Row] = []
        self._trouble: str | None = None

    def show(self, view: JobView, trouble: str | None) -> None:
        rows = plain_rows(view)
        for row in rows:
            if row not in self._last:
                label = f"  {row.label}: " if row.label else ""
                click.echo(f"{view.now:%H:%M:%S} {label}{row.text}")
        self._last = rows
        if trouble and not self._trouble:
            click.echo(f"{view.now:%H:%M:%S} connection lost, trying again: {trouble}", err=True)
        self._trouble = trouble


async def _watch(connection: Connection, name: str) -> int:
    uid = (await find_job(connection, name))["metadata"]["uid"]
    with display(Console(highlight=False)) as shown:
        view = await _until_over(connection, name, uid, shown)
    if view.has_succeeded:
        return 0
    click.echo(f"{view.state_word}: {view.message}", err=True)
    if view.failure is not None and "\n" in view.failure.message:
        click.echo(view.failure.message, err=True)
    return _FAILED


async def _until_over(connection: Connection, name: str, uid: str, shown: Display) -> JobView:
    pictures = watch_job(connection.client, job_key(connection, name), host_of, _TICK_SECONDS)
    async with aclosing(pictures):
        async for seen in pictures:
            if seen.job is None or seen.job["metadata"]["uid"] != uid:
                break
            hosts = [host for host in seen.pods.values() if host is not None]
            view = job_view(seen.job, hosts, datetime.now(UTC))
            shown.show(view, seen.trouble)
            if view.is_over:
                return view
    raise JobGone(f"{name} was deleted")
