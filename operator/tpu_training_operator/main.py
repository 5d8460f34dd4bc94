"""The operator process: kopf as plumbing around the controller.

kopf watches, logs in, probes and stops; it never writes to a job. Only `event` handlers are used, which leave neither
finalizers nor annotations behind: a job stays deletable and GitOps tools see no drift when the operator is gone.
The only importer of kopf.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import click
import kopf

from tpu_training_operator.api.constants import GROUP, LABEL_JOB_NAME, PLURAL, VERSION
from tpu_training_operator.runtime.cluster import JOBS
from tpu_training_operator.runtime.controller import Controller
from tpu_training_operator.runtime.credentials import Credentials, NoCredentials, load_credentials
from tpu_training_operator.runtime.health import Health
from tpu_training_operator.runtime.kubernetes_cluster import connect
from tpu_training_operator.runtime.logs import LogFormat, configure_logs
from tpu_training_operator.runtime.reconciler import JobKey, Reconciler


class Operator:
    """One operator process. `namespaces` empty means the whole cluster."""

    def __init__(self, credentials: Credentials, namespaces: tuple[str, ...], qps: float, burst: int) -> None:
        self._credentials = credentials
        self._namespaces = namespaces
        self._qps = qps
        self._burst = burst
        self._resources = contextlib.AsyncExitStack()
        self._controller: Controller | None = None
        self._health: Health | None = None

    def registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.startup(registry=registry)(self._start)
        kopf.on.cleanup(registry=registry)(self._stop)
        kopf.on.login(registry=registry)(self._login)
        kopf.on.probe(registry=registry, id="controller")(self._probe)
        kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(self._job_event)
        kopf.on.event("", "v1", "pods", labels={LABEL_JOB_NAME: kopf.PRESENT}, registry=registry)(self._pod_event)
        return registry

    async def _start(self, **_: Any) -> None:
        cluster = await self._resources.enter_async_context(connect(self._credentials, self._qps, self._burst))

        async def list_keys() -> list[JobKey]:
            keys: list[JobKey] = []
            for namespace in self._namespaces or (None,):
                jobs = await cluster.list(JOBS, namespace)
                keys += (JobKey(job["metadata"]["namespace"], job["metadata"]["name"]) for job in jobs)
            return keys

        self._controller = Controller(Reconciler(cluster, lambda: datetime.now(UTC)), list_keys)
        self._health = Health(self._controller, cluster)
        task = asyncio.create_task(self._controller.run(), name="controller")
        self._resources.push_async_callback(_cancel, task)

    async def _stop(self, **_: Any) -> None:
        await self._resources.aclose()

    async def _login(self, **_: Any) -> kopf.ConnectionInfo:
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
        )

    async def _probe(self, **_: Any) -> dict[str, float]:
        return self._health.check() if self._health else {}

    async def _job_event(self, namespace: str | None, name: str | None, **_: Any) -> None:
        self._hint(namespace, name)

    async def _pod_event(self, namespace: str | None, labels: Mapping[str, str], **_: Any) -> None:
        self._hint(namespace, labels.get(LABEL_JOB_NAME))

    def _hint(self, namespace: str | None, name: str | None) -> None:
        if self._controller and namespace and name:
            self._controller.hint(JobKey(namespace, name))


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    # Only what the handlers name is watched; no look at CRDs and namespaces, so no rights to them.
    settings.scanning.disabled = True
    settings.watching.label_selectors["pods"] = LABEL_JOB_NAME
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    return settings


@click.command()
@click.option("--namespace", "-n", "namespaces", multiple=True, help="Serve this namespace; repeatable. Default: all.")
@click.option("--health-port", default=8080, show_default=True, help="Port of /healthz.")
@click.option("--qps", default=50.0, show_default=True, help="API requests per second, on average.")
@click.option("--burst", default=200, show_default=True, help="API requests at once.")
@click.option("--log-level", type=click.Choice(["DEBUG", "INFO", "WARNING"]), default="INFO", show_default=True)
@click.option("--log-format", type=click.Choice(["json", "plain"]), default="json", show_default=True)
def main(
    namespaces: tuple[str, ...], health_port: int, qps: float, burst: int, log_level: str, log_format: LogFormat
) -> None:
    """Run the operator against the cluster of this pod, or of KUBECONFIG."""
    configure_logs(log_level, log_format)
    try:
        credentials = load_credentials()
    except NoCredentials as error:
        raise click.ClickException(str(error)) from None
    operator = Operator(credentials, namespaces, qps, burst)
    kopf.run(
        registry=operator.registry(),
        settings=_settings(),
        # Another kopf operator in the cluster would pause us otherwise.
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
        liveness_endpoint=f"http://0.0.0.0:{health_port}/healthz",
    )
