"""The files that `make crds` writes are up to date."""

import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import tpu_trainer
import tpu_trainer.callbacks
from tpu_training_operator.cli.plan.crd import crd_text

ROOT = Path(__file__).parents[3]
CHART = "charts/tpu-training-operator"


def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def page(script: str, *arguments: Any) -> str:
    return str(runpy.run_path(str(ROOT / "scripts" / script))["page"](*arguments))


GENERATED: dict[str, Callable[[], str]] = {
    "crds/tputrainingjobs.yaml": crd_text,
    f"{CHART}/files/tputrainingjobs.yaml": crd_text,
    f"{CHART}/README.md": lambda: page(
        "chart_readme.py",
        json.loads(text_of(f"{CHART}/values.schema.json")),
        yaml.safe_load(text_of(f"{CHART}/values.yaml")),
    ),
    "docs/reference.md": lambda: page("reference.py"),
    "docs/python.md": lambda: page("python_reference.py"),
    "docs/cli.md": lambda: page("cli_reference.py", text_of("docs/cli.md")),
}


@pytest.mark.parametrize("path", GENERATED)
def test_a_generated_file_is_up_to_date(path: str) -> None:
    assert text_of(path) == GENERATED[path](), f"{path} is out of date: run `make crds`"


def test_the_reference_of_python_has_everything_that_users_import() -> None:
    sections = set(re.findall(r"^### (\w+)$", text_of("docs/python.md"), re.MULTILINE))
    assert {*tpu_trainer.__all__, *tpu_trainer.callbacks.__all__} <= sections
