"""What helm says to whoever has just installed the chart."""

import pytest

from tests.chart.helm import CHART, NAMESPACE, RELEASE, Helm, Object
from tests.chart.switches import NAMESPACES


def notes(helm: Helm, values: Object) -> str:
    place = ("--namespace", NAMESPACE, "--dry-run=client")
    _, found, told = helm.run("install", RELEASE, str(CHART), *place, values=values).partition("\nNOTES:\n")
    assert found
    return told


def test_they_say_what_to_do_next(helm: Helm) -> None:
    told = notes(helm, {"watchNamespaces": NAMESPACES})
    assert "serves the namespaces team-a, team-b" in told
    assert f"helm test {RELEASE} -n {NAMESPACE}" in told
    assert "kubectl -n team-a apply -f job.yaml" in told
    assert "`helm uninstall` leaves jobs and their running workers" in told


@pytest.mark.parametrize(
    ("values", "warning"),
    [
        ({}, "image.repository is localhost/tpu-training-operator, which no node can pull"),
        ({}, "No image has the tag"),
        ({"replicas": 0}, "PAUSED: replicas is 0"),
        ({"crds": {"enabled": False}}, "crds.enabled is false"),
    ],
    ids=["no image", "no tag", "no operator", "no definition"],
)
def test_they_warn_of_what_will_not_work(helm: Helm, values: Object, warning: str) -> None:
    assert warning in notes(helm, values)


def test_those_of_a_usable_installation_have_no_warnings(helm: Helm) -> None:
    told = notes(helm, {"image": {"repository": "registry.example/operator", "tag": "1"}})
    assert not [word for word in ("no node can pull", "No image", "PAUSED", "false") if word in told]
