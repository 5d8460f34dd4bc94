"""The chart's README is made from its values: nothing in it is written twice, and every value is there."""

import json
import re
import runpy
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts" / "tpu-training-operator"
page = runpy.run_path(str(ROOT / "scripts" / "chart_readme.py"))["page"]


def test_it_matches_the_values() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert (CHART / "README.md").read_text(encoding="utf-8") == page(schema, defaults), "run `make crds`"


def row(schema: object, default: object) -> str:
    """The row of a value `v`."""
    (found,) = re.findall(r"^\| `v` .*$", page({"properties": {"v": schema}}, {"v": default}), re.MULTILINE)
    return str(found)


@pytest.mark.parametrize(
    ("schema", "default", "cells"),
    [
        ({"type": "string"}, "", 'string | `""`'),
        ({"type": "string"}, "30s", "string | `30s`"),
        ({"type": "boolean"}, False, "boolean | `false`"),
        ({"type": "integer", "minimum": 1, "maximum": 9}, 2, "integer, 1 to 9 | `2`"),
        ({"type": "number", "minimum": 0}, 0.5, "number, at least 0 | `0.5`"),
        ({"enum": ["A", "B"]}, "B", "one of `A`, `B` | `B`"),
        ({"type": "array", "items": {"type": "string"}}, [], "list of string | `[]`"),
        ({"type": "object", "additionalProperties": {"type": "string"}}, {"a": "1"}, "map of string | `{a: '1'}`"),
    ],
)
def test_a_row_shows_type_and_default_as_yaml(schema: dict[str, object], default: object, cells: str) -> None:
    assert row(schema | {"description": "What | it is."}, default) == f"| `v` | {cells} | What \\| it is. |"


def test_values_below_others_are_shown_by_their_path() -> None:
    leaf = {"type": "string", "description": "A leaf."}
    inner = {"properties": {"leaf": leaf}, "description": "Inner."}
    outer = {"properties": {"inner": inner}, "description": "Outer."}
    shown = page({"properties": {"outer": outer}}, {"outer": {"inner": {"leaf": "x"}}})
    assert "### outer\n\nOuter.\n" in shown
    assert "| `outer.inner.leaf` | string | `x` | A leaf. |" in shown


def test_values_that_the_chart_does_not_read_are_left_out() -> None:
    """`global` is helm's; the schema only has to allow it."""
    assert "global" not in page({"properties": {"global": {"type": "object", "description": "Of helm."}}}, {})
