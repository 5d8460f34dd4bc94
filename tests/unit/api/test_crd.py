"""The CRD is a structural schema that an API server accepts, and says what the models mean."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tpu_training_operator.api.crd import custom_resource_definition
from tpu_training_operator.api.job import IMMUTABLE, MUTABLE_AT_REST, Spec, TPUTrainingJob
from tpu_training_operator.api.model import ApiModel, Rule
from tpu_training_operator.api.recipe import Recipe
from tpu_training_operator.api.slice import Slice, SliceRef
from tpu_training_operator.api.status import Status
from tpu_training_operator.api.trainer import Trainer, Volume
from tpu_training_operator.cli.plan.crd import crd_text

ROOT = Path(__file__).parents[3]
CRD = custom_resource_definition()
[VERSION] = CRD["spec"]["versions"]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]
# etcd takes objects of 1.5 MiB, `kubectl apply` annotations of 256 KiB; it writes the object there as compact JSON.
LARGEST = 256 * 1024

Schema = dict[str, Any]


def walk(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from walk(child, f"{path}.{name}")
    for key, suffix in (("items", "[]"), ("additionalProperties", "{}")):
        if key in schema:
            yield from walk(schema[key], path + suffix)


NODES = dict(walk(SCHEMA))
SPEC_NODES = {path: node for path, node in NODES.items() if path.startswith(".spec")}


def test_it_fits_an_annotation_of_kubectl_apply() -> None:
    assert len(json.dumps(yaml.safe_load(crd_text()), separators=(",", ":"))) < LARGEST


@pytest.mark.parametrize("keyword", ["$ref", "$defs", "anyOf", "oneOf", "allOf", "const", "title", "discriminator"])
def test_no_node_uses_what_a_structural_schema_forbids(keyword: str) -> None:
    assert [path for path, node in NODES.items() if keyword in node] == []


def test_every_node_has_a_type_or_is_a_quantity() -> None:
    assert [
        path for path, node in NODES.items() if "type" not in node and "x-kubernetes-int-or-string" not in node
    ] == []


def test_every_field_is_described_in_plain_words() -> None:
    """Three words or more, none of them a name from the Python code. The API server describes metadata itself."""
    fields = {
        f"{path}.{name}": str(child.get("description", ""))
        for path, node in NODES.items()
        for name, child in node.get("properties", {}).items()
        if (path, name) != ("", "metadata")
    }
    snake_case = re.compile(r"\b[a-z]+(_[a-z0-9]+)+\b")
    libraries = {"torch_xla", "tpu_dist"}
    assert [path for path, text in fields.items() if len(text.split()) < 3] == []
    assert [
        path
        for path, text in fields.items()
        if {word.group() for word in snake_case.finditer(text)} - libraries or "\n" in text
    ] == []


def test_no_default_is_null() -> None:
    assert [path for path, node in NODES.items() if node.get("default", "") is None] == []


def test_no_node_has_both_fields_and_a_map() -> None:
    assert [path for path, node in NODES.items() if {"properties", "additionalProperties"} <= set(node)] == []


def test_every_list_is_bounded_and_says_how_it_merges() -> None:
    lists = {path: node for path, node in NODES.items() if node.get("type") == "array"}
    assert [path for path, node in lists.items() if not {"maxItems", "x-kubernetes-list-type"} <= set(node)] == []


def test_every_string_of_the_spec_is_bounded() -> None:
    bounds = {"maxLength", "enum", "pattern", "format"}
    strings = {path: node for path, node in SPEC_NODES.items() if node.get("type") == "string"}
    assert [path for path, node in strings.items() if not bounds & set(node)] == []


def test_every_map_of_the_spec_is_bounded() -> None:
    maps = {path: node for path, node in SPEC_NODES.items() if "additionalProperties" in node}
    assert [path for path, node in maps.items() if "maxProperties" not in node] == []


def test_every_number_of_the_spec_is_bounded() -> None:
    numbers = {path: node for path, node in SPEC_NODES.items() if node.get("type") in ("integer", "number")}
    assert [path for path, node in numbers.items() if not {"minimum", "maximum"} <= set(node)] == []


def test_a_bound_of_a_number_fits_into_64_bits() -> None:
    """The API server compares a whole number with them as an integer."""
    numbers = [node for node in SPEC_NODES.values() if node.get("type") == "number"]
    assert numbers
    assert all(
        isinstance(node[bound], int) and abs(node[bound]) < 2**63
        for node in numbers
        for bound in ("minimum", "maximum")
    )


def test_a_number_without_a_32_bit_bound_is_a_64_bit_number() -> None:
    """The API server enforces int32; steps and generations outgrow it."""
    integers = {path: node for path, node in NODES.items() if node.get("type") == "integer"}
    wide = {path for path, node in integers.items() if node.get("maximum", 2**63) >= 2**31}
    assert wide == {path for path, node in integers.items() if node["format"] == "int64"}
    assert {".status.resolved.trainSteps", ".status.progress.step", ".status.observedGeneration"} <= wide


def test_the_version_is_served_and_stored_with_a_status_subresource() -> None:
    assert (VERSION["name"], VERSION["served"], VERSION["storage"]) == ("v1alpha1", True, True)
    assert VERSION["subresources"] == {"status": {}}


def test_the_names_that_people_type() -> None:
    assert CRD["metadata"]["name"] == "tputrainingjobs.tpu-operator.dev"
    assert CRD["spec"]["names"]["shortNames"] == ["tpujob"]
    assert CRD["spec"]["scope"] == "Namespaced"


def test_the_columns_point_at_fields_that_exist() -> None:
    columns = {column["name"]: column["jsonPath"] for column in VERSION["additionalPrinterColumns"]}
    assert list(columns)[:8] == ["State", "Slice", "Hosts", "Attempt", "Step", "Progress", "Left", "Age"]
    assert [name for name in columns if not name.isalpha()] == []
    plain = [path for path in columns.values() if path.startswith(".status") and "[" not in path]
    plain += [field["jsonPath"] for field in VERSION["selectableFields"]]
    assert [path for path in plain if path not in NODES] == []


def test_conditions_merge_by_type_and_env_by_name() -> None:
    conditions, env = NODES[".status.conditions"], NODES[".spec.trainer.env"]
    assert (conditions["x-kubernetes-list-type"], conditions["x-kubernetes-list-map-keys"]) == ("map", ["type"])
    assert (env["x-kubernetes-list-type"], env["x-kubernetes-list-map-keys"]) == ("map", ["name"])


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("", TPUTrainingJob),
        (".spec", Spec),
        (".spec.slice", Slice),
        (".spec.trainer", Trainer),
        (".spec.trainer.volumes[]", Volume),
        (".spec.recipe", Recipe),
        (".spec.recipe.tunedOn", SliceRef),
    ],
)
def test_the_rules_of_a_model_are_at_its_path(path: str, model: type[ApiModel]) -> None:
    assert NODES[path]["x-kubernetes-validations"] == [rule.as_schema() for rule in model.rules]


def test_every_rule_is_in_the_schema() -> None:
    written = {rule["rule"] for node in NODES.values() for rule in node.get("x-kubernetes-validations", ())}
    assert {rule.as_schema()["rule"] for model in _models(ApiModel) for rule in model.rules} == written


@pytest.mark.parametrize("path", ["", ".spec"])
def test_a_rule_over_several_parts_of_a_job_is_judged_when_the_job_is_created(path: str) -> None:
    """A change of one part makes the API server judge it again: a job from before the rule could not be suspended."""
    rules = [rule for rule in NODES[path]["x-kubernetes-validations"] if "optionalOldSelf" not in rule]
    assert [rule["rule"] for rule in rules if "oldSelf" not in rule["rule"]] == []


def test_no_rule_has_a_message_that_is_too_long() -> None:
    rules: list[Rule] = [rule for model in _models(ApiModel) for rule in model.rules]
    assert [rule.field for rule in rules if len(rule.message) > 2048 or "\n" in rule.message] == []


def test_the_yaml_parses_to_the_definition() -> None:
    assert yaml.safe_load(crd_text()) == CRD


def _models(base: type[ApiModel]) -> Iterator[type[ApiModel]]:
    for model in base.__subclasses__():
        yield model
        yield from _models(model)


def test_a_negative_attempt_counts_as_zero() -> None:
    assert SCHEMA["properties"]["status"]["properties"]["attempt"]["minimum"] == 0
    assert Status.read({"attempt": -(10**9)}).attempt == 0


def test_the_documentation_names_every_field_that_cannot_change_freely() -> None:
    page = (ROOT / "docs" / "status.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (at any time|while the job is suspended|never) \| (.*) \|$", page, re.MULTILINE))
    for fields, row in ((IMMUTABLE, rows["never"]), (MUTABLE_AT_REST, rows["while the job is suspended"])):
        named = set(re.findall(r"`([^`]+)`", row))
        assert [name for name in fields if not {name, name.removeprefix("slice.")} & named] == []
