"""Writes docs/reference.md, every field of a job, from the CustomResourceDefinition: `make crds`."""

from collections.abc import Iterator
from typing import Any

from tpu_training_operator.api.crd import custom_resource_definition

Schema = dict[str, Any]

_INTRODUCTION = """\
# Every field of a TPUTrainingJob

Made from the [definition](../crds/tputrainingjobs.yaml) by `make crds`; `kubectl explain tputrainingjob.spec` shows the
same text, and the types of the status: what follows from the spec is a number there, and what a run has measured is
text, because it may be `nan` or `inf`. Required fields are **bold**. `[]` is an item of a list, `{}` a value of a map.
[examples/bucket.yaml](../examples/bucket.yaml) is a job that uses most sections of the spec.
"""
_UNBOUNDED = 2**31 - 1
_FEWEST = 3
"""Fields that a part must have to be described only once."""

_POD_PARTS = {"imagePullSecrets", "env", "envFrom", "volumes", "volumeMounts", "tolerations"}
"""Parts of spec.trainer whose fields Kubernetes describes."""

Row = tuple[str, str, str]
"""A field's path below its section, what it takes, and its meaning."""


def page() -> str:
    """Returns the whole page."""
    (version,) = custom_resource_definition()["spec"]["versions"]
    properties = version["schema"]["openAPIV3Schema"]["properties"]
    parts, told = [_INTRODUCTION], Told()
    for root in ("spec", "status"):
        alone = {name: schema for name, schema in properties[root]["properties"].items() if not _has_parts(schema)}
        parts.append(f"## {root}\n\n{properties[root]['description']}\n")
        if alone:
            parts.append(_section(properties[root] | {"properties": alone}, root, told))
        for name, schema in properties[root]["properties"].items():
            if name not in alone:
                fields, place = _fields(schema), f"{root}.{name}"
                repeated = told.repeats(fields, place)
                parts.append(f"### {place}\n\n{_description(schema)}{repeated}\n")
                if not repeated:
                    parts.append(_section(fields, place, told))
    return "\n".join(parts)


class Told:
    """The parts that the page has described, so that none is described twice."""

    def __init__(self) -> None:
        self._places: dict[frozenset[Row], str] = {}
        self._rules: set[str] = set()

    def repeats(self, schema: Schema, place: str) -> str:
        """Returns a sentence that says where the fields of `schema` are described already, or remembers their place."""
        rows = frozenset(_rows(schema, "", "", None))
        if len(rows) < _FEWEST:
            return ""
        for known, where in self._places.items():
            if rows <= known:
                return f" Fields as in `{where}`" + ("." if rows == known else f": {_names(schema)}.")
        self._places[rows] = place
        return ""

    def new_rules(self, schema: Schema) -> list[str]:
        """Returns the rules over more than one field that no part before `schema` had."""
        rules = [rule for rule in dict.fromkeys(_rules(schema)) if rule not in self._rules]
        self._rules.update(rules)
        return rules


def _names(schema: Schema) -> str:
    return ", ".join(f"`{name}`" for name in schema["properties"])


def _has_parts(schema: Schema) -> bool:
    return "properties" in schema or "properties" in schema.get("items", {})


def _fields(schema: Schema) -> Schema:
    """Returns what has the fields of `schema`: itself, or the items of a list, or the values of a map."""
    if schema.get("type") == "array":
        return dict(schema["items"])
    values = schema.get("additionalProperties")
    return values if isinstance(values, dict) else schema


def _section(schema: Schema, place: str, told: Told) -> str:
    """Returns a table of the fields below `schema`, then the rules over more than one of them."""
    if place.partition(".")[0] == "status":
        head = ["| field | meaning |", "|---|---|"]
        rows = [f"| {path} | {_with_values(text, kind)} |" for path, kind, text in _rows(schema, "", place, told)]
    else:
        head = ["| field | takes | meaning |", "|---|---|---|"]
        rows = [f"| {path} | {kind} | {text} |" for path, kind, text in _rows(schema, "", place, told)]
    table = "\n".join([*head, *rows, ""])
    rules = told.new_rules(schema)
    return table + ("\nRules:\n\n" + "\n".join(f"- {rule}" for rule in rules) + "\n" if rules else "")


def _rows(schema: Schema, above: str, place: str, told: Told | None) -> Iterator[Row]:
    """Yields a row for each field and those below it; with `told`, a sentence for what is described elsewhere."""
    for name, field in schema.get("properties", {}).items():
        path, required = f"{above}{name}", name in schema.get("required", ())
        shown, below = f"`{path}`", _fields(field)
        suffix = "[]" if field.get("type") == "array" else "" if below is field else "{}"
        if place == "spec.trainer" and name in _POD_PARTS:
            repeated = f" Fields as in a pod: {_names(below)}."
        else:
            repeated = told.repeats(below, f"{place}.{path}{suffix}") if told else ""
        default = _default(field)
        yield f"**{shown}**" if required else shown, _type(field) + default, _description(field) + repeated
        if not repeated:
            yield from _rows(below, f"{path}{suffix}.", place, told)


def _with_values(text: str, kind: str) -> str:
    """Returns the meaning of a field that the operator writes, with its values if they are few and not named yet."""
    kind = kind.partition(";")[0]
    values = kind.removeprefix("one of ")
    if values == kind or all(value.strip("`") in text for value in values.split(", ")):
        return text
    return f"{text} One of {values}."


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
    if default in (None, {}, ""):
        return ""
    return f"; default `{str(default).lower() if isinstance(default, bool) else default}`"


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
