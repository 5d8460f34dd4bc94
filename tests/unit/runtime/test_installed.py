"""What `helm test` makes of a Deployment and of a definition, and what it tells people to do."""

import copy

import pytest
from syrupy.assertion import SnapshotAssertion

from tpu_training_operator.api.crd import custom_resource_definition
from tpu_training_operator.installed import check_definition, check_deployment
from tpu_training_operator.kube.cluster import Object


def deployment(replicas: int = 1, generation: int = 2, **status: int) -> Object:
    metadata = {"name": "op", "generation": generation}
    return {"metadata": metadata, "spec": {"replicas": replicas}, "status": status}


def served() -> Object:
    """The schema of a job, as an API server publishes it: with metadata of its own."""
    (version,) = custom_resource_definition()["spec"]["versions"]
    schema: Object = copy.deepcopy(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"allOf": [{"$ref": "#/components/schemas/ObjectMeta"}]}
    return schema


def test_a_ready_operator() -> None:
    ready = deployment(observedGeneration=2, updatedReplicas=1, readyReplicas=1)
    assert check_deployment(ready).good


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"observedGeneration": 2},
        {"observedGeneration": 2, "updatedReplicas": 1},
        {"observedGeneration": 2, "readyReplicas": 1},
        {"observedGeneration": 1, "updatedReplicas": 1, "readyReplicas": 1},
    ],
    ids=["not looked at", "no pod", "not ready", "only the old one is ready", "the upgrade is not seen yet"],
)
def test_an_operator_that_is_not_ready_yet(status: dict[str, int]) -> None:
    answer = check_deployment(deployment(**status))
    assert (answer.good, answer.final) == (False, False)
    assert "deployment op is not ready" in answer.text


def test_waiting_for_a_paused_operator_is_of_no_use(snapshot: SnapshotAssertion) -> None:
    answer = check_deployment(deployment(replicas=0, observedGeneration=2))
    assert (answer.good, answer.final) == (False, True)
    assert answer.text == snapshot


def test_a_definition_of_this_version() -> None:
    assert check_definition(served()).good


def test_a_definition_that_is_not_there_is_told_with_the_command_that_installs_it(snapshot: SnapshotAssertion) -> None:
    answer = check_definition(None)
    assert not answer.good
    assert "tpu-operator.dev/v1alpha1" in answer.text
    assert answer.text == snapshot


@pytest.mark.parametrize(
    ("place", "field", "path"),
    [
        (("spec",), "report", "spec.report"),
        (("spec", "slice"), "count", "spec.slice.count"),
        (("spec", "trainer", "env[]"), "valueFrom", "spec.trainer.env.valueFrom"),
        (("status", "progress"), "step", "status.progress.step"),
    ],
)
def test_a_definition_of_another_version_is_known_by_any_field_that_it_lacks(
    place: tuple[str, ...], field: str, path: str
) -> None:
    schema = served()
    node = schema
    for name in place:
        node = node["properties"][name.removesuffix("[]")]
        node = node["items"] if name.endswith("[]") else node
    del node["properties"][field]

    answer = check_definition(schema)

    assert not answer.good
    assert f"another version's, without {path}" in answer.text


def test_a_definition_with_additional_fields_serves() -> None:
    schema = served()
    schema["properties"]["spec"]["properties"]["later"] = {"type": "string"}
    assert check_definition(schema).good
