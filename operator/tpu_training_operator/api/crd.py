"""The CustomResourceDefinition, generated from the models. `tpujob crd` prints it, `crds/` holds it.

Kubernetes wants a structural schema (OpenAPI v3): no $ref, no unions with null, no additionalProperties beside
properties. Pydantic prints JSON Schema 2020-12. This module converts the second into the first.
"""

from typing import Any

from pydantic import TypeAdapter

from tpu_training_operator.api.constants import API_VERSION, GROUP, KIND, PLURAL, VERSION
from tpu_training_operator.api.job import Spec, TPUTrainingJob
from tpu_training_operator.api.model import LARGEST_COUNT
from tpu_training_operator.api.status import Status

Schema = dict[str, Any]

_COLUMNS = (
    ("State", "string", ".status.state", "What the job is doing", 0),
    ("Slice", "string", ".status.resolved.acceleratorType", "TPU slice", 0),
    ("Hosts", "integer", ".status.resolved.hosts", "Worker pods", 0),
    ("Attempt", "integer", ".status.attempt", "Attempts begun so far", 0),
    ("Step", "integer", ".status.progress.step", "Last reported training step", 0),
    ("Progress", "integer", ".status.progress.percent", "Percent of the steps", 0),
    ("Left", "string", ".status.progress.timeLeft", "Time to the end at the present speed", 0),
    ("Age", "date", ".metadata.creationTimestamp", "", 0),
    ("Rung", "integer", ".status.ladder.rung", "Rung of the ladder, if there is one", 1),
    ("Topology", "string", ".status.resolved.topology", "Chips along each axis", 1),
    ("Batch", "integer", ".status.resolved.globalBatchSize", "Examples per step", 1),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', "Why it is or is not ready", 1),
    ("Message", "string", '.status.conditions[?(@.type=="Ready")].message', "The reason in a sentence", 1),
)

_SELECTABLE = (".status.state", ".spec.slice.acceleratorType")


def custom_resource_definition() -> Schema:
    """Returns the CRD as plain data, in the order in which people read it."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["tpujob"],
                "categories": ["training"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    # From Kubernetes 1.31 on; an older API server drops them.
                    "selectableFields": [{"jsonPath": path} for path in _SELECTABLE],
                    "additionalPrinterColumns": [_column(*column) for column in _COLUMNS],
                    "schema": {"openAPIV3Schema": _object_schema()},
                }
            ],
        },
    }


def _column(name: str, kind: str, path: str, description: str, priority: int) -> Schema:
    column = {"name": name, "type": kind, "jsonPath": path}
    if description:
        column["description"] = description
    return column | ({"priority": priority} if priority else {})


def _object_schema() -> Schema:
    return {
        "type": "object",
        "description": f"A data-parallel PyTorch training job on TPU slices ({API_VERSION}).",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"Version of the API, {API_VERSION}."},
            "kind": {"type": "string", "description": f"Kind of the object, {KIND}."},
            # The API server describes it, and refuses a description here.
            "metadata": {"type": "object"},
            "spec": structural_schema(Spec)
            | {"description": "What to train, on which slice, and what to do on failures."},
            "status": structural_schema(Status)
            | {
                "description": "What the operator reports about the job.",
                # Until the operator has seen the job. Without it, kstatus would take a new job for a settled one.
                "default": {"observedGeneration": -1},
            },
        },
        "x-kubernetes-validations": [rule.as_schema() for rule in TPUTrainingJob.rules],
    }


def structural_schema(model: type[object]) -> Schema:
    """Returns the structural schema of one model."""
    schema = TypeAdapter(model).json_schema(by_alias=True, mode="validation")
    return _convert(schema, schema.pop("$defs", {}))


def _convert(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    schema = _inline(_without_null(_inline(schema, definitions)), definitions)
    if "anyOf" in schema:
        # The only union left is a quantity, such as 4 or "4Gi". A pattern says nothing about numbers.
        (pattern,) = (branch["pattern"] for branch in schema["anyOf"] if "pattern" in branch)
        description = {key: schema[key] for key in ("description",) if key in schema}
        return {"x-kubernetes-int-or-string": True, "pattern": pattern, **description}
    converted: Schema = {}
    for key, value in schema.items():
        match key:
            case "title" | "const" | "discriminator":
                continue
            case "default" if value is None:
                continue
            case "properties":
                converted[key] = {name: _convert(child, definitions) for name, child in value.items()}
            case "items":
                converted[key] = _convert(value, definitions)
            case "additionalProperties":
                # Pruning already drops unknown fields, so only the value schema of a map is allowed here.
                if isinstance(value, dict):
                    converted[key] = _convert(value, definitions)
            case _:
                converted[key] = value
    if "const" in schema:
        converted["enum"] = [schema["const"]]
    if converted.get("x-kubernetes-preserve-unknown-fields"):
        converted.pop("additionalProperties", None)
    if converted.get("type") == "integer":
        converted["format"] = "int32" if converted.get("maximum", LARGEST_COUNT) < 2**31 else "int64"
    if converted.get("type") == "array":
        converted.setdefault("x-kubernetes-list-type", "atomic")
    return converted


def _inline(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    reference = schema.get("$ref")
    if reference is None:
        return schema
    siblings = {key: value for key, value in schema.items() if key != "$ref"}
    return definitions[reference.rpartition("/")[2]] | siblings


def _without_null(schema: Schema) -> Schema:
    branches = [branch for branch in schema.get("anyOf", []) if branch != {"type": "null"}]
    if len(branches) != 1:
        return schema
    siblings = {key: value for key, value in schema.items() if key != "anyOf"}
    merged: Schema = branches[0] | siblings
    return merged
