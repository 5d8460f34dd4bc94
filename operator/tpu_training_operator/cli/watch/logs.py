"""`tpujob logs NAME` prints the logs of one host, of several, or of the worker that failed."""

import sys
from dataclasses import dataclass
from typing import Any

import click

from tpu_training_operator.api.conditions import ConditionType, find
from tpu_training_operator.api.status import Resolved
from tpu_training_operator.api.text import plain
from tpu_training_operator.cli.common.cluster import ClusterProblem, Connection, Target, cluster_options, find_job
from tpu_training_operator.cli.common.errors import program_name
from tpu_training_operator.cli.watch.log_reader import JobNow, LogReader, NoLog, Write
from tpu_training_operator.domain.failures.messages import describe_attempt, describe_class, describe_place
from tpu_training_operator.domain.job.naming import WorkerId
from tpu_training_operator.kube.cluster import JobKey

# Each followed log takes a connection here, and one from the API server to the node.
MOST_FOLLOWED = 100


_ENTRY_CHECK = WorkerId(0, 0, 0)


class NothingToShow(ClusterProblem):
    """The job exists, but the log does not."""


@dataclass(frozen=True)
class LogSelection:
    """The workers whose logs the options ask for."""

    hosts: tuple[int, ...] = ()
    slice: int | None = None
    all_hosts: bool = False
    failed: bool = False
    attempt: int | None = None
    follow: bool = False


@click.command()
@click.argument("name")
@click.option(
    "--host",
    "hosts",
    type=int,
    multiple=True,
    metavar="N",
    help="The host with this index, counted over the job, or within the slice if --slice-index is given. Repeatable.",
)
@click.option(
    "--slice-index", "slice", type=int, metavar="N", help="Only the hosts of the slice with this index, from 0."
)
@click.option("--all", "all_hosts", is_flag=True, help="All hosts.")
@click.option("--failed", is_flag=True, help="The worker that failed last.")
@click.option(
    "--attempt",
    type=click.IntRange(min=0),
    metavar="N",
    help="The attempt to show; 0: the entry check. Default: current.",
)
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines, over restarts of the gang.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines written so far.")
@click.option("--timestamps", is_flag=True, help="Print the time before each line.")
@cluster_options
def logs(name: str, tail: int | None, timestamps: bool, target: Target, **options: Any) -> None:
    """Print the logs of a job's workers; by default of host 0, which reports the progress."""
    selection = LogSelection(**options)
    if selection.all_hosts and (selection.hosts or selection.slice is not None):
        raise click.UsageError("--all is every host: leave out --host and --slice-index")
    if selection.failed and selection != LogSelection(failed=True):
        raise click.UsageError("--failed is one worker whose log has ended: leave out the other choices and --follow")
    target.run(lambda connection: _print_logs(connection, name, selection, tail, timestamps))


async def _print_logs(
    connection: Connection, name: str, selection: LogSelection, tail: int | None, show_times: bool
) -> int:
    job = JobNow.of(await find_job(connection, name))
    workers = _failed_worker(job, name) if selection.failed else _selected_workers(job, name, selection)
    key, write = JobKey(connection.namespace, name), _printer(places=len(workers) > 1)
    reader = LogReader(connection.client, key, job, write, _say, tail=tail, show_times=show_times)
    if selection.follow:
        if len(workers) > MOST_FOLLOWED:
            raise click.UsageError(
                f"{len(workers)} logs are too many to follow at once, the most is {MOST_FOLLOWED}: choose with"
                " --slice-index and --host, or leave out --follow to print one after the other"
            )
        await reader.follow(workers, further_attempts=selection.attempt is None)
        return 0
    try:
        await reader.show(workers)
    except NoLog as error:
        _print_failure(job, workers, error, name)
    return 0


def _printer(*, places: bool) -> Write:
    """Prints lines to stdout; with `places`, each after `[slice/host]`.

    A terminal obeys control characters, and logs are not trusted, so a terminal gets them without such characters. A
    pipe or a file gets the bytes that the container wrote.
    """
    out, is_terminal = sys.stdout.buffer, sys.stdout.isatty()

    def write(worker: WorkerId, lines: list[bytes]) -> None:
        place = f"[{worker.slice}/{worker.host}] ".encode() if places else b""
        if is_terminal:
            lines = [plain(line.decode(errors="replace")).encode() for line in lines]
        out.write(b"".join(place + line + b"\n" for line in lines))
        out.flush()

    return write


def _say(text: str) -> None:
    click.echo(f"{program_name()}: {text}", err=True)


def _failed_worker(job: JobNow, name: str) -> list[WorkerId]:
    failure = job.status.last_failure
    if failure is None:
        raise NothingToShow(f"no worker of {name} has failed")
    return [WorkerId(failure.attempt, failure.slice, failure.host)]


def _selected_workers(job: JobNow, name: str, selection: LogSelection) -> list[WorkerId]:
    resolved, newest = job.status.resolved, job.status.attempt
    had_entry_check = find(job.status.conditions, ConditionType.ENTRY_CHECK_PASSED) is not None
    if selection.attempt == 0 or (newest == 0 and had_entry_check):
        return [_ENTRY_CHECK]
    if resolved is None or newest == 0:
        raise NothingToShow(f"{name} has no workers yet: see {program_name()} status {name}")
    if selection.attempt is not None and selection.attempt > newest:
        raise click.UsageError(f"--attempt {selection.attempt}: {name} is at attempt {newest}")
    places = _places(resolved, name, selection)
    return [WorkerId(selection.attempt or newest, slice_index, host) for slice_index, host in places]


def _places(resolved: Resolved, name: str, selection: LogSelection) -> list[tuple[int, int]]:
    every = [(index, host) for index in range(resolved.slices) for host in range(resolved.hosts_per_slice)]
    if selection.all_hosts:
        return every
    if selection.slice is not None:
        if not 0 <= selection.slice < resolved.slices:
            raise click.UsageError(f"--slice-index {selection.slice}: {name} has {_range('slice', resolved.slices)}")
        every = [place for place in every if place[0] == selection.slice]
        if not selection.hosts:
            return every
    for host in selection.hosts:
        if not 0 <= host < len(every):
            raise click.UsageError(f"--host {host}: {name} has {_range('host', len(every))}")
    return [every[host] for host in dict.fromkeys(selection.hosts or (0,))]


def _range(noun: str, number: int) -> str:
    return f"{noun} 0 only" if number == 1 else f"{noun}s 0 to {number - 1}"


def _print_failure(job: JobNow, workers: list[WorkerId], error: NoLog, name: str) -> None:
    """Prints what the status says about a worker whose log was deleted with its pod."""
    failure = job.status.last_failure
    if failure is None:
        raise NothingToShow(str(error))
    if workers != [WorkerId(failure.attempt, failure.slice, failure.host)]:
        raise NothingToShow(f"{error}; the failed worker's log: {program_name()} logs {name} --failed")
    _say(f"{error}; its status says:")
    click.echo(f"{describe_class(failure)}: {describe_place(failure)}{describe_attempt(failure)}")
    click.echo(failure.message)
