"""The cluster that a command reads: its options, the connection, and what went wrong in words for people."""

import asyncio
import difflib
import functools
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tpu_training_operator.api.constants import GROUP, PLURAL
from tpu_training_operator.api.text import plain_json
from tpu_training_operator.cli.program import program_name
from tpu_training_operator.cli.words import several
from tpu_training_operator.kube.client import Client, ClientOptions, Selection, connect
from tpu_training_operator.kube.cluster import JOBS, JobKey, Object
from tpu_training_operator.kube.credentials import NoCredentials, load_personal_credentials
from tpu_training_operator.kube.errors import ApiError, Forbidden, NotFound

_INTERRUPTED = 130
_BAD_INPUT = 2
_UNAUTHORIZED = 401
_MOST_NAMES = 5
# 128 connections: --follow holds one for each log. What a cluster's strangers wrote is shown on a terminal.
OPTIONS = ClientOptions(agent="tpujob", clean=plain_json, patience=30.0, connections=128)
_RIGHTS = f"get, list and watch {PLURAL}.{GROUP} and pods; get pods/log"


class ClusterProblem(click.ClickException):
    """The cluster has no such job, refuses, or cannot be reached: exit status 2."""

    exit_code = _BAD_INPUT

    def show(self, file: object = None) -> None:
        for line in self.message.splitlines():
            click.echo(f"{program_name()}: {line}", err=True)


@dataclass(frozen=True)
class Connection:
    """An open connection. `namespace`: the one asked for, or that of the kubeconfig's context."""

    client: Client
    server: str
    namespace: str


@dataclass(frozen=True)
class Target:
    """Which cluster, as the options name it."""

    namespace: str | None
    kubeconfig: Path | None
    context: str | None

    def run(self, work: Callable[[Connection], Coroutine[Any, Any, int]]) -> None:
        """Do the work with a connection and exit with the status that it returns."""
        try:
            sys.exit(asyncio.run(self._run(work)))
        except KeyboardInterrupt:
            sys.exit(_INTERRUPTED)

    async def _run(self, work: Callable[[Connection], Awaitable[int]]) -> int:
        try:
            credentials = load_personal_credentials(self.kubeconfig, self.context)
        except NoCredentials as error:
            hint = "" if self.kubeconfig or self.context else "; name a cluster with --kubeconfig or KUBECONFIG"
            raise ClusterProblem(f"{error}{hint}") from None
        try:
            async with connect(credentials, OPTIONS) as client:
                namespace = self.namespace or credentials.namespace
                return await work(Connection(client, credentials.server, namespace))
        except ApiError as error:
            raise ClusterProblem(_explained(error, credentials.server)) from None


def cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives the command an argument `target`."""

    @functools.wraps(command)
    def with_target(
        *args: Any, namespace: str | None, kubeconfig: Path | None, context: str | None, **options: Any
    ) -> None:
        command(*args, target=Target(namespace, kubeconfig, context), **options)

    path = click.Path(path_type=Path)
    for option in (
        click.option("--context", help="The kubeconfig's context. Default: its current one."),
        click.option("--kubeconfig", type=path, help="The kubeconfig. Default: as kubectl finds it."),
        click.option("-n", "--namespace", help="Default: that of the context."),
    ):
        with_target = option(with_target)
    return with_target


async def find_job(connection: Connection, name: str) -> Object:
    """The job. Raises ClusterProblem that names what there is instead."""
    try:
        return await connection.client.get(JOBS, connection.namespace, name)
    except NotFound as error:
        if not error.reason:
            raise
        raise await no_such_job(connection, name) from None


async def no_such_job(connection: Connection, name: str) -> ClusterProblem:
    names: list[str] = []
    try:
        async for page in connection.client.pages(Selection(JOBS, connection.namespace), _name):
            names += page.kept
    except Forbidden:
        return ClusterProblem(f"there is no job {name!r} in namespace {connection.namespace!r}")
    near = difflib.get_close_matches(name, names, _MOST_NAMES, cutoff=0.5)
    offer = f"nearest: {', '.join(near)}" if near else f"it has {several(names, _MOST_NAMES)}" if names else ""
    offer = offer or "it has no jobs"
    return ClusterProblem(f"there is no job {name!r} in namespace {connection.namespace!r}; {offer}")


def _name(job: Object) -> str:
    return str(job["metadata"]["name"])


def job_key(connection: Connection, name: str) -> JobKey:
    return JobKey(connection.namespace, name)


def _explained(error: ApiError, server: str) -> str:
    if isinstance(error, Forbidden):
        return f"{error}\nneeded: {_RIGHTS}"
    if isinstance(error, NotFound) and not error.reason:
        return f"{server} does not know {PLURAL}.{GROUP}: install the operator's CRD (tpujob crd | kubectl apply -f -)"
    if error.status == _UNAUTHORIZED:
        return f"{server} does not accept your credentials: {error}"
    if error.status == 0:
        return f"{server} cannot be reached: {error}"
    return str(error)
