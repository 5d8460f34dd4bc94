"""`tpujob logs NAME`: what the workers write, of one host, of several, or of the one that failed."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import click

from tpu_training_operator.api.status import Failure, Resolved
from tpu_training_operator.cli.cluster import (
    ClusterProblem,
    Connection,
    Target,
    cluster_options,
    find_job,
    job_key,
)
from tpu_training_operator.cli.log_following import JobNow, LogReader, NoLog, Sink
from tpu_training_operator.cli.log_sinks import OneLog, Out, SeveralLogs, Terminal
from tpu_training_operator.cli.program import program_name
from tpu_training_operator.domain.failures.failure_words import failed_where, failed_why
from tpu_training_operator.domain.naming import WorkerId

# Each log that is followed is a connection, here and from the API server to the node.
MOST_FOLLOWED = 100
_FAILED = 1


class NothingToShow(ClusterProblem):
    """The job is there, the log is not: exit status 1."""

    exit_code = _FAILED


@dataclass(frozen=True)
class Choice:
    """Whose logs, as the options say it."""

    hosts: tuple[int, ...]
    slice: int | None
    everybody: bool
    attempt: int | None


@dataclass(frozen=True)
class Manner:
    """How they are printed."""

    follow: bool
    tail: int | None
    timestamps: bool


@click.command()
@click.argument("name")
@click.option("--host", "hosts", type=int, multiple=True, help="Index in the job, or with --slice in it; repeatable.")
@click.option("--slice", "slice_index", type=int, help="The hosts of this slice only.")
@click.option("--all", "everybody", is_flag=True, help="All hosts.")
@click.option("--failed", is_flag=True, help="The worker that failed last.")
@click.option("--attempt", type=click.IntRange(min=1), help="Of this attempt. Default: the present one.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, over restarts of the gang.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of what is there.")
@click.option("--timestamps", is_flag=True, help="Each line after its time.")
@cluster_options
def logs(
    name: str,
    hosts: tuple[int, ...],
    slice_index: int | None,
    everybody: bool,
    failed: bool,
    attempt: int | None,
    follow: bool,
    tail: int | None,
    timestamps: bool,
    target: Target,
) -> None:
    """Print the logs of a job's workers; by default that of host 0, the one that reports."""
    choice = Choice(hosts, slice_index, everybody, attempt)
    if everybody and (hosts or slice_index is not None):
        raise click.UsageError("--all is every host: leave out --host and --slice")
    if failed and (choice != Choice((), None, False, None) or follow):
        raise click.UsageError("--failed is one worker whose log has ended: leave out the other choices and --follow")

    manner = Manner(follow, tail, timestamps)
    target.run(lambda connection: _print_logs(connection, name, None if failed else choice, manner))


async def _print_logs(connection: Connection, name: str, choice: Choice | None, manner: Manner) -> int:
    """`choice` None: the worker that failed last."""
    job = JobNow.of(await find_job(connection, name))
    workers = _failed(job, name) if choice is None else _chosen(job, name, choice)
    out: Out = Terminal(sys.stdout.buffer) if sys.stdout.isatty() else sys.stdout.buffer
    sink: Sink = OneLog(out) if len(workers) == 1 else SeveralLogs(out)
    key = job_key(connection, name)
    reader = LogReader(connection.client, key, job, sink, tail=manner.tail, show_times=manner.timestamps)
    if manner.follow:
        _check_number(workers)
        await reader.follow(workers, further_attempts=choice is not None and choice.attempt is None)
        return 0
    try:
        await reader.show(workers)
    except NoLog as error:
        return _instead(job, workers, error, name)
    return 0


def _failed(job: JobNow, name: str) -> list[WorkerId]:
    failure = job.status.last_failure
    if failure is None:
        raise NothingToShow(f"no worker of {name} has failed")
    return [WorkerId(failure.attempt, failure.slice, failure.host)]


def _chosen(job: JobNow, name: str, choice: Choice) -> list[WorkerId]:
    resolved, begun = job.status.resolved, job.status.attempt
    if resolved is None or begun == 0:
        raise NothingToShow(f"{name} has no workers yet: see {program_name()} status {name}")
    if choice.attempt is not None and choice.attempt > begun:
        raise click.UsageError(f"--attempt {choice.attempt}: {name} is at attempt {begun}")
    places = _places(resolved, name, choice)
    return [WorkerId(choice.attempt or begun, slice_index, host) for slice_index, host in places]


def _places(resolved: Resolved, name: str, choice: Choice) -> list[tuple[int, int]]:
    every = [(index, host) for index in range(resolved.slices) for host in range(resolved.hosts_per_slice)]
    if choice.everybody:
        return every
    if choice.slice is not None:
        if not 0 <= choice.slice < resolved.slices:
            raise click.UsageError(f"--slice {choice.slice}: {name} has {_range('slice', resolved.slices)}")
        every = [place for place in every if place[0] == choice.slice]
        if not choice.hosts:
            return every
    for host in choice.hosts:
        if not 0 <= host < len(every):
            raise click.UsageError(f"--host {host}: {name} has {_range('host', len(every))}")
    return [every[host] for host in dict.fromkeys(choice.hosts or (0,))]


def _range(noun: str, number: int) -> str:
    return f"{noun} 0 only" if number == 1 else f"{noun}s 0 to {number - 1}"


def _check_number(workers: Sequence[WorkerId]) -> None:
    if len(workers) > MOST_FOLLOWED:
        raise click.UsageError(
            f"{len(workers)} logs are too many to follow at once, the most is {MOST_FOLLOWED}: choose with --slice and"
            " --host, or leave out --follow to print one after the other"
        )


def _instead(job: JobNow, workers: Sequence[WorkerId], error: NoLog, name: str) -> int:
    """What is known of a worker whose log is gone with its pod."""
    failure = job.status.last_failure
    if failure is not None and workers == [WorkerId(failure.attempt, failure.slice, failure.host)]:
        _print_failure(failure, error)
        return 0
    hint = f"; the failed one's: {program_name()} logs {name} --failed" if failure is not None else ""
    raise NothingToShow(f"{error}{hint}")


def _print_failure(failure: Failure, error: NoLog) -> None:
    where = f"{failed_why(failure)}: {failed_where(failure)}, attempt {failure.attempt}"
    click.echo(f"{program_name()}: {error}; this is what its status has kept", err=True)
    click.echo(where)
    click.echo(failure.message)
