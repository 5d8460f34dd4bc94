"""`tpujob check-slice TYPE` finds out whether a slice is fit for training, before the first training.

It creates a job like any other, whose program is in the trainer's image (`python -m tpu_trainer slice-check full`) and
needs no code, follows the log of worker 0 for its table, and deletes the job. If this command is killed, the job still
ends at its deadline and is deleted an hour later.
"""

import asyncio
import re
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from tpu_contract.protocol import ExitCode
from tpu_contract.slice_check import SLICE_CHECK_MARKER, SliceTable, from_json
from tpu_training_operator.api import constants
from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.cli.common.changes import rehearse, set_option, set_values
from tpu_training_operator.cli.common.cluster import ClusterProblem, Connection, Target, cluster_options
from tpu_training_operator.cli.common.errors import BadInput, CommandError, VerdictCommand, program_name
from tpu_training_operator.cli.common.job_file import JobFile, check
from tpu_training_operator.cli.run.run import find_memory_problem, show_run, what_ended
from tpu_training_operator.cli.run.slice_table import print_slice_check
from tpu_training_operator.cli.run.submit import create_job
from tpu_training_operator.cli.watch.display import Lines, LiveTable, display
from tpu_training_operator.cli.watch.job_view import JobView
from tpu_training_operator.cli.watch.log_reader import JobNow, LogReader
from tpu_training_operator.cli.watch.watch import JobGone, until_over
from tpu_training_operator.domain.failures.messages import describe
from tpu_training_operator.domain.job.naming import WorkerId
from tpu_training_operator.kube.cluster import JOBS, JobKey, Object
from tpu_training_operator.kube.errors import ApiError, NotFound, Unavailable

_RIGHTS = f"create, delete, get, list and watch {constants.PLURAL}.{constants.GROUP}; list and watch pods; get pods/log"
_FAILED, _INTERRUPTED = 1, 130
# Classes that say nothing about the slice.
_NOT_THE_SLICE = (FailureClass.USER_ERROR, FailureClass.PREEMPTION)
# An older trainer takes the check for a training, and misses the entrypoint.
_NO_CHECK = re.compile(f"^{ExitCode.BadSpec.name}|No module named '?tpu_")
_LOG_SECONDS = 30.0
_KEPT_SECONDS = 3600
_ON_A_CLUSTER = {"image": "--image", "pool": "--on", "queue": "--queue"}
_TYPE = ("acceleratorType", "generation", "topology", "chipsPerHost", "devicesPerChip")
_PROGRAM = ("command", "args", "entrypoint", "code")
# What TYPE and the check itself decide.
_DECIDED = (*(f"slice.{name}" for name in _TYPE), *(f"trainer.{name}" for name in _PROGRAM), "placement", "ladder")
# No vowels, so that no suffix is a word.
_LETTERS = "bcdfghjklmnpqrstvwxz2456789"


@dataclass(frozen=True)
class SliceRequest:
    """Holds the job to check with, how long to wait for its end, whether it stays, and how to print the table."""

    file: JobFile
    timeout: int
    keep: bool
    output: str


@click.command(cls=VerdictCommand)
@click.argument("accelerator_type", metavar="TYPE")
@click.option("--image", help="The trainer's image, which the check is in. Needed on a cluster.")
@click.option("--on", "pool", metavar="POOL", help="Check the nodes of this node pool.")
@click.option("--queue", metavar="NAME", help="Kueue's LocalQueue to wait in.")
@click.option(
    "--timeout",
    type=click.IntRange(min=1),
    default=1800,
    show_default=True,
    metavar="SECONDS",
    help="Give up after this time, in which the slice may also have to be waited for.",
)
@click.option("--keep", is_flag=True, help="Leave the job and its pods, to look at their logs.")
@click.option("--here", is_flag=True, help="Check this machine instead of a cluster, with a process for each host.")
@click.option("-o", "--output", type=click.Choice(["table", "json", "html"]), default="table", show_default=True)
@set_option
@cluster_options
def check_slice(
    accelerator_type: str, timeout: int, keep: bool, here: bool, output: str, target: Target, **fields: Any
) -> None:
    """Check a slice before it trains: pods, network, storage, chips, a short training.

    Exit status: 0 if the slice is fit, 1 if a line or a host failed, 2 if there is no verdict.
    """
    if fields["image"] is None and not here:
        raise click.UsageError("name the trainer's image with --image, or check this machine with --here")
    if here and (ignored := [option for name, option in _ON_A_CLUSTER.items() if fields[name] is not None]):
        raise click.UsageError(f"{', '.join(ignored)} is for a cluster: leave it out with --here")
    for path in (assignment.partition("=")[0].removeprefix("spec.") for assignment in fields["values"]):
        if any(f"{decided}.".startswith(f"{path}.") or path.startswith(f"{decided}.") for decided in _DECIDED):
            raise click.UsageError(f"--set {path}: the check has a program of its own, and measures the slice TYPE")
    body = _job(accelerator_type, timeout, fields)
    if here:
        rehearse(body)
    request = SliceRequest(check(Path(accelerator_type), body), timeout, keep, output)
    if here:
        if (problem := find_memory_problem(request.file)) is not None:
            raise BadInput(accelerator_type, [problem])
        sys.exit(_check_here(request))
    target.run(lambda connection: _check(connection, request), _RIGHTS)


def _job(accelerator_type: str, timeout: int, fields: Mapping[str, Any]) -> Object:
    """Returns the job, with a name that no other check has: two may run at the same time."""
    label = re.sub("[^a-z0-9]+", "-", accelerator_type.lower())[:30].strip("-")
    name = f"check-{label}-{''.join(secrets.choice(_LETTERS) for _ in range(5))}"
    metadata: Object = {"name": name}
    trainer: Object = {"command": constants.SLICE_CHECK_COMMAND}
    if fields["queue"] is not None:
        metadata["labels"] = {constants.LABEL_QUEUE: fields["queue"]}
    if fields["image"] is not None:
        trainer["image"] = fields["image"]
    if fields["pool"] is not None:
        trainer["nodeSelector"] = {constants.NODE_LABEL_NODE_POOL: fields["pool"]}
    spec: Object = {
        "slice": {"acceleratorType": accelerator_type},
        "trainer": trainer,
        # An example for each replica, however many there are.
        "recipe": {
            "tunedOn": {"acceleratorType": "v5litepod-1"},
            "globalBatchSize": 1,
            "trainSteps": 20,
            "optimizer": {"name": "sgd", "learningRate": 0.01},
        },
        "runPolicy": {
            "activeDeadlineSeconds": timeout,
            "ttlSecondsAfterFinished": _KEPT_SECONDS,
            # One attempt: a second one would only hide what the first has found.
            "restart": {"limits": [{"class": each.value, "max": 0} for each in FailureClass]},
        },
    }
    body: Object = {"apiVersion": constants.API_VERSION, "kind": constants.KIND, "metadata": metadata, "spec": spec}
    set_values(body, fields["values"])
    return body


class SliceLog:
    """What the check's job tells: its newest state, and the last table in the log of its newest attempt's worker 0."""

    def __init__(self, shown: LiveTable | Lines | None = None) -> None:
        self._shown, self._attempt = shown, 0
        self.view: JobView | None = None
        self.table: SliceTable | None = None

    def show(self, view: JobView, trouble: str | None = None) -> None:
        self.view = view
        if self._shown is not None:
            self._shown.show(view, trouble)

    def write(self, worker: WorkerId, lines: Iterable[bytes]) -> None:
        if worker.attempt != self._attempt:
            self._attempt, self.table = worker.attempt, None
        for line in lines:
            before, _, document = line.decode(errors="replace").partition(SLICE_CHECK_MARKER)
            # A line that only looks like a table has no lines.
            if not before and (table := from_json(document)).lines:
                self.table = table


def _check_here(request: SliceRequest) -> int:
    log = SliceLog()
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="tpujob-check-slice-"))
        if not request.keep:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        outcome = asyncio.run(show_run(request.file, folder, out=_console()))
        worker = WorkerId(max(1, outcome.status.attempt), 0, 0)
        path = outcome.pods_directory / worker.pod_name(request.file.job.name) / "log.txt"
        if path.exists():
            log.write(worker, path.read_bytes().splitlines())
    if request.keep:
        click.echo(f"logs       {outcome.pods_directory}/*/log.txt", err=True)
    return _INTERRUPTED if outcome.cancelled else _judge(request, outcome.status, log.table)


async def _check(connection: Connection, request: SliceRequest) -> int:
    # As an interrupt, of which the first one cancels this task.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    with display(_console()) as shown:
        log = SliceLog(shown)
        try:
            async with _created(connection, request) as job, asyncio.timeout(request.timeout):
                await _follow(connection, job, log)
        except TimeoutError:
            why = (log.view.message if log.view is not None else "") or "no operator has seen the job"
            raise CommandError(f"no verdict within {request.timeout} s (--timeout): {why}") from None
    assert log.view is not None
    return _judge(request, log.view.status, log.table)


def _console() -> Console:
    return Console(stderr=True, highlight=False)


@asynccontextmanager
async def _created(connection: Connection, request: SliceRequest) -> AsyncIterator[Object]:
    """Creates the job, and deletes it at the end, also if an interrupt comes while it is being created."""
    file = request.file
    file.body["metadata"]["namespace"] = connection.namespace
    creation = asyncio.create_task(create_job(connection, check(file.path, file.body)))
    delete = f"delete it with: {program_name()} delete {file.job.name} {connection.options}"
    try:
        try:
            job, _ = await asyncio.shield(creation)
        except Unavailable as error:
            raise ClusterProblem(f"{error}; if the job is there, {delete}") from None
        click.echo(f"job {file.job.name} created in namespace {connection.namespace}", err=True)
        yield job
    finally:
        if not creation.cancelled() and (not creation.done() or creation.exception() is None):
            job, _ = await creation
            if request.keep:
                click.echo(f"the job stays for {_KEPT_SECONDS} s after its end; {delete}", err=True)
            else:
                await _delete(connection, job["metadata"], delete)


async def _delete(connection: Connection, metadata: Object, otherwise: str) -> None:
    try:
        await connection.client.delete(JOBS, metadata["namespace"], metadata["name"], metadata["uid"])
        click.echo(f"job {metadata['name']} deleted", err=True)
    except NotFound:
        pass
    except ApiError as error:
        click.echo(f"{program_name()}: the job could not be deleted: {error}; {otherwise}", err=True)


async def _follow(connection: Connection, job: Object, log: SliceLog) -> None:
    """Follows the job to its end, and the log of its worker 0."""
    name = job["metadata"]["name"]
    reader = LogReader(connection.client, JobKey(connection.namespace, name), JobNow.of(job), log.write, lambda _: None)
    reading = asyncio.create_task(reader.follow([WorkerId(1, 0, 0)], further_attempts=True))
    try:
        end = await until_over(connection, name, job["metadata"]["uid"], log.show)
        # The end of the log may come after the end of the job. One that is refused has none.
        if end.state is not State.INVALID:
            await asyncio.wait([reading], timeout=_LOG_SECONDS)
        if reading.done():
            reading.result()
    except JobGone as error:
        raise ClusterProblem(f"no verdict: {error.message} before its end") from None
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def _judge(request: SliceRequest, status: Status, table: SliceTable | None) -> int:
    """Prints what was found and returns the exit status. Raises CommandError if nothing can be said of the slice."""
    if table is not None:
        print_slice_check(table, str(request.file.path), request.output)
        if table.failed or status.state is State.SUCCEEDED:
            return _FAILED if table.failed else 0
    failure = status.last_failure
    if failure is not None and failure.failure_class not in _NOT_THE_SLICE:
        click.echo(f"{program_name()}: a host failed: {describe(failure)}", err=True)
        return _FAILED
    raise CommandError("no verdict: " + _explain(status))


def _explain(status: Status) -> str:
    failure = status.last_failure
    if failure is not None and _NO_CHECK.search(f"{failure.reason}: {failure.message}"):
        return f"the image's trainer does not know this check, which is of this version of tpujob: {describe(failure)}"
    if status.state is not State.SUCCEEDED:
        return describe(failure) if failure is not None else " ".join(what_ended(status))
    return "worker 0 has succeeded, and its log has no table: the log was cut, or the image has another program"
