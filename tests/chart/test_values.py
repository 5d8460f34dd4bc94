"""The chart's values: each does one thing, all are described, and wrong ones are refused with an explanation."""

import json
import re
from collections.abc import Iterator

import pytest
import yaml

from tests.chart.helm import CHART, REPOSITORY, Helm, Object, Refused, nested
from tests.chart.switches import SWITCHES, Switch

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())


def schema_nodes(schema: Object, path: str = "") -> Iterator[tuple[str, Object]]:
    """(path, schema) of every value but `global`, which is helm's."""
    for name, child in schema.get("properties", {}).items():
        if name != "global":
            yield f"{path}{name}", child
            yield from schema_nodes(child, f"{path}{name}.")


VALUES = {path for path, schema in schema_nodes(SCHEMA) if "properties" not in schema}


def test_helm_lint_finds_nothing(helm: Helm) -> None:
    helm.run("lint", "--strict", str(CHART))


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: switch.path)
def test_a_value_shows_where_it_should(helm: Helm, switch: Switch) -> None:
    assert switch.shows(helm.template(switch.values)) == switch.expected


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: switch.path)
def test_its_default_differs(helm: Helm, switch: Switch) -> None:
    assert switch.value != at(DEFAULTS, switch.path)


def test_every_value_is_switched_once() -> None:
    assert sorted(switch.path for switch in SWITCHES) == sorted(VALUES)


def test_every_value_has_a_default() -> None:
    assert [path for path in VALUES if at(DEFAULTS, path) is None] == []


def test_every_value_is_described() -> None:
    assert [path for path, schema in schema_nodes(SCHEMA) if not schema.get("description")] == []


def test_unknown_values_are_refused() -> None:
    open_objects = [
        p for p, s in schema_nodes(SCHEMA) if "properties" in s and s.get("additionalProperties") is not False
    ]
    assert open_objects == []


def test_helm_shows_a_readme_with_every_value(helm: Helm) -> None:
    readme = helm.run("show", "readme", str(CHART))
    assert [path for path in sorted(VALUES) if f"| `{path}` |" not in readme] == []


def test_the_guides_name_no_value_that_is_not_there() -> None:
    known = {path for path, _ in schema_nodes(SCHEMA)}
    for name in ("install.md", "metrics.md", "gke.md", "operations.md", "scale.md", "teams.md"):
        guide = (REPOSITORY / "docs" / name).read_text()
        roots = "|".join(SCHEMA["properties"])
        named = set(re.findall(rf"(?:`|--set '?)((?:{roots})(?:\.\w+)+)", guide))
        assert named <= known, name


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("replica", 1, "additional properties 'replica' not allowed"),
        ("image.tags", "1", "at '/image': additional properties 'tags' not allowed"),
        ("image.repository", "", "at '/image/repository': minLength"),
        ("image.digest", "sha256:1", "at '/image/digest': 'sha256:1' does not match pattern"),
        ("image.pullPolicy", "Sometimes", "must be one of 'Always', 'IfNotPresent', 'Never'"),
        ("imagePullSecrets", ["key"], "at '/imagePullSecrets/0': got string, want object"),
        ("watchNamespaces", "team-a", "at '/watchNamespaces': got string, want array"),
        ("watchNamespaces", ["team_a"], "at '/watchNamespaces/0': 'team_a' does not match pattern"),
        ("watchNamespaces", ["team-a", "team-a"], "at '/watchNamespaces': items at 0 and 1 are equal"),
        ("replicas", 4, "at '/replicas': maximum"),
        ("replicas", -1, "at '/replicas': minimum"),
        ("logLevel", "info", "at '/logLevel': value must be one of 'DEBUG', 'INFO', 'WARNING'"),
        ("qps", -1, "at '/qps': minimum"),
        ("burst", "many", "at '/burst': got string, want integer"),
        ("crds.enabled", "no", "at '/crds/enabled': got string, want boolean"),
        ("serviceAccount.create", False, "serviceAccount.name: name an existing account"),
        ("networkPolicy.apiServerCIDRs", [], "at '/networkPolicy/apiServerCIDRs': minItems"),
        ("networkPolicy.apiServerPorts", [0], "at '/networkPolicy/apiServerPorts/0': minimum"),
        ("podLabels", {"team": 1}, "at '/podLabels/team': got number, want string"),
    ],
)
def test_a_wrong_value_is_refused_with_an_explanation(helm: Helm, path: str, value: object, message: str) -> None:
    with pytest.raises(Refused) as refused:
        helm.template(nested(path, value))
    assert message in str(refused.value)


def at(values: Object, path: str) -> object:
    found: object = values
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found
