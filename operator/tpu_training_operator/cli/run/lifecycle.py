"""`tpujob suspend`, `resume` and `delete`: what a user does with a job that is there."""

import asyncio
import signal
import sys
from contextlib import aclosing, suppress
from datetime import UTC, datetime

import click

from tpu_training_operator.api.constants import GROUP, PLURAL
from tpu_training_operator.api.status import State
from tpu_training_operator.api.words import count
from tpu_training_operator.cli.common.cluster import ClusterProblem, Connection, Target, cluster_options, find_job
from tpu_training_operator.cli.common.errors import WrongOption, program_name
from tpu_training_operator.cli.watch.job_view import JobView, job_view
from tpu_training_operator.cli.watch.sections import headline
from tpu_training_operator.cli.watch.watch import WatchedJob, watch_job
from tpu_training_operator.kube.cluster import JOBS, JobKey, Object
from tpu_training_operator.kube.errors import NotFound

FIELD_MANAGER = "tpujob"
"""Not the operator's, which owns fields of the same objects."""

_PATCH_RIGHTS = f"get and patch {PLURAL}.{GROUP}"
_DELETE_RIGHTS = f"get, list, watch and delete {PLURAL}.{GROUP}; list and watch pods"

yes_option = click.option("-y", "--yes", is_flag=True, help="Ask nothing.")


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@yes_option
@cluster_options
def suspend(names: tuple[str, ...], yes: bool, target: Target) -> None:
    """Stop a job's workers and keep the job: it gives its chips back, and `resume` continues it from its checkpoint."""
    target.run(lambda connection: _suspend(connection, names, wanted=True, yes=yes), _PATCH_RIGHTS)


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@cluster_options
def resume(names: tuple[str, ...], target: Target) -> None:
    """Let a suspended job go on."""
    target.run(lambda connection: _suspend(connection, names, wanted=False, yes=True), _PATCH_RIGHTS)


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@yes_option
@click.option(
    "--wait/--no-wait", "waits", default=True, show_default=True, help="Wait until the job and its workers are gone."
)
@click.option(
    "--timeout",
    type=click.IntRange(min=1),
    metavar="SECONDS",
    help="Wait for each job at most so long; the deletion goes on.  [default: without end]",
)
@cluster_options
def delete(names: tuple[str, ...], yes: bool, waits: bool, timeout: int | None, target: Target) -> None:
    """Delete a job and its workers; its checkpoints stay."""
    if timeout is not None and not waits:
        raise click.UsageError("--timeout says how long to wait, and --no-wait that nothing is waited for")
    target.run(lambda connection: _delete(connection, names, yes=yes, waits=waits, seconds=timeout), _DELETE_RIGHTS)


async def _suspend(connection: Connection, names: tuple[str, ...], *, wanted: bool, yes: bool) -> int:
    for name, job in await _find_all(connection, names):
        view = job_view(job, (), datetime.now(UTC))
        if view.is_being_deleted:
            raise ClusterProblem(f"job {name} is being deleted")
        if view.is_over and view.state is not State.INVALID:
            way_out = "" if wanted else f"; to train again: {program_name()} submit --replace"
            raise ClusterProblem(f"job {name} has ended ({view.state_word}){way_out}")
        if bool((job["spec"].get("runPolicy") or {}).get("suspend")) is wanted:
            why = "" if wanted or not view.message else f" by its spec; it is {view.state_word}: {view.message}"
            click.echo(f"job {name} is {'already' if wanted else 'not'} suspended{why}")
            continue
        if wanted and (lost := steps_lost(job, view)):
            confirm(f"Suspend job {name} {where(connection)}? {lost}", yes=yes)
        # With its uid, so that no other job of the name is meant.
        body = {"metadata": {"uid": view.uid}, "spec": {"runPolicy": {"suspend": wanted}}}
        path = f"{JOBS.path(connection.namespace)}/{name}"
        await connection.client.request("PATCH", path, body, {"fieldManager": FIELD_MANAGER})
        click.echo(f"job {name} {'suspended' if wanted else 'resumed'} in namespace {connection.namespace}")
        then = "resume" if wanted else "watch"
        click.echo(f"{'continue' if wanted else 'follow'} it with: {program_name()} {then} {name} {connection.options}")
    return 0


async def _find_all(connection: Connection, names: tuple[str, ...]) -> list[tuple[str, Object]]:
    """Returns the jobs, so that nothing is done to any if one does not exist."""
    return [(name, await find_job(connection, name)) for name in dict.fromkeys(names)]


async def _delete(
    connection: Connection, names: tuple[str, ...], *, yes: bool, waits: bool, seconds: int | None
) -> int:
    for name, job in await _find_all(connection, names):
        view = job_view(job, (), datetime.now(UTC))
        if not view.is_being_deleted:
            click.echo(describe_job(view), err=True)
            question = f"Delete job {name} {where(connection)}?"
            confirm(" ".join(filter(None, (question, steps_lost(job, view)))), yes=yes)
        if waits:
            await delete_and_wait(connection, job, seconds)
        else:
            await _ask_to_delete(connection, job)
        click.echo(f"job {name} {'deleted' if waits else 'is being deleted'} in namespace {connection.namespace}")
    return 0


def where(connection: Connection) -> str:
    return f"in namespace {connection.namespace} of {connection.server}"


def describe_job(view: JobView) -> str:
    progress = view.status.progress
    return f"{headline(view)}, step {progress.step}/{progress.total_steps}" if progress else headline(view)


def steps_lost(job: Object, view: JobView) -> str:
    """Returns a sentence if stopping the job loses what it has trained."""
    progress = view.status.progress
    if view.is_over or not progress or not progress.step or job["spec"].get("checkpoint"):
        return ""
    return f"It has no checkpoint.uri, so its {count(progress.step, 'step')} are lost."


def confirm(question: str, *, yes: bool) -> None:
    """Asks the user. Raises Abort at any other answer than yes, and WrongOption if there is nobody to ask."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise WrongOption(f"{question} Nobody can be asked here: add --yes")
    # asyncio's handler would wait for the answer before it ends the command.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        click.confirm(question, abort=True, err=True)
    finally:
        signal.signal(signal.SIGINT, before)


async def delete_and_wait(connection: Connection, job: Object, seconds: int | None = None) -> None:
    """Deletes the job, and returns when it and its workers are gone. Before it deletes, it has seen both, so a right
    that is missing keeps it from deleting. Raises ClusterProblem if they are not gone in time."""
    name, uid, told = job["metadata"]["name"], job["metadata"]["uid"], ""
    is_asked = "deletionTimestamp" in job["metadata"]
    watched = watch_job(connection.client, JobKey(connection.namespace, name))
    try:
        async with asyncio.timeout(seconds), aclosing(watched) as seen:
            async for now in seen:
                if not is_asked:
                    await _ask_to_delete(connection, job)
                    is_asked = True
                elif not (left := _what_is_left(now, uid)):
                    return
                elif left != told:
                    click.echo(f"job {name} waits for {left}", err=True)
                    told = left
    except TimeoutError:
        then = f"still waits for {told or 'the API server'}; its deletion goes on" if is_asked else "is not deleted"
        raise ClusterProblem(f"after {seconds} s (--timeout) job {name} {then}") from None
    except asyncio.CancelledError:
        if is_asked:
            click.echo(f"{program_name()}: interrupted; the deletion of job {name} goes on", err=True)
        raise


async def _ask_to_delete(connection: Connection, job: Object) -> None:
    metadata = job["metadata"]
    with suppress(NotFound):
        await connection.client.delete(JOBS, connection.namespace, metadata["name"], metadata["uid"])


def _what_is_left(now: WatchedJob, uid: str) -> str:
    """Returns what of a deleted job is still there, in words."""
    workers = sum(host.owner == uid and not host.has_ended for host in now.hosts)
    is_there = now.job is not None and now.job["metadata"]["uid"] == uid
    finalizers = now.job["metadata"].get("finalizers") or () if now.job is not None and is_there else ()
    parts = [f"{count(workers, 'worker')} to stop"] if workers else []
    parts += [f"finalizer {name}" for name in finalizers]
    return " and ".join(parts) or ("the API server" if is_there else "")
