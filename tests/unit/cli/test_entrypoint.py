"""Whether a job's code is there, told without running any of it."""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from tpu_training_operator.api.trainer import Trainer
from tpu_training_operator.cli.code.entrypoint import find_problem, find_problem_in, import_warning


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


@pytest.mark.parametrize(("terms", "is_read"), [(2_000, True), (20_000, False)])
def test_an_expression_deeper_than_python_recurses_is_no_traceback(tmp_path: Path, terms: int, is_read: bool) -> None:
    (tmp_path / "deep.py").write_text(f"x = {'+'.join('1' * terms)}\ndef task(): ...\n")
    found = problem("deep:task", tmp_path)
    assert found is None if is_read else "'deep' cannot be read" in (found or "")
    assert import_warning(Trainer(image="x", entrypoint="deep:task"), [tmp_path]) is None


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
        ("XLA", "torch", "spec.trainer: the workers need torch, which {python} does not have; install the"),
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


LOOP = "for epoch in range(3):\n    for x, y in loader:\n        loss(x, y).backward()\n"
TASK = "def task(hp): ...\n"
TRAINING: dict[str, tuple[str, int]] = {
    "a loop": (f"import torch\n{LOOP}", 4),
    "a loop below a task": (f"{TASK}{LOOP}", 4),
    "in a with and a try": ("try:\n    with a() as b:\n        trainer.fit(b)\nfinally:\n    pass\n", 3),
    "a function of the module": ("def go():\n    opt.step()\n\ndef main():\n    go()\n\nmain()\n", 7),
    "its result is kept": ("def train():\n    opt.step()\nhistory = train()\n", 3),
    "a function of another module": ("from engine import train_model\ntrain_model()\n", 2),
    "a launch": ("import torch_xla\ntorch_xla.launch(f)\n", 2),
    "the command line": ("args = parser.parse_args()\n", 1),
    "the other side of a guard": ("if __name__ == '__main__':\n    pass\nelse:\n    trainer.fit(m)\n", 4),
}


@pytest.mark.parametrize(("text", "line"), TRAINING.values(), ids=TRAINING)
def test_a_script_that_its_import_would_train_is_told_with_the_line(tmp_path: Path, text: str, line: int) -> None:
    (tmp_path / "script.py").write_text(text)
    trainer = Trainer(image="x", entrypoint="script:task")
    quoted = f"line {line} ({text.splitlines()[line - 1].strip()})"
    assert f"imports script.py, which executes {quoted}" in (import_warning(trainer, [tmp_path]) or "")
    problem = find_problem_in(trainer, tmp_path)
    assert (problem is None) is (TASK in text)
    if problem is not None:
        assert f"has no 'task', and its import would train on every chip, as it executes {quoted}" in str(problem)
        assert "[python, script.py]" in str(problem)


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        (
            "def main():\n    args = parser.parse_args()\nif __name__ == '__main__':\n    main()\n",
            "args = parser.parse_",
        ),
        ("def step():\n    loss.backward()\ndef main():\n    for _ in data:\n        step()\n", "step()"),
        ("def main():\n    def loss(model, batch):\n        model.backward()\n    scaler.fit(data)\n", ""),
        ("class main:\n    def __init__(self):\n        parser.parse_args()\n", ""),
    ],
)
def test_an_entrypoint_that_would_itself_train_is_told_with_the_line(tmp_path: Path, text: str, quoted: str) -> None:
    (tmp_path / "script.py").write_text(text)
    told = import_warning(Trainer(image="x", entrypoint="script:main"), [tmp_path]) or ""
    assert ("calls main, which executes line" in told and f"({quoted}" in told) == bool(quoted), told


def test_a_script_is_told_from_a_module_with_a_wrong_name(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("def taks(): ...\nif __name__ == '__main__':\n    main()\n")
    said = {
        name: str(find_problem_in(Trainer(image="x", entrypoint=f"script:{name}"), tmp_path)) for name in ("task", "go")
    }
    assert said["task"].endswith("has no 'task'; nearest: taks")
    assert "it is a script. Make a task of it (docs/from-train-py.md)" in said["go"]


@pytest.mark.parametrize(
    "text",
    [
        f"{TASK}train, held_out = train_test_split(data)\n",
        f"{TASK}if __name__ == '__main__':\n    main()\n",
        f"{TASK}if '__main__' == __name__ and True:\n    trainer.fit(model)\n",
        f"{TASK}import logging, torch\nlogging.basicConfig()\ntorch.manual_seed(0)\n",
        f"{TASK}def build():\n    return 1\nTABLE = build()\nfor name in ('a', 'b'):\n    TABLE += name\n",
        f"{TASK}class Model:\n    def fit(self):\n        loss.backward()\n",
        f"{TASK}def again():\n    return again()\nagain()\n",
        f"{TASK}later = lambda: trainer.fit(model)\n",
        "def task(hp:\n",
        "def task(hp): '\0'\n",
    ],
)
def test_a_module_that_trains_nothing_by_its_import_has_no_warning(tmp_path: Path, text: str) -> None:
    (tmp_path / "script.py").write_text(text)
    assert import_warning(Trainer(image="x", entrypoint="script:task"), [tmp_path]) is None


@pytest.mark.parametrize(
    ("text", "is_certain"),
    [
        ("if fast:\n    task = 1\n", False),
        ("with open('f') as task:\n    pass\n", False),
        ("def f():\n    global task\n    task = 1\n", False),
        ("globals()['task'] = 1\n", False),
        ("def __getattr__(name): ...\n", False),
        ("if __name__ == '__main__':\n    task = 1\n", True),
        ("for name in names:\n    def tusk(): ...\n", True),
    ],
)
def test_a_name_is_missing_only_if_no_statement_can_define_it(tmp_path: Path, text: str, is_certain: bool) -> None:
    (tmp_path / "script.py").write_text(text)
    problem = find_problem_in(Trainer(image="x", entrypoint="script:task"), tmp_path)
    assert (problem is not None) is is_certain


def test_only_the_folder_and_a_module_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text(LOOP)
    (tmp_path / "train.py").write_text(LOOP)
    for trainer in (Trainer(image="x", command=["python", "train.py"]), Trainer(image="x", entrypoint="json:tool")):
        assert (find_problem_in(trainer, tmp_path), import_warning(trainer, [tmp_path])) == (None, None)
    assert "__init__.py" in (import_warning(Trainer(image="x", entrypoint="package:task"), [tmp_path]) or "")
