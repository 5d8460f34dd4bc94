"""What the chart renders with any values: restricted pods, minimal rights, one definition of the job."""

import re
from typing import Any

import pytest
import yaml

from tests.chart.helm import (
    FULL_NAME,
    NAMESPACE,
    REPOSITORY,
    Helm,
    Object,
    Refused,
    container,
    named,
    of_kind,
    parsed,
    pod,
)
from tests.chart.switches import NAMESPACES, VARIANTS
from tpu_training_operator.main import main
from tpu_training_operator.runtime.leadership import LABEL_LEADS

# tests/controlplane runs the operator with these rights: fewer would fail there, more would be unused.
NEEDED = [
    role
    for file in ("rbac.yaml", "progress_rbac.yaml")
    for role in yaml.safe_load_all((REPOSITORY / "tests" / "controlplane" / file).read_text())
]
FOR_QUEUES = list(yaml.safe_load_all((REPOSITORY / "tests" / "controlplane" / "kueue_rbac.yaml").read_text()))
PROGRESS = f"{FULL_NAME}-progress"
Grant = tuple[str, str, str, str]
NAMESPACED_ONLY = {
    "watchNamespaces": NAMESPACES,
    "crds": {"enabled": False},
    "rbac": {"userRoles": False},
    "progress": {"enabled": False},
}


@pytest.fixture(scope="package")
def renderings(helm: Helm) -> dict[str, list[Object]]:
    return {name: helm.template(values) for name, values in VARIANTS.items()}


@pytest.fixture(params=VARIANTS)
def variant(renderings: dict[str, list[Object]], request: pytest.FixtureRequest) -> list[Object]:
    """The chart with each value switched in turn."""
    return renderings[request.param]


@pytest.fixture
def defaults(helm: Helm) -> list[Object]:
    return helm.template()


def test_pods_are_restricted(variant: list[Object]) -> None:
    spec = pod(variant)["spec"]
    assert {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}.items() <= spec[
        "securityContext"
    ].items()
    assert container(variant)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC", "volumes"} & spec.keys()


def test_rights_have_no_wildcards(variant: list[Object]) -> None:
    roles = of_kind(variant, "Role", "ClusterRole")
    granted = {word for role in roles for rule in role["rules"] for words in rule.values() for word in words}
    assert not {word for word in granted if "*" in word}


def test_the_only_secret_belongs_to_the_progress_service(variant: list[Object]) -> None:
    roles = of_kind(variant, "Role", "ClusterRole")
    touching = [role for role in roles if any(resource == "secrets" for _, resource, _, _ in grants([role]))]
    places = {(role["kind"], role["metadata"].get("namespace")) for role in touching}
    name = of_kind(variant, "Deployment")[0]["metadata"]["name"]
    assert places <= {("Role", NAMESPACE)}
    assert grants(touching) <= {("", "secrets", verb, f"{name}-tls") for verb in ("get", "update")}
    assert {secret["metadata"]["name"] for secret in of_kind(variant, "Secret") if "data" not in secret} <= {
        f"{name}-tls"
    }
    assert [secret for secret in of_kind(variant, "Secret") if "data" in secret] == []


def test_objects_carry_the_recommended_labels(variant: list[Object]) -> None:
    wanted = {f"app.kubernetes.io/{label}" for label in ("name", "instance", "version", "managed-by")}
    missing = {item["kind"]: wanted - item["metadata"]["labels"].keys() for item in variant}
    assert missing == {kind: set() for kind in missing}


def test_namespaced_objects_are_in_the_namespace_of_the_release(defaults: list[Object]) -> None:
    assert {item["metadata"].get("namespace", NAMESPACE) for item in defaults} == {NAMESPACE}


def test_labels_of_the_user_do_not_detach_the_pod_from_its_deployment(helm: Helm) -> None:
    objects = helm.template({"podLabels": {"app.kubernetes.io/name": "mine", "team": "ml"}})
    selector = named(objects, "Deployment")["spec"]["selector"]["matchLabels"]
    assert pod(objects)["metadata"]["labels"] == selector | {"team": "ml"}


def test_an_upgrade_ends_the_old_operator_before_it_creates_the_new_one(defaults: list[Object]) -> None:
    spec = named(defaults, "Deployment")["spec"]
    one_after_the_other = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    assert (spec["replicas"], spec["strategy"]) == (1, one_after_the_other)


def test_the_probes_use_the_operators_health_port(defaults: list[Object]) -> None:
    operator = container(defaults)
    port = operator["ports"][0]
    probes = [operator[probe]["httpGet"] for probe in ("readinessProbe", "livenessProbe")]
    assert probes == [{"path": "/healthz", "port": port["name"]}] * 2
    assert f"--health-port={port['containerPort']}" in operator["args"]


def test_the_operator_understands_its_arguments(variant: list[Object]) -> None:
    with main.make_context("tpu-training-operator", list(container(variant)["args"])) as context:
        assert context.params["log_format"] in ("json", "plain")


def test_the_operator_serves_the_namespaces_it_has_rights_in(helm: Helm) -> None:
    arguments = container(helm.template({"watchNamespaces": NAMESPACES}))["args"]
    with main.make_context("tpu-training-operator", list(arguments)) as context:
        assert context.params["namespaces"] == tuple(NAMESPACES)


def test_the_operator_listens_on_the_ports_that_its_service_names(defaults: list[Object]) -> None:
    operator, service = container(defaults), named(defaults, "Service")["spec"]
    ports = {port["name"]: port["containerPort"] for port in operator["ports"]}
    assert {port["targetPort"]: port["port"] for port in service["ports"]} == {"progress": 8443, "metrics": 8081}
    assert ports == {"health": 8080, "progress": 8443, "metrics": 8081}
    assert {"--progress-port=8443", "--metrics-port=8081"} <= set(operator["args"])
    assert service["selector"].items() <= pod(defaults)["metadata"]["labels"].items()


def test_workers_are_told_the_name_of_the_service(defaults: list[Object]) -> None:
    service = named(defaults, "Service")["metadata"]
    assert f"--progress-service={service['name']}.{service['namespace']}" in container(defaults)["args"]


def test_without_progress_and_metrics_nothing_is_served(helm: Helm) -> None:
    objects = helm.template({"progress": {"enabled": False}, "metrics": {"enabled": False}})
    assert of_kind(objects, "Service") == []
    assert [port["name"] for port in container(objects)["ports"]] == ["health"]


def test_an_invalid_service_name_is_refused_with_an_explanation(helm: Helm) -> None:
    with pytest.raises(Refused, match="fullnameOverride: 1st begins with a digit"):
        helm.template({"fullnameOverride": "1st"})


def test_the_operator_has_exactly_the_rights_it_needs(helm: Helm) -> None:
    roles = of_kind(helm.template({"rbac": {"userRoles": False}}), "Role", "ClusterRole")
    assert {unnamed(grant) for grant in grants(roles)} == {unnamed(grant) for grant in grants(NEEDED)}


def test_with_kueue_it_has_the_rights_that_queues_need_besides(helm: Helm) -> None:
    roles = of_kind(helm.template({"rbac": {"userRoles": False}, "kueue": {"enabled": True}}), "Role", "ClusterRole")
    assert {unnamed(grant) for grant in grants(roles)} == {unnamed(grant) for grant in grants(NEEDED + FOR_QUEUES)}


def test_kueue_itself_gets_the_rights_that_its_integrations_need(helm: Helm) -> None:
    """kueue.md names them; the run with Kueue's own managers had exactly these."""
    jobs, status = ("tpu-operator.dev", "tputrainingjobs"), ("tpu-operator.dev", "tputrainingjobs/status")
    reads = {(*jobs, verb, "") for verb in ("get", "list", "watch")}
    wanted = {
        "PodIntegration": {"controller": reads},
        "MultiKueue": {
            "controller": reads | {(*status, "patch", "")},
            "remote": reads | {(*jobs, verb, "") for verb in ("create", "delete")},
        },
    }
    for rights, roles in wanted.items():
        objects = helm.template({"kueue": {"enabled": True, "controller": {"rights": rights}}})
        prefix = f"{FULL_NAME}-kueue-"
        found = [role for role in of_kind(objects, "ClusterRole") if role["metadata"]["name"].startswith(prefix)]
        assert {role["metadata"]["name"].removeprefix(prefix): grants([role]) for role in found} == roles


def test_the_security_context_of_the_user_takes_nothing_away(helm: Helm) -> None:
    context = pod(helm.template({"podSecurityContext": {"runAsNonRoot": False, "runAsUser": 1000}}))["spec"][
        "securityContext"
    ]
    assert context == {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}


def documented_rights() -> set[Grant]:
    """The rights in the tables of SECURITY.md; names there stand for the release's names."""
    page = (REPOSITORY / "SECURITY.md").read_text(encoding="utf-8")
    lines = page.partition("## Rights of the operator")[2].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    found = set()
    for group, resource, verbs, _ in rows:
        if group == "API group":
            continue
        names = re.findall(r"`([^`]+)`", resource)
        name = names[1].replace("<release>", FULL_NAME) if len(names) > 1 else ""
        plain = "" if group == "core" else group.strip("`")
        found |= {(plain, names[0], verb, name) for verb in verbs.split(", ")}
    return found


def test_several_operators_have_two_rights_more(helm: Helm) -> None:
    (role,) = yaml.safe_load_all((REPOSITORY / "tests/controlplane/lease_rbac.yaml").read_text())
    one, two = (of_kind(helm.template({"replicas": n}), "Role", "ClusterRole") for n in (1, 2))
    more = grants(two) - grants(one)
    assert {unnamed(grant) for grant in more} == {unnamed(grant) for grant in grants([role])}
    assert {name for _, kind, _, name in more if kind == "leases"} == {FULL_NAME}
    assert_bound(helm.template({"replicas": 2}), "Role", NAMESPACE, f"{FULL_NAME}-lease")


def test_several_operators_share_a_lease_and_survive_a_drain(helm: Helm) -> None:
    objects = helm.template({"replicas": 2})
    assert {"Lease", "PodDisruptionBudget"} & {item["kind"] for item in helm.template()} == set()
    lease, budget = named(objects, "Lease"), named(objects, "PodDisruptionBudget")
    with main.make_context("tpu-training-operator", list(container(objects)["args"])) as context:
        chosen = context.params["lease"]
    assert (chosen.name, chosen.namespace) == (lease["metadata"]["name"], lease["metadata"]["namespace"])
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["selector"] == named(objects, "Deployment")["spec"]["selector"]
    # An upgrade would wait for nobody otherwise: the old operators work until a new one is ready.
    assert named(objects, "Deployment")["spec"]["strategy"] == {"type": "RollingUpdate"}


def test_of_several_operators_the_service_sends_reports_to_the_one_that_works(helm: Helm) -> None:
    objects = helm.template({"replicas": 2})
    reports, metrics = (named(objects, "Service", name)["spec"] for name in (FULL_NAME, f"{FULL_NAME}-metrics"))
    own = pod(objects)["metadata"]["labels"]
    assert [port["name"] for port in reports["ports"]] == ["progress"]
    assert reports["selector"].items() - own.items() == {(LABEL_LEADS, "true")}
    assert [port["name"] for port in metrics["ports"]] == ["metrics"]
    assert metrics["selector"].items() <= own.items()


def test_its_rights_match_the_security_page(helm: Helm) -> None:
    roles = of_kind(helm.template({"rbac": {"userRoles": False}}), "Role", "ClusterRole")
    assert grants(roles) == documented_rights()


def test_its_rights_are_bound_to_it(defaults: list[Object]) -> None:
    assert_bound(defaults, "ClusterRole", None)
    assert_bound(defaults, "ClusterRole", None, PROGRESS)
    assert_bound(defaults, "Role", NAMESPACE, PROGRESS)


def test_in_namespaces_it_has_the_same_rights_there_only(helm: Helm, defaults: list[Object]) -> None:
    objects = helm.template(NAMESPACED_ONLY)
    roles = of_kind(objects, "Role")
    assert [role["metadata"]["namespace"] for role in roles] == NAMESPACES
    assert [role["rules"] for role in roles] == [named(defaults, "ClusterRole")["rules"]] * len(NAMESPACES)
    for namespace in NAMESPACES:
        assert_bound(objects, "Role", namespace)


def test_an_installation_for_some_namespaces_may_review_tokens(helm: Helm) -> None:
    """Tokens belong to no namespace, so the progress service still needs a ClusterRole with this one right."""
    objects = helm.template({"watchNamespaces": NAMESPACES, "rbac": {"userRoles": False}})
    (role,) = of_kind(objects, "ClusterRole")
    assert grants([role]) == {("authentication.k8s.io", "tokenreviews", "create", "")}
    assert_bound(objects, "ClusterRole", None, PROGRESS)


def test_an_installation_without_cluster_rights_is_possible(helm: Helm) -> None:
    assert [item["kind"] for item in helm.template(NAMESPACED_ONLY) if "namespace" not in item["metadata"]] == []


def test_the_roles_are_bound_to_an_account_that_the_user_brings(helm: Helm) -> None:
    objects = helm.template({"serviceAccount": {"create": False, "name": "mine"}})
    bindings = of_kind(objects, "RoleBinding", "ClusterRoleBinding")
    subjects = [subject for binding in bindings for subject in binding["subjects"]]
    assert subjects == [{"kind": "ServiceAccount", "name": "mine", "namespace": NAMESPACE}] * 3


def test_the_definition_is_the_one_in_crds(defaults: list[Object]) -> None:
    source = (REPOSITORY / "crds" / "tputrainingjobs.yaml").read_text()
    rendered = named(defaults, "CustomResourceDefinition", "tputrainingjobs.tpu-operator.dev")
    added = {name: rendered["metadata"][name] for name in ("annotations", "labels")}
    assert added["annotations"] == {"helm.sh/resource-policy": "keep"}
    (written,) = parsed(source)
    assert rendered == written | {"metadata": written["metadata"] | added}


def test_the_network_policy_lets_only_requests_to_the_api_server_out(helm: Helm) -> None:
    objects = helm.template({"networkPolicy": {"enabled": True}})
    policy = named(objects, "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["egress"] == [
        {
            "to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}, {"ipBlock": {"cidr": "::/0"}}],
            "ports": [{"protocol": "TCP", "port": 443}, {"protocol": "TCP", "port": 6443}],
        }
    ]
    assert policy["podSelector"]["matchLabels"].items() <= pod(objects)["metadata"]["labels"].items()


def ingress(helm: Helm, **values: Any) -> dict[str, Any]:
    """Whom the network policy lets in, by port."""
    objects = helm.template({"networkPolicy": {"enabled": True}} | values)
    rules = named(objects, "NetworkPolicy")["spec"]["ingress"]
    return {rule["ports"][0]["port"]: rule["from"] for rule in rules}


WORKERS = {"matchExpressions": [{"key": "tpu-operator.dev/job-name", "operator": "Exists"}]}


def test_the_network_policy_lets_workers_report_and_metrics_be_read(helm: Helm) -> None:
    assert ingress(helm) == {
        "progress": [{"namespaceSelector": {}, "podSelector": WORKERS}],
        "metrics": [{"namespaceSelector": {}}],
    }


def test_the_network_policy_keeps_workers_of_other_namespaces_out(helm: Helm) -> None:
    served = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": NAMESPACES}
    assert ingress(helm, watchNamespaces=NAMESPACES)["progress"] == [
        {"namespaceSelector": {"matchExpressions": [served]}, "podSelector": WORKERS}
    ]


def test_the_network_policy_lets_nothing_in_where_nothing_is_served(helm: Helm) -> None:
    assert ingress(helm, progress={"enabled": False}, metrics={"enabled": False}) == {}


def grants(roles: list[Object]) -> set[Grant]:
    """(API group, resource, verb, name) of everything that the roles allow; an empty name means any name."""
    return {
        (group, resource, verb, name)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [""])
    }


def unnamed(grant: Grant) -> tuple[str, str, str, bool]:
    """Installations differ in the name, not in whether there is one."""
    return (*grant[:3], grant[3] != "")


def assert_bound(objects: list[Object], kind: str, namespace: str | None, name: str = FULL_NAME) -> None:
    """The role of this kind, place and name is bound to the operator's account."""
    bindings = of_kind(objects, f"{kind}Binding")
    (binding,) = [
        one for one in bindings if (one["metadata"].get("namespace"), one["metadata"]["name"]) == (namespace, name)
    ]
    assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name}
    account = {"kind": "ServiceAccount", "name": pod(objects)["spec"]["serviceAccountName"], "namespace": NAMESPACE}
    assert binding["subjects"] == [account]
