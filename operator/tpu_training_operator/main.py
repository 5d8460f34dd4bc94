"""The operator process: command line, logs, and kopf as the frame around the controller.

kopf starts and stops the process; it watches nothing and writes nothing. So there are no finalizers and no
annotations: a job stays deletable and GitOps tools see no drift when the operator is gone.
"""

import asyncio
import contextlib
import gc
import itertools
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import click
from pythonjsonlogger.json import JsonFormatter

from tpu_training_operator.api.constants import MAX_HOSTS
from tpu_training_operator.domain.cluster_state.observed import slim_worker
from tpu_training_operator.domain.cluster_state.worker_reports import Reporting
from tpu_training_operator.domain.objects.shared import WorkerNetworkPolicy
from tpu_training_operator.domain.plan.restarts.waiting import slim_event
from tpu_training_operator.kube.client import Client, ClientOptions, connect
from tpu_training_operator.kube.cluster import EVENTS, PODS, JobKey, Object
from tpu_training_operator.kube.credentials import Credentials, NoCredentials, load_credentials
from tpu_training_operator.kube.errors import ApiError, Unavailable
from tpu_training_operator.kube.throttle import Throttle
from tpu_training_operator.kube.turns import Turns
from tpu_training_operator.runtime.cached_cluster import CachedCluster
from tpu_training_operator.runtime.controller import Controller
from tpu_training_operator.runtime.events import EventSender
from tpu_training_operator.runtime.health import Health, Unhealthy, beat
from tpu_training_operator.runtime.health_server import serve_health
from tpu_training_operator.runtime.inbox import Inboxes
from tpu_training_operator.runtime.leader_label import OwnPod
from tpu_training_operator.runtime.leadership import Election, LeaseName
from tpu_training_operator.runtime.metrics import Metrics
from tpu_training_operator.runtime.metrics.server import serve_metrics
from tpu_training_operator.runtime.progress.pki import Authority, BadSecret, ServiceName, load_authority, server_tls
from tpu_training_operator.runtime.progress.server import ProgressService, serve
from tpu_training_operator.runtime.progress.tokens import Reviewer
from tpu_training_operator.runtime.queue_watching import QueueWatching
from tpu_training_operator.runtime.queues import Queues
from tpu_training_operator.runtime.reconciler import Reconciler
from tpu_training_operator.runtime.resync import jobs_to_reconcile
from tpu_training_operator.runtime.watching import Haste, Watching
from tpu_training_operator.version import version


@contextlib.contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Within the block the package cannot be imported."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


with _hidden("kubernetes"):
    # kopf would load it for the sake of objects that this process does not have, which takes 26 MiB.
    import kopf

log = logging.getLogger(__name__)

# The parts of listed objects that are kept in memory, for kinds with many or large objects.
_KEPT = {PODS: slim_worker, EVENTS: slim_event}
_RETRY_SECONDS = 2.0
_STOP_SECONDS = 5.0
# Some megabytes of garbage at most.
_OBJECTS_BETWEEN_COLLECTIONS = 20_000
# Longer than any operator lives: a login ends with the first 401.
_LONGEST_LOGIN = timedelta(days=3650)
# Pauses of kopf's requests after errors: at its start it asks which kinds there are. They never end: a process that
# gave up would start again and know no better.
_BACKOFF_SECONDS = (1, 2, 4, *itertools.repeat(8, 10_000))


@dataclass(frozen=True)
class Options:
    """Without `namespaces` the operator serves the whole cluster; without a `service` no worker can report; without a
    `lease` it works at once. `pod_name`: this process's pod, in the namespace of the Lease."""

    namespaces: tuple[str, ...]
    qps: float
    burst: int
    health_port: int
    metrics_port: int | None
    progress_port: int
    service: ServiceName | None
    max_hosts: int
    fixed_node_pools: bool = False
    isolate_workers: bool = True
    worker_ingress: tuple[Object, ...] = ()
    lease: LeaseName | None = None
    pod_name: str = ""


class Operator:
    """One operator process."""

    def __init__(self, credentials: Credentials, options: Options) -> None:
        self._credentials = credentials
        self._options = options
        self._resources = contextlib.AsyncExitStack()
        self._controller: Controller | None = None
        self._health: Health | None = None
        self._turns: asyncio.Task[None] | None = None
        self._has_logged_in = False
        self.failure: OSError | None = None

    def registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.startup(registry=registry)(self._start)
        kopf.on.cleanup(registry=registry)(self._stop)
        kopf.on.login(registry=registry)(self._login)
        return registry

    async def _start(self, **_: Any) -> None:
        try:
            await self._begin()
        except OSError as error:
            # A port that is taken stays taken. The kubelet starts the container again.
            self.failure = error
            await self._resources.aclose()
            raise kopf.PermanentError(str(error)) from None

    async def _begin(self) -> None:
        metrics = Metrics()
        await self._resources.enter_async_context(serve_health(self._options.health_port, self._check))
        if self._options.metrics_port is not None:
            await self._resources.enter_async_context(serve_metrics(self._options.metrics_port, metrics))
        if self._options.lease is None:
            await self._work(self._resources, metrics)
        else:
            self._turns = asyncio.create_task(self._take_turns(self._options.lease, metrics), name="turns")
            self._resources.push_async_callback(_cancel, self._turns)

    async def _take_turns(self, lease: LeaseName, metrics: Metrics) -> None:
        """Waits until this process leads, then works. The process ends when that is over."""
        options, identity = self._options, f"{socket.gethostname()}-{secrets.token_hex(4)}"
        # With connections of its own: a renewal must not wait behind thousands of creations.
        async with connect(self._credentials, ClientOptions(connections=2)) as client:
            pod = OwnPod(client, lease.namespace, options.pod_name) if options.service and options.pod_name else None
            election = Election(client, lease, identity, client.clock.now, time.monotonic)
            if pod:
                await pod.tell(leads=False)
            await election.win()
            try:
                await self._work_while_leading(election, pod, metrics)
            except OSError as error:
                self.failure = error
            finally:
                await asyncio.gather(election.release(), _no_longer_leads(pod))
        # What this process knows and counts is of its own term. The next process begins as one that waits.
        signal.raise_signal(signal.SIGTERM)

    async def _work_while_leading(self, election: Election, pod: OwnPod | None, metrics: Metrics) -> None:
        async with contextlib.AsyncExitStack() as resources:
            begun = asyncio.create_task(self._begin_to_lead(resources, pod, metrics), name="begin to work")
            try:
                await election.hold(begun)
            finally:
                metrics.leads(leads=False)
                await _cancel(begun)

    async def _begin_to_lead(self, resources: contextlib.AsyncExitStack, pod: OwnPod | None, metrics: Metrics) -> None:
        await self._work(resources, metrics)
        if pod:
            await pod.keep_telling()

    async def _work(self, resources: contextlib.AsyncExitStack, metrics: Metrics) -> None:
        """Reconcile jobs and take reports until `resources` are closed."""
        options, enter = self._options, resources.enter_async_context
        metrics.leads(leads=True)

        def answered(method: str, status: int, seconds: float) -> None:
            metrics.request_answered(method, status, seconds)
            beat()

        throttle = Throttle(options.qps, options.burst, time.monotonic) if options.qps else None
        client_options = ClientOptions(turns=Turns(throttle), on_answer=answered, keep=_KEPT)
        client = await enter(connect(self._credentials, client_options))
        # With connections and a rate of their own: news must not wait behind thousands of creations.
        watcher = await enter(connect(self._credentials, ClientOptions(connections=0)))
        watcher.clock = client.clock
        now = client.clock.now
        watching = Watching(watcher, options.namespaces, self._hint)
        cluster = CachedCluster(client, watching.served)
        authority = await _load_authority(client, options.service) if options.service else None
        inboxes, reporting = None, None
        if options.service and authority:
            inboxes = Inboxes(now, options.qps) if options.qps else Inboxes(now)
            url = options.service.url(options.progress_port)
            reporting = Reporting(url, authority.pem.certificate.decode())
        events = EventSender(client)
        queue_watching = QueueWatching(watcher, options.namespaces, self._hint)
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
            fixed_node_pools=options.fixed_node_pools,
            queues=Queues(client, queue_watching.begin),
        )
        list_jobs = partial(jobs_to_reconcile, cluster, options.namespaces, now, metrics)
        self._controller = Controller(reconciler, list_jobs, metrics=metrics)
        if options.service and authority and inboxes:
            tls = await enter(server_tls(authority, options.service.dns_names, _now))
            reviewer = Reviewer(client, time.monotonic)
            enqueue = self._controller.enqueue_within
            service = ProgressService(reviewer, inboxes, enqueue, now, time.monotonic, metrics)
            await enter(serve(service, options.progress_port, tls))
        runs = {
            "events": events.run(),
            "controller": self._controller.run(),
            "watching": watching.run(),
            "queues": queue_watching.run(),
        }
        for name, work in runs.items():
            resources.push_async_callback(_cancel, asyncio.create_task(work, name=name))
        self._health = Health(self._controller, (client, watcher), watching)

    async def _stop(self, **_: Any) -> None:
        # If the API server is away, kopf may wait forever for an answer that its start still needs.
        end = threading.Timer(_STOP_SECONDS, _end_at_once)
        end.daemon = True
        end.start()
        await self._resources.aclose()

    async def _login(self, **_: Any) -> kopf.ConnectionInfo:
        if self._has_logged_in:
            # kopf logs in again only after its credentials were refused, and ends the process if it is given the same
            # ones. A new expiration makes them look new; the next login reads a replaced token.
            log.warning("the API server refused the operator's token; reading it again")
            await asyncio.sleep(_RETRY_SECONDS)
        self._has_logged_in = True
        authorization = await asyncio.to_thread(self._credentials.authorization)
        scheme, _space, token = (authorization or "").partition(" ")
        certificate = self._credentials.client_certificate or (None, None)
        return kopf.ConnectionInfo(
            server=self._credentials.server,
            ca_path=self._credentials.ca_file,
            insecure=not self._credentials.configuration.verify_ssl,
            scheme=scheme or None,
            token=token or None,
            certificate_path=certificate[0],
            private_key_path=certificate[1],
            expiration=_now() + _LONGEST_LOGIN,
        )

    def _check(self) -> Mapping[str, float]:
        if self._turns is not None and self._turns.done():
            raise Unhealthy("the election has stopped")
        return self._health.check() if self._health else {}

    def _hint(self, key: JobKey, job_version: str | None, haste: Haste) -> None:
        if self._controller:
            self._controller.enqueue(key, haste, job_version=job_version)


async def _load_authority(cluster: Client, service: ServiceName) -> Authority | None:
    """From the service's Secret, as soon as the API server answers; None if the Secret cannot be used. Training works
    without reports."""
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


def _end_at_once() -> None:
    log.error("the process did not stop within %g s; ending it now", _STOP_SECONDS)
    os._exit(1)


async def _no_longer_leads(pod: OwnPod | None) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_STOP_SECONDS):
            if pod:
                await pod.tell(leads=False)


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    # Watching CRDs and namespaces would need rights to them.
    settings.scanning.disabled = True
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = _BACKOFF_SECONDS
    return settings


def _configure_logs(level: str, log_format: str) -> None:
    """One JSON object a line for machines, or plain lines for people."""
    handler = logging.StreamHandler(sys.stdout)
    if log_format == "json":
        fields = "%(asctime)s %(levelname)s %(name)s %(message)s"
        names = {"asctime": "time", "levelname": "level", "name": "logger"}
        handler.setFormatter(JsonFormatter(fields, rename_fields=names))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # kopf logs every step of its start.
    logging.getLogger("kopf").setLevel(logging.WARNING)


def _spare_the_collector() -> None:
    """A pass parses thousands of small objects, which go without the collector. By default it walks through them, and
    through all modules, again and again: that took a fifth of the processor time of a pass over a large gang."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)


class _ServiceType(click.ParamType[ServiceName]):
    name = "NAME.NAMESPACE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> ServiceName:
        try:
            return ServiceName.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _LeaseType(click.ParamType[LeaseName]):
    name = "NAME.NAMESPACE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> LeaseName:
        name, _, namespace = str(value).rpartition(".")
        if not name or not namespace:
            message = f"{value!r} is not NAME.NAMESPACE of a Lease, such as tpu-training-operator.tpu-system"
            self.fail(message, param, ctx)
        return LeaseName(name, namespace)


class _IngressRuleType(click.ParamType[Object]):
    name = "JSON"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Object:
        try:
            rule = json.loads(value)
        except ValueError as error:
            self.fail(f"{value!r} is not JSON: {error}", param, ctx)
        if not isinstance(rule, dict) or not rule.keys() <= {"from", "ports"}:
            message = f"{value!r} is not an ingress rule of a NetworkPolicy, an object with `from` and `ports`"
            self.fail(message, param, ctx)
        return rule


@click.command()
@click.version_option(version(), prog_name="tpu-training-operator")
@click.option("--namespace", "-n", "namespaces", multiple=True, help="Serve this namespace; repeatable. Default: all.")
@click.option("--health-port", default=8080, show_default=True, help="Port of /healthz.")
@click.option("--metrics-port", type=int, help="Port of /metrics. Default: none.")
@click.option("--progress-port", default=8443, show_default=True, help="Port of the progress service.")
@click.option(
    "--progress-service",
    "service",
    type=_ServiceType(),
    help="The Service through which workers reach the progress service. Default: workers do not report.",
)
@click.option(
    "--lease",
    type=_LeaseType(),
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
    "--worker-ingress",
    type=_IngressRuleType(),
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
@click.option(
    "--fixed-node-pools",
    is_flag=True,
    help="Nothing creates node pools in this cluster, so a job does not wait for a slice without one.",
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
    chosen = Options(**options)
    _spare_the_collector()
    operator = Operator(credentials, chosen)
    try:
        kopf.run(
            registry=operator.registry(),
            settings=_settings(),
            # Another kopf operator in the cluster would pause us otherwise.
            standalone=True,
            clusterwide=not chosen.namespaces,
            namespaces=chosen.namespaces,
        )
    except Exception:
        if operator.failure is None:
            raise
    if operator.failure is not None:
        raise click.ClickException(f"the operator cannot start: {operator.failure}")
