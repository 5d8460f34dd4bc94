"""Writes the chart's README, every value, from its values.schema.json and values.yaml: `make crds`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Schema = dict[str, Any]

_CHART = Path(__file__).parents[1] / "charts" / "tpu-training-operator"
_INTRODUCTION = """\
# tpu-training-operator

The operator of TPUTrainingJob: data-parallel PyTorch training on Cloud TPU slices, as one Kubernetes object.

```
helm install tpu-training-operator build/chart --namespace tpu-system --create-namespace
helm test tpu-training-operator --namespace tpu-system
```

In a clone, `make chart` writes `build/chart`: this folder with the version of the commit, which is the tag of the
images. [The guide](../../docs/install.md) tells about images, upgrades, namespaces, metrics,
[size](../../docs/scale.md#size) and [versions](../../docs/install.md#versions); [SECURITY.md](../../SECURITY.md)
lists the operator's rights.

## Values

Made from [values.schema.json](values.schema.json) and [values.yaml](values.yaml) by `make crds`. helm refuses values
that are not in these tables, and wrong ones.
"""
_HEAD = ["| value | type | default | meaning |", "|---|---|---|---|"]


def page(schema: Schema, defaults: dict[str, Any]) -> str:
    """Returns the whole README. A value that has others below it gets a section, the rest share the first table."""
    values = {name: value for name, value in schema["properties"].items() if name in defaults}
    alone = [_row(name, value, defaults[name]) for name, value in values.items() if "properties" not in value]
    parts = [_INTRODUCTION, _table(alone)]
    for name, value in values.items():
        if "properties" in value:
            parts += [f"### {name}\n\n{value['description']}\n", _table(_rows(value, f"{name}.", defaults[name]))]
    return "\n".join(parts)


def _rows(schema: Schema, above: str, defaults: dict[str, Any]) -> Iterator[str]:
    for name, value in schema["properties"].items():
        if "properties" in value:
            yield from _rows(value, f"{above}{name}.", defaults[name])
        else:
            yield _row(f"{above}{name}", value, defaults[name])


def _row(path: str, schema: Schema, default: object) -> str:
    meaning = schema["description"].replace("|", "\\|").replace("<", "&lt;")
    return f"| `{path}` | {_type(schema)} | `{_as_yaml(default)}` | {meaning} |"


def _type(schema: Schema) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(f"`{value}`" for value in schema["enum"])
    kind = str(schema["type"])
    if kind == "array":
        return f"list of {_type(schema['items'])}"
    values = schema.get("additionalProperties")
    if isinstance(values, dict):
        return f"map of {_type(values)}"
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is None:
        return kind
    return f"{kind}, at least {low}" if high is None else f"{kind}, {low} to {high}"


def _as_yaml(value: object) -> str:
    if value == "":
        return '""'
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)
    # A scalar ends with a document end marker.
    return text.removesuffix("...\n").strip()


def _table(rows: Iterator[str] | list[str]) -> str:
    return "\n".join([*_HEAD, *rows, ""])


if __name__ == "__main__":
    schema = json.loads((_CHART / "values.schema.json").read_text(encoding="utf-8"))
    print(page(schema, yaml.safe_load((_CHART / "values.yaml").read_text(encoding="utf-8"))), end="")
