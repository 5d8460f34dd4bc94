"""The shape of the repository, held by tests because nothing else would notice it giving way."""

import operator
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LONGEST_FILE = 600
PRODUCT = {"contract": "tpu_contract", "operator": "tpu_training_operator", "trainer_image": "tpu_trainer"}


def test_the_layers_hold(tmp_path: Path) -> None:
    # A process of its own: import-linter turns off every logger that there is.
    command = [str(Path(sys.prefix) / "bin" / "lint-imports"), "--cache-dir", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize(("root", "package"), PRODUCT.items())
def test_a_source_root_is_no_package_and_holds_one(root: str, package: str) -> None:
    """`operator/__init__.py` would take the place of the standard library's module."""
    assert not (ROOT / root / "__init__.py").exists()
    packages = {path.parent.name for path in (ROOT / root).glob("*/__init__.py")}
    loose = {path.name for path in (ROOT / root).glob("*.py")}
    assert (packages, loose) == ({package}, set())


def test_import_operator_is_the_standard_librarys() -> None:
    assert Path(str(operator.__file__)).parent == Path(sysconfig.get_path("stdlib"))
    assert str(ROOT / "operator") in sys.path, "the test says nothing unless the source root is on the path"


def test_no_file_is_longer_than_one_sitting() -> None:
    files = [path for root in PRODUCT for path in (ROOT / root).rglob("*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert len(files) > 40
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


def test_the_trainer_image_installs_the_packages_that_the_trainer_imports() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    wanted = {re.split("[>=;]", requirement)[0] for requirement in extra["trainer"]} - {"torch", "torch_xla"}
    dockerfile = (ROOT / "trainer_image" / "Dockerfile").read_text(encoding="utf-8")
    [installed] = re.findall(r'"\$@" (.*) \\', dockerfile)
    # What compile-check adds is the builder's choice; uv is started, not imported.
    assert set(installed.split()) - {"$AOT"} == wanted | {"uv"}


def test_the_image_and_the_tests_have_the_same_two_stacks() -> None:
    dockerfile = (ROOT / "trainer_image" / "Dockerfile").read_text(encoding="utf-8")
    for stack, pins in {"torch_xla": "constraints.txt", "torch_tpu": "constraints.torch_tpu.txt"}.items():
        assert f"source={pins},target=/pins/{stack}" in dockerfile
        pinned = set(re.findall(r"^[a-z][^ ]+==[^ ]+", (ROOT / pins).read_text(encoding="utf-8"), re.MULTILINE))
        [torch] = re.findall(rf"{stack}\) set -- \"\$\{{TORCH:-(torch==[0-9.]+)", dockerfile)
        [library] = re.findall(rf"^ARG {stack.upper()}={stack}(?:\[tpu\])?==([0-9.]+)$", dockerfile, re.MULTILINE)
        assert {torch, f"{stack.replace('_', '-')}=={library}"} <= pinned


def test_an_installed_package_has_every_file_that_is_no_module() -> None:
    """The tests run in an editable installation, which has them anyway."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    for root, package in PRODUCT.items():
        folder = ROOT / root / package
        named = {file for pattern in tool["setuptools"]["package-data"][package] for file in folder.glob(pattern)}
        there = {file for file in folder.rglob("*") if file.is_file() and file.suffix != ".py"}
        # Python writes there while the tests run.
        cached = {file for file in there if file.parent.name == "__pycache__"}
        assert there - cached - named == set()


def test_every_module_says_why_it_exists() -> None:
    files = [path for root in PRODUCT for path in (ROOT / root).rglob("*.py")]
    assert [
        str(path.relative_to(ROOT)) for path in files if not path.read_text(encoding="utf-8").startswith('"""')
    ] == []


def test_the_contract_needs_the_standard_library_alone() -> None:
    """It is in both images, and neither has all that the other installs."""
    imports = re.compile(r"^ *(?:from|import) (\w+)", re.MULTILINE)
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "contract").rglob("*.py")]
    assert {name for text in texts for name in imports.findall(text)} <= {*sys.stdlib_module_names, "tpu_contract"}


def test_no_field_is_updated_by_a_name_in_a_string() -> None:
    """`model_copy(update={"atempt": 3})` takes misspelt names and wrong types; `dataclasses.replace` does neither."""
    files = (ROOT / "operator").rglob("*.py")
    assert [str(path) for path in files if "model_copy(" in path.read_text(encoding="utf-8")] == []


def test_contributing_answers_its_questions_with_names_that_exist() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    of_operator, _, of_trainer = (
        guide.partition("### Questions")[2].partition("\n## ")[0].partition("In the trainer, paths are below")
    )
    for root, rows in (("operator", of_operator), ("trainer_image", of_trainer)):
        package = PRODUCT[root]
        answers = re.findall(r"`([a-z_/]+\.py)`(?:: `(\w+)`)?", rows)
        assert len(answers) >= 13
        for path, name in answers:
            source = (ROOT / root / package / path).read_text(encoding="utf-8")
            assert re.search(rf"^ *((async )?def |class )?{name}\b", source, re.MULTILINE), f"{path} has no {name}"


def test_the_list_of_crossings_names_tests_that_exist() -> None:
    tests = ROOT / "tests"
    named = re.findall(r"`(\w+/[\w/]*test_\w+\.py)`", (tests / "README.md").read_text(encoding="utf-8"))
    assert len(named) > 20
    assert [path for path in named if not (tests / path).exists()] == []
