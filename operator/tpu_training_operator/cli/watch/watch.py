"""`tpujob watch NAME` follows a job live: as a table on a terminal, elsewhere as a line for every change."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime

import click
from rich.console import Console

from tpu_training_operator.cli.common.cluster import ClusterProblem, Connection, Target, cluster_options, find_job
from tpu_training_operator.cli.watch.display import display
from tpu_training_operator.cli.watch.job_view import JobView, job_view
from tpu_training_operator.domain.cluster_state.hosts import Host, host_of
from tpu_training_operator.domain.job.naming import gang_selector
from tpu_training_operator.kube.client import Client, Selection
from tpu_training_operator.kube.cluster import JOBS, PODS, JobKey, Object
from tpu_training_operator.kube.informer import Informer

_TICK_SECONDS = 1.0
# Events that arrive together are shown together: the start of a large gang brings thousands.
_SETTLE_SECONDS = 0.1
_FAILED = 1


class JobGone(ClusterProblem):
    """The job was deleted while it was watched."""


@click.command()
@click.argument("name")
@cluster_options
def watch(name: str, target: Target) -> None:
    """Follow a job until it ends: hosts, steps, speed, failures. Exit status 0: it succeeded, 1: it failed."""
    target.run(lambda connection: watch_to_the_end(connection, name))


async def watch_to_the_end(connection: Connection, name: str, *, err: bool = False) -> int:
    """Shows the job until it ends, on stderr if asked to; returns the exit status."""
    uid = (await find_job(connection, name))["metadata"]["uid"]
    with display(Console(highlight=False, stderr=err)) as shown:
        view = await until_over(connection, name, uid, shown.show)
    if view.has_succeeded:
        return 0
    click.echo(f"{view.state_word}: {view.message}", err=True)
    failure = view.status.last_failure
    if failure is not None and "\n" in failure.message:
        click.echo(failure.message, err=True)
    return _FAILED


async def until_over(
    connection: Connection, name: str, uid: str, show: Callable[[JobView, str | None], None]
) -> JobView:
    """Shows the job after every change until it is over. Raises JobGone if it is deleted before."""
    async with aclosing(watch_job(connection.client, JobKey(connection.namespace, name))) as seen:
        async for now in seen:
            if now.job is None or now.job["metadata"]["uid"] != uid:
                break
            view = job_view(now.job, now.hosts, datetime.now(UTC))
            show(view, now.trouble)
            if view.is_over:
                return view
    raise JobGone(f"{name} was deleted")


@dataclass(frozen=True)
class WatchedJob:
    """A job and its pods at one moment. `job`: None if it does not exist. `trouble`: why this may be out of date."""

    job: Object | None
    hosts: list[Host]
    trouble: str | None


async def watch_job(
    client: Client, key: JobKey, tick_seconds: float = _TICK_SECONDS
) -> AsyncGenerator[WatchedJob, None]:
    """Yields the job and its pods now, after every change, and after `tick_seconds` without one.

    Raises ApiError if the first list fails.
    """
    changed = asyncio.Event()
    named = Selection(JOBS, key.namespace, fields={"metadata.name": key.name})
    jobs = Informer[Object](client, named, lambda job: job, updated=changed.set)
    gang = Selection(PODS, key.namespace, gang_selector(key.name))
    pods = Informer[Host](client, gang, host_of, updated=changed.set)
    tasks = [asyncio.create_task(run) for run in (jobs.run(), pods.run())]
    for task in tasks:
        task.add_done_callback(lambda _: changed.set())
    try:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(tick_seconds):
                    await changed.wait()
                await asyncio.sleep(_SETTLE_SECONDS)
            changed.clear()
            for task in tasks:
                if task.done():
                    # An informer ends only by its error.
                    task.result()
            if jobs.is_listed and pods.is_listed:
                hosts = [host for _, host in pods.replica.items()]
                yield WatchedJob(jobs.replica.get((key.namespace, key.name)), hosts, jobs.trouble or pods.trouble)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
