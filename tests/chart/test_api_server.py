"""What only a real API server can show: it accepts every object, the rights suffice, jobs outlive the chart."""

import json
import socket
import ssl
import sys
import urllib.request
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.chart.helm import (
    CHART,
    FULL_NAME,
    MONITORING,
    NAMESPACE,
    RELEASE,
    REPOSITORY,
    Helm,
    Object,
    Refused,
    container,
)
from tests.chart.switches import NAMESPACES, OTHER, VARIANTS
from tests.cluster.api import answers_ok
from tests.cluster.control_plane import ControlPlane
from tests.cluster.ports import LOOPBACK, free_port
from tests.cluster.processes import wait_until
from tpu_training_operator.api.constants import CA_CERTIFICATE_KEY

DEFINITION = "crd/tputrainingjobs.tpu-operator.dev"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:{FULL_NAME}"
SECOND = "second"
JOB = "tputrainingjob.tpu-operator.dev/digits"


class Cluster:
    """The control plane as a user with helm and kubectl sees it."""

    def __init__(self, plane: ControlPlane, helm: Helm) -> None:
        self.plane = plane
        self._helm = helm
        self._kubeconfig = f"--kubeconfig={plane.kubeconfig}"

    def helm(self, command: str, *arguments: str, values: Object | None = None, release: str = RELEASE) -> str:
        place = ("--namespace", NAMESPACE, self._kubeconfig)
        return self._helm.run(command, release, *arguments, *place, values=values)

    def kubectl(self, *arguments: str, **options: str) -> str:
        return self.plane.kubectl(*arguments, **options).stdout.strip()

    def may(self, user: str, verb: str, resource: str, namespace: str, subresource: str = "") -> bool:
        who = (f"--as={user}", f"--namespace={namespace}", f"--subresource={subresource}")
        question = ("auth", "can-i", verb, resource, *who)
        # "no" is also its exit code.
        return self.plane.kubectl(*question, check=False).stdout.strip() == "yes"

    def has_definition(self) -> bool:
        return self.kubectl("get", DEFINITION, "--ignore-not-found", "--output=name") != ""

    def deployed_arguments(self) -> list[str]:
        found = self.kubectl("get", f"deployment/{FULL_NAME}", "--namespace", NAMESPACE, "--output=json")
        return list(container([json.loads(found)])["args"])


@pytest.fixture(scope="session")
def monitoring(control_plane: ControlPlane) -> None:
    """The kinds of the Prometheus Operator and Google's, by name only: their own validation is not available here."""
    group, version = MONITORING[0].split("/")
    kinds = [(group, version, kind) for kind in ("ServiceMonitor", "PrometheusRule")]
    kinds += [(*MONITORING[1].split("/"), "PodMonitoring")]
    definitions = [definition(*kind) for kind in kinds]
    control_plane.kubectl("apply", "--filename=-", input=yaml.safe_dump_all(definitions))
    control_plane.wait_established(*(one["metadata"]["name"] for one in definitions))


@pytest.fixture
def cluster(control_plane: ControlPlane, helm: Helm, namespaces: None) -> Iterator[Cluster]:
    """A cluster without the chart, before and after."""
    cluster = Cluster(control_plane, helm)
    yield cluster
    for release in (RELEASE, SECOND):
        cluster.helm("uninstall", "--ignore-not-found", release=release)
    cluster.kubectl("delete", DEFINITION, "--ignore-not-found")


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_object_is_accepted(
    helm: Helm, control_plane: ControlPlane, namespaces: None, monitoring: None, variant: str
) -> None:
    # Not the pod of `helm test`: its account does not exist in a dry run. test_installed runs it.
    objects = [body for body in helm.template(VARIANTS[variant], with_test=True) if body["kind"] != "Pod"]
    accepted = control_plane.kubectl(
        *("apply", "--dry-run=server", "--validate=strict", "--filename=-"),
        input=yaml.safe_dump_all(objects),
    )
    assert len(accepted.stdout.splitlines()) == len(objects)
    assert accepted.stderr == ""


def test_the_notes_say_what_to_do_next(cluster: Cluster) -> None:
    notes = cluster.helm("install", str(CHART), values={"watchNamespaces": NAMESPACES})
    assert "serves the namespaces team-a, team-b" in notes
    assert f"helm test {RELEASE} -n {NAMESPACE}" in notes
    assert "kubectl -n team-a apply -f job.yaml" in notes


@pytest.mark.parametrize(
    ("values", "warning"),
    [
        ({}, "image.repository is localhost/tpu-training-operator, which no node can pull"),
        ({"replicas": 0}, "PAUSED: replicas is 0"),
        ({"crds": {"enabled": False}}, "crds.enabled is false"),
    ],
    ids=["no image", "no operator", "no definition"],
)
def test_the_notes_warn_of_what_will_not_work(cluster: Cluster, values: Object, warning: str) -> None:
    assert warning in cluster.helm("install", str(CHART), values=values)


def test_the_notes_of_a_usable_installation_have_no_warnings(cluster: Cluster) -> None:
    notes = cluster.helm("install", str(CHART), values={"image": {"repository": "registry.example/operator"}})
    assert not [word for word in ("no node can pull", "PAUSED", "false") if word in notes]


def test_an_upgrade_changes_the_given_values(cluster: Cluster) -> None:
    cluster.helm("install", str(CHART))
    cluster.helm("upgrade", str(CHART), values={"logLevel": "DEBUG"})
    assert "--log-level=DEBUG" in cluster.deployed_arguments()


def test_an_upgrade_updates_the_definition(cluster: Cluster) -> None:
    cluster.helm("install", str(CHART))
    cluster.kubectl("patch", DEFINITION, "--type=json", "--patch", '[{"op":"remove","path":"/spec/names/shortNames"}]')
    cluster.helm("upgrade", str(CHART), "--force-conflicts")
    assert "ttj" in cluster.kubectl("get", DEFINITION, "--output=jsonpath={.spec.names.shortNames}")


AUTHORITY = ("secret", f"{FULL_NAME}-tls", f"--namespace={NAMESPACE}")
FILLED = {"data": {"ca.crt": "Y2VydA==", "ca.key": "a2V5"}, "immutable": True}


@pytest.mark.parametrize("then", ["upgrade", "uninstall and install"])
def test_the_authority_of_the_progress_service_outlives_the_release(cluster: Cluster, then: str) -> None:
    cluster.helm("install", str(CHART))
    cluster.kubectl("patch", *AUTHORITY, "--type=merge", f"--patch={json.dumps(FILLED)}")
    if then == "upgrade":
        cluster.helm("upgrade", str(CHART), values={"logLevel": "DEBUG"})
    else:
        cluster.helm("uninstall")
        cluster.helm("install", str(CHART))
    found = json.loads(cluster.kubectl("get", *AUTHORITY, "--output=json"))
    assert {name: found[name] for name in FILLED} == FILLED
    cluster.kubectl("delete", *AUTHORITY)


def test_a_secret_that_an_operator_created_is_left_alone(cluster: Cluster) -> None:
    cluster.kubectl("create", "secret", "generic", AUTHORITY[1], AUTHORITY[2], "--from-literal=ca.crt=cert")
    cluster.helm("install", str(CHART))
    found = json.loads(cluster.kubectl("get", *AUTHORITY, "--output=json"))
    assert (found["data"], found["metadata"].get("labels")) == ({"ca.crt": "Y2VydA=="}, None)
    cluster.kubectl("delete", *AUTHORITY)


def test_with_reserved_labels_only_the_operator_can_create_workers(cluster: Cluster) -> None:
    cluster.helm("install", str(CHART), values={"reservedLabels": {"enabled": True}})

    def refusal(user: str, labels: Object) -> str:
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "forged", "namespace": OTHER, "labels": labels},
            "spec": {"containers": [{"name": "trainer", "image": "registry.example/none:1"}]},
        }
        done = cluster.plane.kubectl(
            *("create", "--dry-run=server", f"--as={user}", "--as-group=system:masters", "--filename=-"),
            input=yaml.safe_dump(pod),
            check=False,
        )
        return done.stderr

    stolen = {"tpu-operator.dev/slice-id": "8b6b0c5e1f7a4c399d110242ac120002-1-0"}
    wait_until(
        lambda: "only the operator sets them" in refusal("mallory", stolen), timeout=60, what="the policy is in force"
    )
    assert (refusal("mallory", {"team": "vision"}), refusal(ACCOUNT, stolen)) == ("", "")


def test_jobs_outlive_the_chart(cluster: Cluster) -> None:
    cluster.helm("install", str(CHART))
    apply_job(cluster, OTHER)
    cluster.helm("uninstall")
    assert cluster.kubectl("get", "tpujob", "--namespace", OTHER, "--output=name") == JOB


def test_a_new_installation_adopts_the_definition_that_was_kept(cluster: Cluster) -> None:
    cluster.helm("install", str(CHART))
    cluster.helm("uninstall")
    cluster.helm("install", str(CHART))
    assert cluster.has_definition()


def test_a_definition_left_by_another_release_can_be_adopted(cluster: Cluster) -> None:
    cluster.helm("install", str(CHART))
    apply_job(cluster, OTHER)
    cluster.helm("uninstall")
    cluster.helm("install", str(CHART), "--take-ownership", release=SECOND)
    assert cluster.kubectl("get", "tpujob", "--namespace", OTHER, "--output=name") == JOB


def test_the_definition_is_deleted_with_the_chart_on_request(cluster: Cluster) -> None:
    cluster.helm("install", str(CHART), values={"crds": {"keep": False}})
    cluster.helm("uninstall", "--wait")
    assert not cluster.has_definition()


def test_a_second_operator_can_serve_other_namespaces(cluster: Cluster) -> None:
    first, second = ({"watchNamespaces": [namespace]} for namespace in NAMESPACES)
    cluster.helm("install", str(CHART), values=first)
    shared = {"crds": {"enabled": False}, "rbac": {"userRoles": False}}
    cluster.helm("install", str(CHART), values=second | shared, release=SECOND)
    deployments = cluster.kubectl("get", "deployments", "--namespace", NAMESPACE, "--output=name").split()
    assert len(deployments) == 2


def test_a_second_installation_does_not_adopt_the_definition_of_the_first(cluster: Cluster) -> None:
    cluster.helm("install", str(CHART))
    with pytest.raises(Refused, match="invalid ownership metadata"):
        cluster.helm("install", str(CHART), release=SECOND)


@pytest.mark.parametrize(
    ("values", "served"),
    [({}, OTHER), ({"watchNamespaces": NAMESPACES}, NAMESPACES[1])],
    ids=["everywhere", "in its namespaces"],
)
def test_the_operator_works_with_the_arguments_and_rights_of_the_chart(
    cluster: Cluster, values: Object, served: str
) -> None:
    cluster.helm("install", str(CHART), values=values)
    operator = start_operator(cluster)
    try:
        apply_job(cluster, served)
        workers = ("get", "pods", "--selector=tpu-operator.dev/job-name=digits", f"--namespace={served}")
        wait_until(
            lambda: len(cluster.kubectl(*workers, "--output=name").split()) == 4,
            timeout=60,
            what="the four worker pods exist",
        )
        wait_until(
            lambda: "AttemptStarted" in cluster.kubectl("get", "events", f"--namespace={served}"),
            timeout=60,
            what="the event about it exists",
        )
        log = (cluster.plane.directory / f"{operator.name}.log").read_text()
        assert "orbidden" not in log
    finally:
        cluster.plane.children.stop(operator.name, grace=30)


def test_workers_can_verify_the_operator_that_the_chart_installs(cluster: Cluster) -> None:
    """With the CA in its Secret, and the name of the Service that workers use."""
    cluster.helm("install", str(CHART))
    operator = start_operator(cluster)
    try:
        secret = json.loads(cluster.kubectl("get", "secret", f"{FULL_NAME}-tls", f"--namespace={NAMESPACE}", "-o=json"))
        trust = ssl.create_default_context(cadata=b64decode(secret["data"][CA_CERTIFICATE_KEY]).decode())
        with (
            socket.create_connection((LOOPBACK, operator.progress_port), timeout=60) as connection,
            trust.wrap_socket(connection, server_hostname=f"{FULL_NAME}.{NAMESPACE}.svc") as verified,
        ):
            assert verified.version() in ("TLSv1.2", "TLSv1.3")
    finally:
        cluster.plane.children.stop(operator.name, grace=30)


def test_the_metrics_of_the_installed_operator_describe_its_jobs(cluster: Cluster) -> None:
    cluster.helm("install", str(CHART))
    operator = start_operator(cluster)
    try:
        apply_job(cluster, OTHER)
        wait_until(
            lambda: 'tpujob_jobs{state="Starting"} 1.0' in operator.metrics(),
            timeout=60,
            what="the job is counted as starting",
        )
    finally:
        cluster.plane.children.stop(operator.name, grace=30)


def test_in_namespaces_the_operator_has_no_rights_elsewhere(cluster: Cluster) -> None:
    cluster.helm("install", str(CHART), values={"watchNamespaces": NAMESPACES})
    assert [cluster.may(ACCOUNT, "create", "pods", namespace) for namespace in (*NAMESPACES, OTHER)] == [
        True,
        True,
        False,
    ]


def test_the_clusters_own_roles_gain_rights_on_jobs(cluster: Cluster) -> None:
    cluster.helm("install", str(CHART))
    for role in ("view", "edit", "admin"):
        binding = ("create", "rolebinding", role, f"--clusterrole={role}", f"--user={role}", f"--namespace={OTHER}")
        cluster.kubectl(*binding)
    # The controller manager aggregates the roles, admin last.
    wait_until(
        lambda: cluster.may("admin", "create", "tputrainingjobs", OTHER),
        timeout=30,
        what="the roles are aggregated",
    )
    verbs = ("get", "create", "patch", "delete")
    rights = {
        role: [verb for verb in verbs if cluster.may(role, verb, "tputrainingjobs", OTHER)] for role in ("view", "edit")
    }
    assert rights == {"view": ["get"], "edit": list(verbs)}
    assert not cluster.may("edit", "update", "tputrainingjobs", OTHER, subresource="status")


def definition(group: str, version: str, kind: str) -> Object:
    """Of a kind that takes everything."""
    plural = f"{kind.lower()}s"
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural},
            "versions": [
                {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": anything}},
            ],
        },
    }


def apply_job(cluster: Cluster, namespace: str) -> None:
    cluster.plane.wait_established(DEFINITION.removeprefix("crd/"))
    example = REPOSITORY / "examples" / "digits.yaml"
    cluster.kubectl("apply", f"--filename={example}", f"--namespace={namespace}")


@dataclass(frozen=True)
class Operator:
    """The operator's process, and its ports on loopback."""

    name: str
    health_port: int
    progress_port: int
    metrics_port: int

    @property
    def is_healthy(self) -> bool:
        return answers_ok(f"http://{LOOPBACK}:{self.health_port}/healthz")

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://{LOOPBACK}:{self.metrics_port}/metrics", timeout=60) as answer:
            return str(answer.read(), "utf-8")


def start_operator(cluster: Cluster) -> Operator:
    """The operator as the installed Deployment would run it, but on this machine; returns when it is healthy."""
    operator = Operator("operator", free_port(), free_port(), free_port())
    kubeconfig = cluster.plane.service_account_kubeconfig(NAMESPACE, FULL_NAME)
    child = cluster.plane.children.start(
        operator.name,
        Path("/usr/bin/env"),
        f"KUBECONFIG={kubeconfig}",
        *(sys.executable, "-m", "tpu_training_operator", *cluster.deployed_arguments()),
        # The last flag wins; the pod's ports may be in use on this machine.
        f"--health-port={operator.health_port}",
        f"--progress-port={operator.progress_port}",
        f"--metrics-port={operator.metrics_port}",
    )
    child.wait_ready(lambda: operator.is_healthy, timeout=60)
    return operator
