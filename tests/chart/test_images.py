"""What goes into the two images: the tested versions, nothing that runs as root, one version everywhere."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.chart.helm import REPOSITORY, declared
from tpu_training_operator.version import DECLARED, tag

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
FOLDERS = ("operator", "trainer_image", "trainer_image/extras", "examples")
DOCKERFILES = {folder: (REPOSITORY / folder / "Dockerfile").read_text() for folder in FOLDERS}
ON_A_BASE = ("operator", "trainer_image")


def requirements(path: Path) -> dict[str, str]:
    """Name -> its whole entry: pin, marker, hashes."""
    entries = re.split(r"\n(?=[a-z0-9])", path.read_text().strip())
    return {entry.partition("==")[0]: entry for entry in entries}


def instructions(dockerfile: str, name: str) -> list[str]:
    """The arguments of each `name` instruction, in order."""
    joined = dockerfile.replace("\\\n", " ")
    return re.findall(rf"^{name} +(.+?) *$", joined, re.MULTILINE)


def test_chart_and_package_declare_one_version() -> None:
    assert {declared()["version"], declared()["appVersion"]} == {tag(DECLARED)}


def test_the_operator_image_installs_what_the_tests_ran_with() -> None:
    pinned = requirements(REPOSITORY / "constraints.txt")
    for name, entry in requirements(REPOSITORY / "operator" / "requirements.txt").items():
        assert entry == pinned[name], "`make lock` writes both"


def test_the_operator_image_installs_every_dependency() -> None:
    wanted = {re.split(r"[^a-z0-9-]", dependency)[0] for dependency in PROJECT["dependencies"]}
    # In a pod there is no kubeconfig to read.
    assert wanted - {"kubernetes"} <= requirements(REPOSITORY / "operator" / "requirements.txt").keys()


def test_the_operator_image_holds_no_torch_and_no_kubeconfig_reader() -> None:
    assert (
        not {"kubernetes", "torch", "torch-xla", "numpy"}
        & requirements(REPOSITORY / "operator" / "requirements.txt").keys()
    )


def test_the_trainer_image_installs_the_torch_of_the_tests() -> None:
    arguments = instructions(DOCKERFILES["trainer_image"], "ARG")
    chosen = " ".join(instructions(DOCKERFILES["trainer_image"], "RUN"))
    tested = {dependency.partition(";")[0] for dependency in PROJECT["optional-dependencies"]["trainer"]}
    assert {dependency for dependency in tested if re.match("torch==", dependency)} == {
        re.search(r"torch_xla\) set -- \S*(torch==[\d.]+)", chosen)[1]
    }
    assert {dependency for dependency in tested if re.match("torch_xla==", dependency)} == {
        argument.partition("=")[2].replace("[tpu]", "") for argument in arguments if "TORCH_XLA" in argument
    }


def test_the_examples_image_installs_what_the_examples_import() -> None:
    installed = " ".join(instructions(DOCKERFILES["examples"], "RUN"))
    wanted = {re.split(r"[^a-z-]", name)[0] for name in PROJECT["optional-dependencies"]["examples"]}
    assert {name for name in wanted if f" {name} " not in installed} == set()


def test_the_extras_are_locked_in_the_versions_of_the_tests_wherever_both_have_a_package() -> None:
    locked, tested = (
        {(name, re.split(r"[ \\]", entry)[0]) for name, entry in requirements(REPOSITORY / path).items()}
        for path in ("constraints.extras.txt", "constraints.txt")
    )
    shared = {name for name, _ in locked} & {name for name, _ in tested}
    assert {"torch", "transformers", "torchmetrics"} <= shared
    assert {one for one in locked if one[0] in shared} <= tested


def test_the_extras_image_installs_its_lock_with_hashes_and_leaves_torch_alone(tmp_path: Path) -> None:
    lock = (REPOSITORY / "constraints.extras.txt").read_text()
    (tmp_path / "constraints.txt").write_text(lock)
    install, check = instructions(DOCKERFILES["trainer_image/extras"], "RUN")
    [filtered] = re.findall(r"(awk '.*?' )/constraints.txt", install)
    command = f"{filtered} constraints.txt >packages.txt"
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    kept, left = requirements(tmp_path / "packages.txt"), requirements(tmp_path / "constraints.txt")
    assert {name for name in left.keys() - kept.keys() if not name.startswith("nvidia-")} == {
        "torch",
        "torch-xla",
        "triton",
    }
    assert all(entry == left[name] and " --hash=sha256:" in entry for name, entry in kept.items())
    assert "--no-deps --require-hashes" in install
    wanted = {
        line for line in (REPOSITORY / "trainer_image/extras/packages.txt").read_text().splitlines() if line[0] != "#"
    }
    assert wanted <= kept.keys()
    assert set(re.findall(r"[\w]+", check.partition('"import ')[2])) == wanted


def test_the_jobs_of_the_examples_use_the_image_that_make_builds() -> None:
    jobs = [yaml.safe_load(path.read_text()) for path in sorted((REPOSITORY / "examples").glob("*.yaml"))]
    makefile = (REPOSITORY / "Makefile").read_text()
    images = {job["spec"]["trainer"]["image"] for job in jobs if job["metadata"].get("namespace") != "research"}
    assert images == {"localhost/tpu-examples:1"}
    assert "REGISTRY ?= localhost\n" in makefile
    assert "-t $(REGISTRY)/tpu-examples:1 " in makefile


@pytest.mark.parametrize("folder", ON_A_BASE)
def test_an_image_holds_bytecode_of_the_standard_library_and_of_our_package(folder: str) -> None:
    compiled = [line for line in instructions(DOCKERFILES[folder], "RUN") if "compileall" in line]
    assert any('get_path("stdlib")' in line for line in compiled)
    assert any("$packages/" in line for line in compiled)


@pytest.mark.parametrize("folder", DOCKERFILES)
def test_an_image_runs_as_a_user_that_kubernetes_can_tell_is_not_root(folder: str) -> None:
    # runAsNonRoot refuses an image whose user is a name.
    assert instructions(DOCKERFILES[folder], "USER")[-1] == "65532:65532"


@pytest.mark.parametrize("folder", ON_A_BASE)
def test_an_image_can_be_built_on_any_base(folder: str) -> None:
    assert instructions(DOCKERFILES[folder], "ARG")[0] == "BASE_IMAGE=python:3.11-slim"
    bases = {base.partition(" ")[0] for base in instructions(DOCKERFILES[folder], "FROM")}
    assert bases == {"${BASE_IMAGE}"}


@pytest.mark.parametrize("folder", DOCKERFILES)
def test_an_image_copies_only_what_the_context_holds(folder: str) -> None:
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    let_in = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    copies = [copy.split() for copy in instructions(DOCKERFILES[folder], "COPY") if not copy.startswith("--from")]
    sources = [words[0] for words in copies] + re.findall(r"source=([^,\s]+)", DOCKERFILES[folder])
    assert sources
    for source in sources:
        assert (REPOSITORY / source).exists(), source
        assert source.partition("/")[0] in let_in, source
