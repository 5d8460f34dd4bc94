"""docs/python.md: everything that users import from the trainer, field by field, as the docstrings have it."""

import ast
import re
import runpy
from pathlib import Path

import pytest

import tpu_trainer
import tpu_trainer.callbacks

ROOT = Path(__file__).parents[3]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "python_reference.py"))
PAGE = SCRIPT["page"]()
SOURCES = {name: file for members in SCRIPT["_SECTIONS"].values() for file, name in members}


def section(name: str) -> str:
    (text,) = re.findall(rf"^### {name}\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return str(text)


def test_the_page_matches_the_docstrings() -> None:
    written = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert written == PAGE, "docs/python.md is out of date: run `make crds`"


@pytest.mark.parametrize("name", [*tpu_trainer.__all__, *tpu_trainer.callbacks.__all__])
def test_everything_that_users_import_is_there(name: str) -> None:
    assert section(name).strip()


@pytest.mark.parametrize("name", SOURCES)
def test_nothing_is_without_a_meaning(name: str) -> None:
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in section(name).splitlines() if line.startswith("|")]
    assert [row for row in rows if not row[-1].strip()] == []
    assert re.sub(r"^`.*`$", "", section(name), flags=re.MULTILINE).strip()


@pytest.mark.parametrize("name", ["Task", "Hyperparameters", "ShardedStream", "ScheduleSpec"])
def test_a_docstring_explains_the_fields_that_there_are(name: str) -> None:
    body = ast.parse((ROOT / "trainer_image" / "tpu_trainer" / SOURCES[name]).read_text(encoding="utf-8")).body
    [found] = [each for each in body if isinstance(each, ast.ClassDef) and each.name == name]
    fields = [ast.unparse(each.target) for each in found.body if isinstance(each, ast.AnnAssign)]
    explained, _ = SCRIPT["_by_field"](ast.get_docstring(found))
    assert sorted(explained) == sorted(fields)
