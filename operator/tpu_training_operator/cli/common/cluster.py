"""Connects a command to its cluster: the options, the connection, and readable errors."""

import asyncio
import difflib
import functools
import logging
import shlex
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tpu_contract.words import several
from tpu_training_operator.api.constants import GROUP, PLURAL
from tpu_training_operator.api.text import plain_json
from tpu_training_operator.cli.common.errors import CommandError
from tpu_training_operator.kube.client import Client, ClientOptions, Selection, connect
from tpu_training_operator.kube.cluster import JOBS, Object
from tpu_training_operator.kube.credentials import NoCredentials, load_personal_credentials
from tpu_training_operator.kube.errors import ApiError, Forbidden, NotFound

_INTERRUPTED = 130
_MOST_NAMES = 5
_RIGHTS = f"get, list and watch {PLURAL}.{GROUP} and pods; get pods/log"
# A terminal obeys control characters, so all text from the cluster is cleaned. The connections are enough for the most
# logs that can be followed at once.
OPTIONS = ClientOptions(agent="tpujob", clean=plain_json, patience=30.0, connections=128)


class ClusterProblem(CommandError):
    """The cluster does not have the job, refuses the request, or does not answer."""


@dataclass(frozen=True)
class Connection:
    """An open connection. `namespace`: the requested one, or the default of the kubeconfig's context. `cluster`: the
    options that name the cluster."""

    client: Client
    server: str
    namespace: str
    cluster: str = ""

    @property
    def options(self) -> str:
        """The options with which another command finds the same jobs."""
        return f"-n {self.namespace}{self.cluster}"


@dataclass(frozen=True)
class Target:
    """The cluster that the options name."""

    namespace: str | None
    kubeconfig: Path | None
    context: str | None

    def run(self, work: Callable[[Connection], Coroutine[Any, Any, int]], rights: str = _RIGHTS) -> None:
        """Runs `work` with a connection, then exits with the status that it returns. `rights`: those it needs."""
        # The client's log messages are for operators.
        logging.getLogger("tpu_training_operator").setLevel(logging.ERROR)
        try:
            sys.exit(asyncio.run(self._run(work, rights)))
        except KeyboardInterrupt:
            sys.exit(_INTERRUPTED)

    async def _run(self, work: Callable[[Connection], Awaitable[int]], rights: str) -> int:
        try:
            credentials = load_personal_credentials(self.kubeconfig, self.context)
        except NoCredentials as error:
            hint = "" if self.kubeconfig or self.context else "; name a cluster with --kubeconfig or KUBECONFIG"
            raise ClusterProblem(f"{error}{hint}") from None
        try:
            async with connect(credentials, OPTIONS) as client:
                namespace = self.namespace or credentials.namespace
                return await work(Connection(client, credentials.server, namespace, self._cluster_options()))
        except ApiError as error:
            raise ClusterProblem(_explanation(error, credentials.server, rights)) from None

    def _cluster_options(self) -> str:
        given = {"--context": self.context, "--kubeconfig": self.kubeconfig}
        return "".join(f" {option} {shlex.quote(str(value))}" for option, value in given.items() if value is not None)


def cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that name a cluster; the command gets them as `target`."""

    @functools.wraps(command)
    def with_target(
        *args: Any, namespace: str | None, kubeconfig: Path | None, context: str | None, **options: Any
    ) -> None:
        command(*args, target=Target(namespace, kubeconfig, context), **options)

    path = click.Path(path_type=Path)
    for option in (
        click.option("--context", help="The kubeconfig's context. Default: its current context."),
        click.option("--kubeconfig", type=path, help="The kubeconfig. Default: the one kubectl uses."),
        click.option("-n", "--namespace", help="Default: the context's namespace."),
    ):
        with_target = option(with_target)
    return with_target


async def find_job(connection: Connection, name: str) -> Object:
    """Returns the job. Raises ClusterProblem, which names similar jobs, if there is none."""
    try:
        return await connection.client.get(JOBS, connection.namespace, name)
    except NotFound as error:
        if not error.reason:
            # The API server does not know the kind.
            raise
        raise await _no_such_job(connection, name) from None


async def _no_such_job(connection: Connection, name: str) -> ClusterProblem:
    problem = f"there is no job {name!r} in namespace {connection.namespace!r}"
    names: list[str] = []
    try:
        async for page in connection.client.pages(Selection(JOBS, connection.namespace), _name):
            names += page.items
    except Forbidden:
        return ClusterProblem(problem)
    if near := difflib.get_close_matches(name, names, _MOST_NAMES, cutoff=0.5):
        return ClusterProblem(f"{problem}; nearest: {', '.join(near)}")
    return ClusterProblem(f"{problem}; it has {several(names, _MOST_NAMES) or 'no jobs'}")


def _name(job: Object) -> str:
    return str(job["metadata"]["name"])


def _explanation(error: ApiError, server: str, rights: str) -> str:
    if isinstance(error, Forbidden):
        return f"{error}\nneeded: {rights}"
    if isinstance(error, NotFound) and not error.reason:
        return f"{server} does not know {PLURAL}.{GROUP}: install the operator's CRD (tpujob crd | kubectl apply -f -)"
    if error.status == 401:
        return f"{server} does not accept your credentials: {error}"
    if error.status == 0:
        return f"{server} cannot be reached: {error}"
    return str(error)
