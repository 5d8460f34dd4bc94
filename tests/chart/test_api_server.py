"""What only a real API server can show: it accepts every object, the rights suffice, jobs outlive the chart."""

import json
from collections.abc import Callable, Iterator

import pytest
import yaml

from tests.chart.cluster import DEFINITION, SECOND, Cluster, apply_job
from tests.chart.helm import (
    CHART,
    FULL_NAME,
    MONITORING,
    NAMESPACE,
    Helm,
    Object,
    Refused,
)
from tests.chart.switches import NAMESPACES, OTHER, VARIANTS
from tests.cluster.control_plane import ControlPlane
from tests.cluster.processes import wait_until

ACCOUNT = f"system:serviceaccount:{NAMESPACE}:{FULL_NAME}"
JOB = "tputrainingjob.tpu-operator.dev/digits"


@pytest.fixture(scope="module")
def monitoring(control_plane: ControlPlane) -> None:
    """The kinds of the Prometheus Operator and Google's, by name only: their own validation is not available here."""
    group, version = MONITORING[0].split("/")
    kinds = [(group, version, kind) for kind in ("ServiceMonitor", "PrometheusRule")]
    kinds += [(*MONITORING[1].split("/"), kind) for kind in ("PodMonitoring", "Rules")]
    definitions = [definition(*kind) for kind in kinds]
    control_plane.kubectl("apply", "--filename=-", input=yaml.safe_dump_all(definitions))
    control_plane.wait_established(*(one["metadata"]["name"] for one in definitions))


def test_every_object_is_accepted(helm: Helm, control_plane: ControlPlane, namespaces: None, monitoring: None) -> None:
    """Of the chart with each value switched in turn, and each object once, because most are the same in all."""
    rendered = [body for values in VARIANTS.values() for body in helm.template(values, with_test=True)]
    # Not the pod of `helm test`: its account does not exist in a dry run. test_installed runs it.
    objects = {json.dumps(body) for body in rendered if body["kind"] != "Pod"}
    accepted = control_plane.kubectl(
        *("apply", "--dry-run=server", "--validate=strict", "--filename=-"), input="\n".join(sorted(objects))
    )
    assert len(accepted.stdout.splitlines()) == len(objects) > len(VARIANTS)
    assert accepted.stderr == ""


AUTHORITY = ("secret", f"{FULL_NAME}-tls", f"--namespace={NAMESPACE}")
FILLED = {"data": {"ca.crt": "Y2VydA==", "ca.key": "a2V5"}, "immutable": True}


@pytest.fixture
def authority(cluster: Cluster) -> Iterator[Callable[[], Object]]:
    """Installs the chart and fills the Secret of the progress service; returns what that holds now."""
    cluster.helm("install", str(CHART))
    cluster.kubectl("patch", *AUTHORITY, "--type=merge", f"--patch={json.dumps(FILLED)}")

    def found() -> Object:
        secret = json.loads(cluster.kubectl("get", *AUTHORITY, "--output=json"))
        return {name: secret[name] for name in FILLED}

    yield found
    cluster.kubectl("delete", *AUTHORITY)


def test_an_upgrade_changes_the_given_values_and_the_definition_and_keeps_the_authority_of_the_progress_service(
    cluster: Cluster, authority: Callable[[], Object]
) -> None:
    cluster.kubectl("patch", DEFINITION, "--type=json", "--patch", '[{"op":"remove","path":"/spec/names/shortNames"}]')
    cluster.helm("upgrade", str(CHART), "--force-conflicts", values={"logLevel": "DEBUG"})
    assert "--log-level=DEBUG" in cluster.deployed_arguments()
    assert "tpujob" in cluster.kubectl("get", DEFINITION, "--output=jsonpath={.spec.names.shortNames}")
    assert authority() == FILLED


def test_jobs_and_the_authority_outlive_the_chart_and_a_new_installation_adopts_the_definition(
    cluster: Cluster, authority: Callable[[], Object]
) -> None:
    apply_job(cluster, OTHER)
    cluster.helm("uninstall")
    assert cluster.kubectl("get", "tpujob", "--namespace", OTHER, "--output=name") == JOB
    cluster.helm("install", str(CHART))
    assert cluster.has_definition()
    assert authority() == FILLED


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


def test_a_second_installation_adopts_the_definition_of_another_release_only_once_that_has_left_it(
    cluster: Cluster,
) -> None:
    cluster.helm("install", str(CHART))
    apply_job(cluster, OTHER)
    with pytest.raises(Refused, match="invalid ownership metadata"):
        cluster.helm("install", str(CHART), release=SECOND)
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
    plural = f"{kind.lower().removesuffix('s')}s"
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
