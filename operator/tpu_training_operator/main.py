"""The operator process: command line, logs, and what starts and stops when."""

import asyncio
import contextlib
import gc
import json
import logging
import secrets
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import click
from pythonjsonlogger.json import JsonFormatter

from tpu_training_operator.api.constants import MAX_HOSTS
from tpu_training_operator.domain.cluster_state.observed import slim_worker
from tpu_training_operator.domain.cluster_state.pod_events import slim_event
from tpu_training_operator.domain.cluster_state.worker_reports import Reporting
from tpu_training_operator.domain.objects.shared import WorkerNetworkPolicy
from tpu_training_operator.kube.client import Client, ClientOptions, connect
from tpu_training_operator.kube.cluster import EVENTS, PODS, JobKey, Object
from tpu_training_operator.kube.credentials import Credentials, NoCredentials, load_credentials
from tpu_training_operator.kube.errors import ApiError, Unavailable
from tpu_training_operator.kube.turns import TokenBucket, Turns
from tpu_training_operator.runtime.cached_cluster import CachedCluster
from tpu_training_operator.runtime.controller import Controller, Haste, beat
from tpu_training_operator.runtime.events import EventSender
from tpu_training_operator.runtime.health import Liveness, serve_health
from tpu_training_operator.runtime.inbox import Inboxes
from tpu_training_operator.runtime.job_watch import JobWatch
from tpu_training_operator.runtime.leadership import Election, LeaseName, OwnPod
from tpu_training_operator.runtime.metrics import MOST_NAMESPACES, Metrics, serve_metrics
from tpu_training_operator.runtime.name_servers import NameServers
from tpu_training_operator.runtime.progress.pki import Authority, BadSecret, ServiceName, load_authority, server_tls
from tpu_training_operator.runtime.progress.server import ProgressServer, serve
from tpu_training_operator.runtime.progress.tokens import Reviewer
from tpu_training_operator.runtime.queues import Queues
from tpu_training_operator.runtime.reconciler import Reconciler
from tpu_training_operator.runtime.resync import jobs_to_reconcile
from tpu_training_operator.runtime.watching import Watching, WorkloadWatching
from tpu_training_operator.version import version

log = logging.getLogger(__name__)

# What is kept of listed objects, for kinds with many or large objects.
_KEPT = {PODS: slim_worker, EVENTS: slim_event}
_RETRY_SECONDS = 2.0
_STOP_SECONDS = 5.0
# At most some megabytes of garbage.
_OBJECTS_BETWEEN_COLLECTIONS = 20_000


_Work = Callable[[contextlib.AsyncExitStack], Awaitable[None]]


@dataclass(frozen=True)
class Options:
    """The options of the command line. Without `namespaces` the operator serves the whole cluster; without a `service`
    workers cannot report; without a `lease` it works at once. `pod_name`: the pod of this process, in the namespace of
    the Lease."""

    namespaces: tuple[str, ...]
    qps: float
    burst: int
    health_port: int
    metrics_port: int | None
    progress_port: int
    service: ServiceName | None
    max_hosts: int
    isolate_workers: bool = True
    package_index: bool = True
    worker_ingress: tuple[Object, ...] = ()
    lease: LeaseName | None = None
    pod_name: str = ""
    metrics_namespaces: int = MOST_NAMESPACES


class Operator:
    """One operator process."""

    def __init__(self, credentials: Credentials, options: Options) -> None:
        self._credentials = credentials
        self._options = options
        self._controller: Controller | None = None
        self._health: Liveness | None = None
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Runs until a signal comes, or this process no longer leads. Raises OSError if a port is taken."""
        self._claim_signals()
        metrics = Metrics(namespaces=self._options.metrics_namespaces)
        async with contextlib.AsyncExitStack() as resources:
            enter = resources.enter_async_context
            await enter(serve_health(self._options.health_port, self._check))
            if self._options.metrics_port is not None:
                await enter(serve_metrics(self._options.metrics_port, metrics))
            # A separate client: watches must not wait behind thousands of creations.
            watcher = await enter(connect(self._credentials, ClientOptions(connections=0)))
            job_watches = {
                namespace: JobWatch(watcher, self._credentials, namespace, self._claim_signals)
                for namespace in self._options.namespaces or (None,)
            }
            for job_watch in job_watches.values():
                _run_until_closed(resources, job_watch.run(), "job watch")
            work = partial(self._work, watcher, job_watches, metrics)
            lease = self._options.lease
            working = _run_until_closed(
                resources, self._take_turns(lease, work, metrics) if lease else _work_alone(work), "work"
            )
            stopping = _run_until_closed(resources, self._stop.wait(), "stop")
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()

    def _claim_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)

    async def _take_turns(self, lease: LeaseName, work: _Work, metrics: Metrics) -> None:
        """Waits until this process leads, then works as long as it does. The process ends after that, because what it
        knows and has counted belongs to its term."""
        options, identity = self._options, f"{socket.gethostname()}-{secrets.token_hex(4)}"
        # A separate client: a renewal must not wait behind thousands of creations.
        async with connect(self._credentials, ClientOptions(connections=2)) as client:
            pod = OwnPod(client, lease.namespace, options.pod_name) if options.service and options.pod_name else None
            election = Election(client, lease, identity, client.clock.now, time.monotonic)
            if pod:
                await pod.set_label(leads=False)
            await election.win()
            try:
                await self._work_while_leading(election, pod, work, metrics)
            finally:
                await asyncio.gather(election.release(), _no_longer_leads(pod))

    async def _work_while_leading(self, election: Election, pod: OwnPod | None, work: _Work, metrics: Metrics) -> None:
        async with contextlib.AsyncExitStack() as resources:
            begun = asyncio.create_task(_begin_to_lead(resources, pod, work), name="begin to work")
            try:
                await election.hold(begun)
            finally:
                metrics.leads(leads=False)
                await _cancel(begun)

    async def _work(
        self,
        watcher: Client,
        job_watches: Mapping[str | None, JobWatch],
        metrics: Metrics,
        resources: contextlib.AsyncExitStack,
    ) -> None:
        """Reconciles jobs and receives reports until `resources` are closed."""
        options, enter = self._options, resources.enter_async_context
        metrics.leads(leads=True)

        def answered(method: str, status: int, seconds: float) -> None:
            metrics.request_answered(method, status, seconds)
            beat()

        rate = TokenBucket(options.qps, options.burst, time.monotonic) if options.qps else None
        client_options = ClientOptions(turns=Turns(rate), on_answer=answered, keep=_KEPT)
        client = await enter(connect(self._credentials, client_options))
        watcher.clock = client.clock
        now = client.clock.now
        watching = Watching(watcher, job_watches, self._hint)
        cluster = CachedCluster(client, watching.served)
        authority = await _load_authority(client, options.service) if options.service else None
        inboxes, reporting = None, None
        if options.service and authority:
            inboxes = Inboxes(now, options.qps) if options.qps else Inboxes(now)
            url = options.service.url(options.progress_port)
            reporting = Reporting(url, authority.pem.certificate.decode())
        events = EventSender(client)
        workload_watching = WorkloadWatching(watcher, options.namespaces, self._hint)
        # The other client keeps only workers of the pods that it lists.
        name_servers = NameServers(watcher, time.monotonic)
        reconciler = Reconciler(
            cluster,
            now,
            fresh=cluster.fresh,
            events=events,
            inboxes=inboxes,
            reporting=reporting,
            network_policy=WorkerNetworkPolicy(options.worker_ingress) if options.isolate_workers else None,
            metrics=metrics,
            max_hosts=options.max_hosts,
            package_index=options.package_index,
            queues=Queues(client, workload_watching.begin),
            name_servers=name_servers,
        )
        list_jobs = partial(jobs_to_reconcile, cluster, options.namespaces, now, metrics)
        self._controller = Controller(reconciler, list_jobs, metrics=metrics)
        if options.service and authority and inboxes:
            tls = await enter(server_tls(authority, options.service.dns_names, _now))
            reviewer = Reviewer(client, time.monotonic)
            enqueue = self._controller.enqueue_within
            service = ProgressServer(reviewer, inboxes, enqueue, now, time.monotonic, metrics)
            await enter(serve(service, options.progress_port, tls))
        runs = {
            "events": events.run(),
            "controller": self._controller.run(),
            "watching": watching.run(),
            "queues": workload_watching.run(),
            "name servers": name_servers.need_endpoints(),
        }
        for name, work in runs.items():
            _run_until_closed(resources, work, name)
        self._health = Liveness(self._controller, (client, watcher), watching)

    def _check(self) -> Mapping[str, float]:
        return self._health.check() if self._health else {}

    def _hint(self, key: JobKey, job_version: str | None, haste: Haste) -> None:
        if self._controller:
            self._controller.enqueue(key, haste, job_version=job_version)


async def _load_authority(cluster: Client, service: ServiceName) -> Authority | None:
    """Loads the authority from the service's Secret as soon as the API server answers; None if the Secret cannot be
    used. Training works without reports."""
    while True:
        try:
            return await load_authority(cluster, service, _now())
        except Unavailable as error:
            log.warning("the certificate authority of the progress service cannot be read yet: %s", error)
            await asyncio.sleep(_RETRY_SECONDS)
        except (ApiError, BadSecret) as error:
            log.error("the progress service is off, workers cannot report: %s", error)
            return None


def _now() -> datetime:
    return datetime.now(UTC)


async def _work_alone(work: _Work) -> None:
    async with contextlib.AsyncExitStack() as resources:
        await work(resources)
        await asyncio.Event().wait()


async def _begin_to_lead(resources: contextlib.AsyncExitStack, pod: OwnPod | None, work: _Work) -> None:
    await work(resources)
    if pod:
        await pod.keep_label()


async def _no_longer_leads(pod: OwnPod | None) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_STOP_SECONDS):
            if pod:
                await pod.set_label(leads=False)


def _run_until_closed(
    resources: contextlib.AsyncExitStack, work: Coroutine[Any, Any, object], name: str
) -> "asyncio.Task[Any]":
    """Runs `work` as a task, which is cancelled when `resources` are closed."""
    task = asyncio.create_task(work, name=name)
    resources.push_async_callback(_cancel, task)
    return task


async def _cancel(task: "asyncio.Task[Any]") -> None:
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _configure_logs(level: str, log_format: str) -> None:
    """Logs one JSON object per line for machines, or plain lines for people."""
    handler = logging.StreamHandler(sys.stdout)
    if log_format == "json":
        fields = "%(asctime)s %(levelname)s %(name)s %(message)s"
        names = {"asctime": "time", "levelname": "level", "name": "logger"}
        handler.setFormatter(JsonFormatter(fields, rename_fields=names))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def _spare_the_collector() -> None:
    """Makes garbage collections rare. A pass parses thousands of small objects, which reference counting frees. With
    Python's defaults, collections took a fifth of the processor time of a pass over a large gang."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)


class _Parsed(click.ParamType[Any]):
    """A value that `parse` reads; it raises ValueError with a message for the user."""

    def __init__(self, name: str, parse: Callable[[str], object]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _parse_lease(text: str) -> LeaseName:
    name, _, namespace = text.rpartition(".")
    if not name or not namespace:
        raise ValueError(f"{text!r} is not NAME.NAMESPACE of a Lease, such as tpu-training-operator.tpu-system")
    return LeaseName(name, namespace)


def _parse_ingress_rule(text: str) -> Object:
    try:
        rule = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(rule, dict) or not rule.keys() <= {"from", "ports"}:
        raise ValueError(f"{text!r} is not an ingress rule of a NetworkPolicy, an object with `from` and `ports`")
    return rule


@click.command()
@click.version_option(version(), prog_name="tpu-training-operator")
@click.option("--namespace", "-n", "namespaces", multiple=True, help="Serve this namespace; repeatable. Default: all.")
@click.option("--health-port", default=8080, show_default=True, help="Port of /healthz.")
@click.option("--metrics-port", type=int, help="Port of /metrics. Default: none.")
@click.option(
    "--metrics-namespaces",
    type=click.IntRange(0, 1000),
    default=MOST_NAMESPACES,
    show_default=True,
    help="So many namespaces, the first ones that have jobs, get metrics of their own. 0: no name is shown.",
)
@click.option("--progress-port", default=8443, show_default=True, help="Port of the progress service.")
@click.option(
    "--progress-service",
    "service",
    type=_Parsed("NAME.NAMESPACE", ServiceName.parse),
    help="The Service through which workers reach the progress service. Default: workers do not report.",
)
@click.option(
    "--lease",
    type=_Parsed("NAME.NAMESPACE", _parse_lease),
    help="Work only while holding this Lease, of several operators with the same one. Default: work at once.",
)
@click.option("--pod-name", default="", help="With --lease: this pod, which is labelled while it works.")
@click.option(
    "--isolate-workers/--no-isolate-workers",
    default=True,
    show_default=True,
    help="Create a NetworkPolicy for each job, so that only its own workers can reach each other.",
)
@click.option(
    "--package-index/--no-package-index",
    default=True,
    show_default=True,
    help="Let workers install the requirements.txt of trainer.code from an index, and not from a wheelhouse only.",
)
@click.option(
    "--worker-ingress",
    type=_Parsed("JSON", _parse_ingress_rule),
    multiple=True,
    help="A further ingress rule for these policies, such as for a Prometheus that reads libtpu's metrics; repeatable.",
)
@click.option(
    "--qps",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="The most API requests per second, on average. 0: as many as the API server takes.",
)
@click.option(
    "--burst",
    type=click.IntRange(min=1),
    default=200,
    show_default=True,
    help="With --qps: API requests at once, before its limit counts.",
)
@click.option(
    "--max-hosts",
    type=click.IntRange(1, MAX_HOSTS),
    default=MAX_HOSTS,
    show_default=True,
    help="Jobs with more hosts are never started.",
)
@click.option("--log-level", type=click.Choice(["DEBUG", "INFO", "WARNING"]), default="INFO", show_default=True)
@click.option("--log-format", type=click.Choice(["json", "plain"]), default="json", show_default=True)
def main(log_level: str, log_format: str, **options: Any) -> None:
    """Run the operator against the cluster of this pod, or of KUBECONFIG."""
    _configure_logs(log_level, log_format)
    try:
        credentials = load_credentials()
    except NoCredentials as error:
        raise click.ClickException(str(error)) from None
    _spare_the_collector()
    try:
        asyncio.run(Operator(credentials, Options(**options)).run())
    except OSError as error:
        # A port that is taken stays taken. The kubelet starts the container again.
        raise click.ClickException(f"the operator cannot start: {error}") from None
