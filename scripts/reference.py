"""Writes docs/reference.md, every field of a job, from the CustomResourceDefinition: `make crds`."""

from collections.abc import Iterator
from typing import Any

from tpu_training_operator.api.crd import custom_resource_definition

Schema = dict[str, Any]

_INTRODUCTION = """\
# Every field of a TPUTrainingJob

Made from the [definition](../crds/tputrainingjobs.yaml) by `make crds`; `kubectl explain tputrainingjob.spec` shows the
same text. Required fields are **bold**. `[]` is an item of a list, `{}` a value of a map. What follows from the
spec is a number; what a run has measured is text, because it may be `nan` or `inf`.
[examples/bucket.yaml](../examples/bucket.yaml) is a job that uses most sections of the spec.
"""
_UNBOUNDED = 2**31 - 1


def page() -> str:
    """Returns the whole page."""
    (version,) = custom_resource_definition()["spec"]["versions"]
    properties = version["schema"]["openAPIV3Schema"]["properties"]
    parts = [_INTRODUCTION]
    for root in ("spec", "status"):
        alone = {name: schema for name, schema in properties[root]["properties"].items() if not _has_parts(schema)}
        parts.append(f"## {root}\n\n{properties[root]['description']}\n")
        if alone:
            parts.append(_section(properties[root] | {"properties": alone}))
        for name, schema in properties[root]["properties"].items():
            if name not in alone:
                parts.append(f"### {root}.{name}\n\n{_description(schema)}\n")
                parts.append(_section(schema.get("items", schema) if schema["type"] == "array" else schema))
    return "\n".join(parts)


def _has_parts(schema: Schema) -> bool:
    return "properties" in schema or "properties" in schema.get("items", {})


def _section(schema: Schema) -> str:
    """Returns a table of the fields below `schema`, then the rules over more than one of them."""
    rows = [f"| {path} | {kind} | {default} | {text} |" for path, kind, default, text in _rows(schema, "")]
    table = "\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *rows, ""])
    rules = list(dict.fromkeys(_rules(schema)))
    return table + ("\nRules:\n\n" + "\n".join(f"- {rule}" for rule in rules) + "\n" if rules else "")


def _rows(schema: Schema, above: str) -> Iterator[tuple[str, str, str, str]]:
    for name, field in schema.get("properties", {}).items():
        path, required = f"{above}{name}", name in schema.get("required", ())
        shown = f"`{path}`"
        yield f"**{shown}**" if required else shown, _type(field), _default(field), _description(field)
        yield from _rows(field, f"{path}.")
        yield from _rows(field.get("items", {}), f"{path}[].")
        values = field.get("additionalProperties")
        if isinstance(values, dict):
            yield from _rows(values, f"{path}{{}}.")


def _type(field: Schema) -> str:
    if field.get("x-kubernetes-preserve-unknown-fields"):
        return "as in a pod"
    if "enum" in field:
        return "one of " + ", ".join(f"`{value}`" for value in field["enum"])
    kind = str(field.get("type", "any"))
    if kind == "array":
        return f"list of {_type(field['items'])}"
    values = field.get("additionalProperties")
    if isinstance(values, dict):
        return f"map of {_type(values)}"
    low, high = field.get("minimum"), field.get("maximum")
    if kind == "number":
        least = " above 0" if field.get("exclusiveMinimum") else ", at least 0" if low == 0 else ""
        return "number" + (", 0 to below 1" if field.get("exclusiveMaximum") else least)
    if low is None:
        return kind
    return f"{kind}, at least {low}" if high is None or high >= _UNBOUNDED else f"{kind}, {low} to {high}"


def _default(field: Schema) -> str:
    default = field.get("default")
    if default is None or default == {}:
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _description(field: Schema) -> str:
    return " ".join(str(field.get("description", "")).split()).replace("|", "\\|").replace("<", "&lt;")


def _rules(schema: Schema) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        if "fieldPath" not in rule:
            yield str(rule["message"]).replace("|", "\\|")
    for field in schema.get("properties", {}).values():
        yield from _rules(field)
        yield from _rules(field.get("items", {}))


if __name__ == "__main__":
    print(page(), end="")
