"""What the chart renders, whatever its values: restricted pods, minimal rights, one definition of the job."""

from typing import Any

import pytest
import yaml

from tests.chart.helm import (
    CHART,
    FULL_NAME,
    NAMESPACE,
    REPOSITORY,
    Helm,
    Object,
    container,
    named,
    of_kind,
    pod,
)
from tests.chart.switches import NAMESPACES, VARIANTS
from tpu_training_operator.main import main

# The rights under which tests/controlplane runs the operator: fewer would fail there, more would be unused.
NEEDED = yaml.safe_load((REPOSITORY / "tests" / "controlplane" / "rbac.yaml").read_text())["rules"]
NAMESPACED_ONLY = {"watchNamespaces": NAMESPACES, "crds": {"enabled": False}, "rbac": {"userRoles": False}}


@pytest.fixture(scope="session")
def renderings(helm: Helm) -> dict[str, list[Object]]:
    return {name: helm.template(values) for name, values in VARIANTS.items()}


@pytest.fixture(params=VARIANTS)
def variant(renderings: dict[str, list[Object]], request: pytest.FixtureRequest) -> list[Object]:
    """Every value switched, one after another. Rendered once: not to be changed."""
    return renderings[request.param]


@pytest.fixture
def defaults(helm: Helm) -> list[Object]:
    return helm.template()


def test_pods_are_restricted(variant: list[Object]) -> None:
    spec = pod(variant)["spec"]
    assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert container(variant)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC", "volumes"} & spec.keys()


def test_no_right_is_a_wildcard_or_concerns_secrets(variant: list[Object]) -> None:
    roles = of_kind(variant, "Role", "ClusterRole")
    granted = {word for role in roles for rule in role["rules"] for words in rule.values() for word in words}
    assert not {word for word in granted if "*" in word or word.startswith("secrets")}


def test_objects_carry_the_recommended_labels(variant: list[Object]) -> None:
    wanted = {f"app.kubernetes.io/{label}" for label in ("name", "instance", "version", "managed-by")}
    missing = {item["kind"]: wanted - item["metadata"]["labels"].keys() for item in variant}
    assert missing == {kind: set() for kind in missing}


def test_namespaced_objects_are_in_the_namespace_of_the_release(defaults: list[Object]) -> None:
    assert {item["metadata"].get("namespace", NAMESPACE) for item in defaults} == {NAMESPACE}


def test_labels_of_the_user_do_not_take_the_pod_from_its_deployment(helm: Helm) -> None:
    objects = helm.template({"podLabels": {"app.kubernetes.io/name": "mine", "team": "ml"}})
    selector = named(objects, "Deployment")["spec"]["selector"]["matchLabels"]
    assert pod(objects)["metadata"]["labels"] == selector | {"team": "ml"}


def test_an_upgrade_never_runs_two_operators(defaults: list[Object]) -> None:
    spec = named(defaults, "Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_the_probes_ask_the_port_that_the_operator_is_told(defaults: list[Object]) -> None:
    operator = container(defaults)
    (port,) = operator["ports"]
    probes = [operator[probe]["httpGet"] for probe in ("readinessProbe", "livenessProbe")]
    assert probes == [{"path": "/healthz", "port": port["name"]}] * 2
    assert f"--health-port={port['containerPort']}" in operator["args"]


def test_the_operator_understands_its_arguments(variant: list[Object]) -> None:
    with main.make_context("tpu-training-operator", list(container(variant)["args"])) as context:
        assert context.params["log_format"] == "json"


def test_the_operator_serves_the_namespaces_it_has_rights_in(helm: Helm) -> None:
    arguments = container(helm.template({"watchNamespaces": NAMESPACES}))["args"]
    with main.make_context("tpu-training-operator", list(arguments)) as context:
        assert context.params["namespaces"] == tuple(NAMESPACES)


def test_the_operator_may_do_what_it_needs_and_no_more(defaults: list[Object]) -> None:
    assert named(defaults, "ClusterRole")["rules"] == NEEDED
    assert_bound(defaults, "ClusterRole", None)


def test_in_namespaces_it_has_the_same_rights_there_only(helm: Helm) -> None:
    objects = helm.template(NAMESPACED_ONLY)
    roles = of_kind(objects, "Role")
    assert [role["metadata"]["namespace"] for role in roles] == NAMESPACES
    assert [role["rules"] for role in roles] == [NEEDED] * len(NAMESPACES)
    for namespace in NAMESPACES:
        assert_bound(objects, "Role", namespace)


def test_an_installation_without_cluster_rights_is_possible(helm: Helm) -> None:
    assert [item["kind"] for item in helm.template(NAMESPACED_ONLY) if "namespace" not in item["metadata"]] == []


def test_an_account_of_ones_own_is_the_one_that_is_bound(helm: Helm) -> None:
    objects = helm.template({"serviceAccount": {"create": False, "name": "mine"}})
    (subject,) = named(objects, "ClusterRoleBinding")["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": "mine", "namespace": NAMESPACE}


def test_the_definition_is_the_one_in_crds(defaults: list[Object]) -> None:
    source = (REPOSITORY / "crds" / "tputrainingjobs.yaml").read_text()
    assert (CHART / "files" / "tputrainingjobs.yaml").read_text() == source, "`make crds` writes both"
    rendered = named(defaults, "CustomResourceDefinition", "tputrainingjobs.tpu-operator.dev")
    assert rendered["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    rendered["metadata"].pop("labels")
    assert rendered == yaml.safe_load(source)


def test_the_network_policy_lets_nothing_in_and_only_the_api_server_out(helm: Helm) -> None:
    objects = helm.template({"networkPolicy": {"enabled": True}})
    policy = named(objects, "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["ingress"] == []
    assert policy["egress"] == [
        {
            "to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}, {"ipBlock": {"cidr": "::/0"}}],
            "ports": [{"protocol": "TCP", "port": 443}, {"protocol": "TCP", "port": 6443}],
        }
    ]
    assert policy["podSelector"]["matchLabels"].items() <= pod(objects)["metadata"]["labels"].items()


def assert_bound(objects: list[Object], kind: str, namespace: str | None) -> None:
    """The role of this kind and place is bound to the operator's account."""
    place: dict[str, Any] = {} if namespace is None else {"namespace": namespace}
    (binding,) = [item for item in of_kind(objects, f"{kind}Binding") if item["metadata"].get("namespace") == namespace]
    assert binding["metadata"] | place == binding["metadata"]
    assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": FULL_NAME}
    account = {"kind": "ServiceAccount", "name": pod(objects)["spec"]["serviceAccountName"], "namespace": NAMESPACE}
    assert binding["subjects"] == [account]
