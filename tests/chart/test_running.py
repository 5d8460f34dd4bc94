"""The operator with the arguments and rights that the chart gives it: one for every namespace, and one for two."""

import json
import socket
import ssl
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.chart.cluster import Cluster, Operator, apply_job, start_operator
from tests.chart.helm import CHART, FULL_NAME, NAMESPACE, Helm
from tests.chart.switches import NAMESPACES, OTHER
from tests.cluster.control_plane import ControlPlane
from tests.cluster.deadlines import deadline
from tests.cluster.ports import LOOPBACK
from tests.cluster.processes import wait_until
from tpu_training_operator.api.constants import CA_CERTIFICATE_KEY


@dataclass(frozen=True)
class Running:
    """An installed operator, and a job in one of its namespaces. `served`: where it works."""

    cluster: Cluster
    operator: Operator
    namespace: str
    served: tuple[str, ...]


@pytest.fixture(
    scope="module",
    params=[({}, OTHER, (*NAMESPACES, OTHER)), ({"watchNamespaces": NAMESPACES}, NAMESPACES[1], tuple(NAMESPACES))],
    ids=["everywhere", "in its namespaces"],
)
def running(
    control_plane: ControlPlane, helm: Helm, namespaces: None, request: pytest.FixtureRequest
) -> Iterator[Running]:
    values, namespace, served = request.param
    cluster = Cluster(control_plane, helm)
    try:
        cluster.helm("install", str(CHART), values=values)
        operator = start_operator(cluster)
        apply_job(cluster, namespace)
        yield Running(cluster, operator, namespace, served)
        control_plane.children.stop(operator.name, grace=30)
    finally:
        cluster.clear()


def test_it_creates_the_workers_of_a_job(running: Running) -> None:
    cluster, place = running.cluster, f"--namespace={running.namespace}"
    workers = ("get", "pods", "--selector=tpu-operator.dev/job-name=digits", place)
    wait_until(
        lambda: len(cluster.kubectl(*workers, "--output=name").split()) == 4,
        timeout=60,
        what="the four worker pods exist",
    )
    suspended, resumed = (
        (
            "patch",
            "tpujob",
            "digits",
            place,
            "--type=merge",
            f'--patch={{"spec":{{"runPolicy":{{"suspend":{value}}}}}}}',
        )
        for value in ("true", "false")
    )
    cluster.kubectl(*suspended)
    wait_until(
        lambda: "Suspended" in cluster.kubectl("get", "events", place),
        timeout=60,
        what="the event about it exists",
    )
    cluster.kubectl(*resumed)
    assert "orbidden" not in (cluster.plane.directory / f"{running.operator.name}.log").read_text()


def test_it_may_create_pods_where_it_works_and_nowhere_else(running: Running) -> None:
    account = f"system:serviceaccount:{NAMESPACE}:{FULL_NAME}"
    asked = (*NAMESPACES, OTHER)
    assert tuple(name for name in asked if running.cluster.may(account, "create", "pods", name)) == running.served


def test_workers_can_verify_it(running: Running) -> None:
    """With the CA in its Secret, and the name of the Service that workers use."""
    secret = running.cluster.kubectl("get", "secret", f"{FULL_NAME}-tls", f"--namespace={NAMESPACE}", "--output=json")
    authority = b64decode(json.loads(secret)["data"][CA_CERTIFICATE_KEY]).decode()
    trust = ssl.create_default_context(cadata=authority)
    with (
        socket.create_connection((LOOPBACK, running.operator.progress_port), timeout=deadline(60)) as connection,
        trust.wrap_socket(connection, server_hostname=f"{FULL_NAME}.{NAMESPACE}.svc") as verified,
    ):
        assert verified.version() in ("TLSv1.2", "TLSv1.3")


def test_its_metrics_describe_its_jobs(running: Running) -> None:
    wait_until(
        lambda: (
            f'tpujob_jobs{{job_namespace="{running.namespace}",state="Starting"}} 1.0' in running.operator.metrics()
        ),
        timeout=60,
        what="the job is counted as starting",
    )
