"""Every value of the chart with something other than its default, and where it must show."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.chart.helm import FULL_NAME, Object, container, declared, named, nested, of_kind, pod
from tpu_training_operator.main import main

DIGEST = "sha256:" + "0123456789abcdef" * 4
IMAGE = "localhost/tpu-training-operator"
NAMESPACES = ["team-a", "team-b"]
OTHER = "elsewhere"


@dataclass(frozen=True)
class Switch:
    """With `value` at `path`, `shows` must read `expected` from the rendered objects.

    beside: additional values without which the one at `path` has nothing to act on.
    """

    path: str
    value: Any
    shows: Callable[[list[Object]], Any]
    expected: Any
    beside: Object | None = None

    @property
    def values(self) -> Object:
        return nested(self.path, self.value) | (self.beside or {})


def _image(objects: list[Object]) -> str:
    return str(container(objects)["image"])


def _arguments(objects: list[Object]) -> set[str]:
    return set(container(objects)["args"])


def _names(kind: str) -> Callable[[list[Object]], list[str]]:
    return lambda objects: [item["metadata"]["name"] for item in of_kind(objects, kind)]


def _in_pod(field: str) -> Callable[[list[Object]], Any]:
    return lambda objects: pod(objects)["spec"].get(field)


def _egress(field: str) -> Callable[[list[Object]], Any]:
    return lambda objects: named(objects, "NetworkPolicy")["spec"]["egress"][0][field]


def _scrapers(objects: list[Object]) -> list[Object]:
    rules = named(objects, "NetworkPolicy")["spec"]["ingress"]
    return next(list(rule["from"]) for rule in rules if rule["ports"][0]["port"] == "metrics")


def _ingress_rules(objects: list[Object]) -> list[Object]:
    """As the operator reads its own arguments."""
    with main.make_context("tpu-training-operator", list(container(objects)["args"])) as context:
        return list(context.params["worker_ingress"])


_SCRAPE = {"from": [{"namespaceSelector": {"matchLabels": {"team": 'a "b" c'}}}], "ports": [{"port": 8431}]}
_AFFINITY = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]
        }
    }
}
_POLICY = {"enabled": True}


def _metrics(path: str, value: Any, **shown: Any) -> Switch:
    """A value below `metrics`, with the feature that it configures switched on."""
    part, _, _ = path.partition(".")
    beside = {"metrics": nested(path, value)}
    beside["metrics"][part] |= {"enabled": True}
    return Switch(f"metrics.{path}", value, beside=beside, **shown)


def _found(kind: str, *path: str | int) -> Callable[[list[Object]], Any]:
    """The value at `path` in the only object of the kind."""

    def shows(objects: list[Object]) -> Any:
        found: Any = of_kind(objects, kind)[0]
        for step in path:
            found = found[step]
        return found

    return shows


def _kueue(rights: str) -> Object:
    return {"enabled": True, "controller": {"rights": rights}}


def _account_of_kueue(field: str) -> Callable[[list[Object]], str]:
    def shows(objects: list[Object]) -> str:
        (subject,) = named(objects, "ClusterRoleBinding", f"{FULL_NAME}-kueue-controller")["subjects"]
        return str(subject[field])

    return shows


def _runbooks(objects: list[Object]) -> set[str]:
    rules = _found("PrometheusRule", "spec", "groups", 0, "rules")(objects)
    return {rule["annotations"]["runbook_url"].partition("#")[0] for rule in rules}


def _label(kind: str, label: str) -> Callable[[list[Object]], Any]:
    return lambda objects: _found(kind, "metadata", "labels")(objects).get(label)


SWITCHES = (
    Switch("nameOverride", "op", _names("Deployment"), ["tpu-op"]),
    Switch("fullnameOverride", "op", _names("Deployment"), ["op"]),
    Switch("image.repository", "registry.example/op", _image, f"registry.example/op:{declared()['version']}"),
    Switch("image.tag", "1.2.3", _image, f"{IMAGE}:1.2.3"),
    Switch("image.digest", DIGEST, _image, f"{IMAGE}@{DIGEST}"),
    Switch("image.pullPolicy", "Always", lambda o: container(o)["imagePullPolicy"], "Always"),
    Switch("imagePullSecrets", [{"name": "key"}], _in_pod("imagePullSecrets"), [{"name": "key"}]),
    Switch("crds.enabled", False, _names("CustomResourceDefinition"), []),
    Switch(
        "crds.keep", False, lambda o: of_kind(o, "CustomResourceDefinition")[0]["metadata"].get("annotations"), None
    ),
    Switch(
        "watchNamespaces",
        NAMESPACES,
        lambda o: [r["metadata"]["namespace"] for r in of_kind(o, "Role") if r["metadata"]["name"] == FULL_NAME],
        NAMESPACES,
    ),
    Switch("replicas", 0, lambda o: named(o, "Deployment")["spec"]["replicas"], 0),
    Switch("commonLabels", {"team": "ml"}, lambda o: {i["metadata"]["labels"].get("team") for i in o}, {"ml"}),
    Switch("logFormat", "plain", lambda o: "--log-format=plain" in _arguments(o), True),
    Switch("extraEnv", [{"name": "A", "value": "1"}], lambda o: container(o)["env"], [{"name": "A", "value": "1"}]),
    Switch("podSecurityContext", {"fsGroup": 7}, lambda o: pod(o)["spec"]["securityContext"]["fsGroup"], 7),
    Switch(
        "readinessProbe",
        {"timeoutSeconds": 9},
        lambda o: container(o)["readinessProbe"]["timeoutSeconds"],
        9,
    ),
    Switch(
        "livenessProbe",
        {"failureThreshold": 9},
        lambda o: container(o)["livenessProbe"]["failureThreshold"],
        9,
    ),
    Switch("logLevel", "DEBUG", lambda o: "--log-level=DEBUG" in _arguments(o), True),
    Switch("qps", 12.5, lambda o: "--qps=12.5" in _arguments(o), True),
    Switch("maxHosts", 64, lambda o: "--max-hosts=64" in _arguments(o), True),
    # Seven digits: helm reads numbers as floats and prints large ones as 2e+06 unless the template prevents it.
    Switch("burst", 2_000_000, lambda o: "--burst=2000000" in _arguments(o), True),
    Switch(
        "serviceAccount.create",
        False,
        _names("ServiceAccount"),
        [],
        {"serviceAccount": {"create": False, "name": "sa"}},
    ),
    Switch("serviceAccount.name", "sa", _in_pod("serviceAccountName"), "sa"),
    Switch(
        "serviceAccount.annotations",
        {"a": "1"},
        lambda o: named(o, "ServiceAccount")["metadata"]["annotations"],
        {"a": "1"},
    ),
    Switch("rbac.create", False, _names("ClusterRoleBinding"), []),
    Switch(
        "rbac.userRoles", False, lambda o: [n for n in _names("ClusterRole")(o) if "-view" in n or "-edit" in n], []
    ),
    Switch("networkPolicy.enabled", True, _names("NetworkPolicy"), [FULL_NAME]),
    Switch(
        "networkPolicy.apiServerCIDRs",
        ["10.0.0.1/32"],
        _egress("to"),
        [{"ipBlock": {"cidr": "10.0.0.1/32"}}],
        {"networkPolicy": _POLICY | {"apiServerCIDRs": ["10.0.0.1/32"]}},
    ),
    Switch(
        "networkPolicy.apiServerPorts",
        [443],
        _egress("ports"),
        [{"protocol": "TCP", "port": 443}],
        {"networkPolicy": _POLICY | {"apiServerPorts": [443]}},
    ),
    Switch(
        "networkPolicy.scrapers",
        [{"podSelector": {}}],
        _scrapers,
        [{"podSelector": {}}],
        {"networkPolicy": _POLICY | {"scrapers": [{"podSelector": {}}]}},
    ),
    Switch(
        "workerNetworkPolicy.enabled",
        False,
        lambda o: ("--no-isolate-workers" in _arguments(o), "networking.k8s.io" in str(of_kind(o, "ClusterRole"))),
        (True, False),
    ),
    Switch("workerNetworkPolicy.ingress", [_SCRAPE], _ingress_rules, [_SCRAPE]),
    Switch(
        "reservedLabels.enabled", True, _names("ValidatingAdmissionPolicyBinding"), [f"{FULL_NAME}-reserved-labels"]
    ),
    Switch(
        "kueue.enabled", True, lambda o: [n for n in _names("ClusterRole")(o) if "-kueue" in n], [f"{FULL_NAME}-kueue"]
    ),
    Switch(
        "kueue.controller.rights",
        "MultiKueue",
        lambda o: [n for n in _names("ClusterRole")(o) if "-kueue-" in n],
        [f"{FULL_NAME}-kueue-controller", f"{FULL_NAME}-kueue-remote"],
        {"kueue": _kueue("MultiKueue")},
    ),
    Switch(
        "kueue.controller.namespace",
        "queues",
        _account_of_kueue("namespace"),
        "queues",
        {"kueue": {"enabled": True, "controller": {"rights": "PodIntegration", "namespace": "queues"}}},
    ),
    Switch(
        "kueue.controller.serviceAccount",
        "kueue",
        _account_of_kueue("name"),
        "kueue",
        {"kueue": {"enabled": True, "controller": {"rights": "PodIntegration", "serviceAccount": "kueue"}}},
    ),
    Switch("packages.index", False, lambda o: "--no-package-index" in _arguments(o), True),
    Switch("progress.enabled", False, lambda o: [a for a in _arguments(o) if "progress" in a], []),
    Switch("metrics.enabled", False, lambda o: [a for a in _arguments(o) if "metrics" in a], []),
    _metrics("serviceMonitor.enabled", True, shows=_names("ServiceMonitor"), expected=[FULL_NAME]),
    _metrics(
        "serviceMonitor.interval",
        "1m",
        shows=_found("ServiceMonitor", "spec", "endpoints", 0, "interval"),
        expected="1m",
    ),
    _metrics("serviceMonitor.labels", {"team": "ml"}, shows=_label("ServiceMonitor", "team"), expected="ml"),
    _metrics("podMonitoring.enabled", True, shows=_names("PodMonitoring"), expected=[FULL_NAME]),
    _metrics(
        "podMonitoring.interval",
        "1m",
        shows=_found("PodMonitoring", "spec", "endpoints", 0, "interval"),
        expected="1m",
    ),
    _metrics("prometheusRule.enabled", True, shows=_names("PrometheusRule"), expected=[FULL_NAME]),
    _metrics("prometheusRule.labels", {"team": "ml"}, shows=_label("PrometheusRule", "team"), expected="ml"),
    Switch(
        "metrics.runbookURL",
        "https://docs/m",
        _runbooks,
        {"https://docs/m"},
        {"metrics": {"runbookURL": "https://docs/m", "prometheusRule": {"enabled": True}}},
    ),
    Switch("metrics.namespaces", 7, lambda o: "--metrics-namespaces=7" in _arguments(o), True),
    _metrics("rules.enabled", True, shows=_names("Rules"), expected=[FULL_NAME]),
    _metrics("dashboard.enabled", True, shows=_names("ConfigMap"), expected=[f"{FULL_NAME}-dashboard"]),
    _metrics("dashboard.labels", {"team": "ml"}, shows=_label("ConfigMap", "team"), expected="ml"),
    Switch("resources", {"limits": {"memory": "1Gi"}}, lambda o: container(o)["resources"]["limits"]["memory"], "1Gi"),
    Switch("podAnnotations", {"a": "1"}, lambda o: pod(o)["metadata"]["annotations"], {"a": "1"}),
    Switch("podLabels", {"team": "ml"}, lambda o: pod(o)["metadata"]["labels"]["team"], "ml"),
    Switch("nodeSelector", {"pool": "system"}, _in_pod("nodeSelector"), {"pool": "system"}),
    Switch("tolerations", [{"operator": "Exists"}], _in_pod("tolerations"), [{"operator": "Exists"}]),
    Switch("affinity", _AFFINITY, _in_pod("affinity"), _AFFINITY),
    Switch("priorityClassName", "system-cluster-critical", _in_pod("priorityClassName"), "system-cluster-critical"),
)

# Rendered in every combination that adds or removes objects, and with the defaults.
VARIANTS: dict[str, Object] = {
    "defaults": {},
    "two operators": {"replicas": 2, "networkPolicy": {"enabled": True}},
} | {switch.path: switch.values for switch in SWITCHES}
