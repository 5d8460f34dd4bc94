"""Whether a job's code is there, told without running any of it."""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from tpu_training_operator.api.trainer import Trainer
from tpu_training_operator.cli.code.entrypoint import find_problem


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A directory of user code, in which nothing may be imported."""
    files = {
        "plain.py": "def task(hp): ...\nclass Model: ...\na, b = 1, 2\nc: int = 3\nfrom x import y as z\nimport p.q\n",
        "package/__init__.py": "",
        "package/inner.py": "def task(hp): ...\n",
        "research/models/resnet.py": "task = None\n",
        "conditional.py": "try:\n    from fast import task\nexcept ImportError:\n    from slow import task\n",
        "starred.py": "from plain import *\n",
        "broken.py": "def task(hp:\n",
        "latin.py": "# -*- coding: latin-1 -*-\ndef task(hp): 'é'\n",
        "empty.py": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1"))
    (tmp_path / "mojibake.py").write_bytes(b"def task(hp): '\xe9'\n")
    (tmp_path / "danger.py").write_text("task = None\nraise SystemExit('user code was run')\n")
    return tmp_path


def problem(entrypoint: str, *paths: Path) -> str | None:
    found = find_problem(Trainer(image="x", entrypoint=entrypoint), paths)
    return None if found is None else str(found)


@pytest.mark.parametrize(
    "entrypoint",
    [
        "plain:task",
        "plain:Model",
        "plain:a",
        "plain:b",
        "plain:c",
        "plain:z",
        "plain:p",
        "package.inner:task",
        "research.models.resnet:task",
        "latin:task",
        # Whether these define it shows only when they run.
        "conditional:task",
        "starred:task",
        "danger:task",
        # Installed, and a package without a file to read.
        "json:load",
        "research.models:task",
    ],
)
def test_existing_code_is_found(code: Path, entrypoint: str) -> None:
    assert problem(entrypoint, code) is None


@pytest.mark.parametrize(
    ("entrypoint", "message"),
    [
        ("plane:task", "there is no module 'plane' in {code}; nearest: plain"),
        ("package.iner:task", "there is no module 'package.iner' in {code}/package; nearest: inner"),
        (
            "research.models.resne:task",
            "there is no module 'research.models.resne' in {code}/research/models; nearest:",
        ),
        ("plain.inner:task", "there is no module 'plain.inner' in {code}"),
        ("plain:tsk", "module 'plain' has no 'tsk'; nearest: task"),
        ("empty:task", "module 'empty' has no 'task'"),
        ("broken:task", "module 'broken' has a syntax error in line 1: '(' was never closed"),
        ("mojibake:task", "module 'mojibake' has a syntax error in line 1: (unicode error) 'utf-8' codec"),
    ],
)
def test_missing_code_is_reported(code: Path, entrypoint: str, message: str) -> None:
    found = problem(entrypoint, code) or ""
    assert found.startswith(f"spec.trainer.entrypoint: {message}".replace("{code}", str(code)))


def test_every_searched_directory_is_named_once(code: Path) -> None:
    found = problem("nonesuch:task", code, code, code / "package") or ""
    assert found.endswith(f"'nonesuch' in {code} or {code / 'package'}")


def test_a_package_with_its_own_finder_is_found(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable install is one."""

    class Finder(MetaPathFinder):
        def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
            return spec_from_file_location(name, code / "plain.py") if name == "editable" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    assert problem("editable:task") is None
    assert str(problem("editable:tsk")).endswith("; nearest: task")


@pytest.mark.parametrize(
    ("backend", "missing", "expected"),
    [
        ("XLA", "torch", "spec.trainer: the workers need torch, which {python} does not have; install tpu-training"),
        ("Torch", "torch", "spec.trainer: the workers need torch, which"),
        ("XLA", "torch_xla", "spec.trainer.backend: backend XLA needs torch_xla, which {python} does not have;"),
        ("XLASPMD", "torch_xla", "spec.trainer.backend: backend XLASPMD needs torch_xla"),
        ("Torch", "torch_xla", None),
    ],
)
def test_what_the_trainer_computes_with_must_be_installed(
    monkeypatch: pytest.MonkeyPatch, backend: str, missing: str, expected: str | None
) -> None:
    monkeypatch.setattr(
        "tpu_training_operator.cli.code.entrypoint.find_spec",
        lambda name: None if name == missing else ModuleSpec(name, None),
    )
    found = find_problem(Trainer(image="x", entrypoint="json:load", backend=backend), [])
    assert found is None if expected is None else str(found).startswith(expected.format(python=sys.executable))


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python", None),
        ("sh", None),
        ("nonesuch", "spec.trainer.command[0]: there is no program 'nonesuch' on this machine"),
    ],
)
def test_a_command_must_be_a_program(command: str, expected: str | None) -> None:
    found = find_problem(Trainer(image="x", command=[command]), [])
    assert (None if found is None else str(found)) == expected
