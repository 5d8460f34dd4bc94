"""Every value of the chart with something other than its default, and where it must show. Used by the tests here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.chart.helm import FULL_NAME, Object, container, named, nested, of_kind, pod

DIGEST = "sha256:" + "0123456789abcdef" * 4
IMAGE = "ghcr.io/example/tpu-training-operator"
NAMESPACES = ["team-a", "team-b"]


@dataclass(frozen=True)
class Switch:
    """`shows` reads from the rendered objects what `value` at `path` must turn into: `expected`.

    beside: further values without which the one at `path` has nothing to act on.
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


_AFFINITY = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]
        }
    }
}
_POLICY = {"enabled": True}

SWITCHES = (
    Switch("nameOverride", "op", _names("Deployment"), ["tpu-op"]),
    Switch("fullnameOverride", "op", _names("Deployment"), ["op"]),
    Switch("image.repository", "registry.example/op", _image, "registry.example/op:0.1.0"),
    Switch("image.tag", "1.2.3", _image, f"{IMAGE}:1.2.3"),
    Switch("image.digest", DIGEST, _image, f"{IMAGE}@{DIGEST}"),
    Switch("image.pullPolicy", "Always", lambda o: container(o)["imagePullPolicy"], "Always"),
    Switch("imagePullSecrets", [{"name": "key"}], _in_pod("imagePullSecrets"), [{"name": "key"}]),
    Switch("crds.enabled", False, _names("CustomResourceDefinition"), []),
    Switch(
        "crds.keep", False, lambda o: of_kind(o, "CustomResourceDefinition")[0]["metadata"].get("annotations"), None
    ),
    Switch(
        "watchNamespaces", NAMESPACES, lambda o: [r["metadata"]["namespace"] for r in of_kind(o, "Role")], NAMESPACES
    ),
    Switch("replicas", 0, lambda o: named(o, "Deployment")["spec"]["replicas"], 0),
    Switch("logLevel", "DEBUG", lambda o: "--log-level=DEBUG" in _arguments(o), True),
    Switch("qps", 12.5, lambda o: "--qps=12.5" in _arguments(o), True),
    # Seven digits: helm reads numbers as floats, and prints larger ones as 2e+06 where a template lets it.
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
    Switch("rbac.userRoles", False, _names("ClusterRole"), [FULL_NAME]),
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
    Switch("resources", {"limits": {"memory": "1Gi"}}, lambda o: container(o)["resources"]["limits"]["memory"], "1Gi"),
    Switch("podAnnotations", {"a": "1"}, lambda o: pod(o)["metadata"]["annotations"], {"a": "1"}),
    Switch("podLabels", {"team": "ml"}, lambda o: pod(o)["metadata"]["labels"]["team"], "ml"),
    Switch("nodeSelector", {"pool": "system"}, _in_pod("nodeSelector"), {"pool": "system"}),
    Switch("tolerations", [{"operator": "Exists"}], _in_pod("tolerations"), [{"operator": "Exists"}]),
    Switch("affinity", _AFFINITY, _in_pod("affinity"), _AFFINITY),
    Switch("priorityClassName", "system-cluster-critical", _in_pod("priorityClassName"), "system-cluster-critical"),
)

# Rendered in every combination that adds or removes objects, and with the defaults.
VARIANTS: dict[str, Object] = {"defaults": {}} | {switch.path: switch.values for switch in SWITCHES}
