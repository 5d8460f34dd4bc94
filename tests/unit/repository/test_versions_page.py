"""The versions in docs/install.md are those that the tests run with and the packages ask for."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")


def documented() -> dict[str, tuple[str, str]]:
    """What is required and what is tested, by the first words of a row."""
    section = (ROOT / "docs" / "install.md").read_text(encoding="utf-8").partition("\n## Versions\n")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {name.partition(",")[0]: (required, tested) for name, required, tested in rows[2:]}


def pinned(package: str) -> str:
    (version,) = re.findall(rf"^{package}==([^ ]+)", CONSTRAINTS, re.MULTILINE)
    return str(version)


def built(module: str, requirement: str) -> str:
    """The version of a program of the test cluster."""
    text = (ROOT / "tests" / "cluster" / "go" / module / "go.mod").read_text(encoding="utf-8")
    (version,) = re.findall(rf"require {re.escape(requirement)} v(\S+)", text)
    return str(version)


def required(package: str) -> str:
    (version,) = [one.partition(">=")[2] for one in PROJECT["dependencies"] if one.startswith(f"{package}>=")]
    return str(version)


@pytest.mark.parametrize(
    ("what", "version"),
    [
        ("Kubernetes", built("kubernetes", "k8s.io/kubernetes")),
        ("helm", built("helm", "helm.sh/helm/v4")),
        ("kopf", pinned("kopf")),
        ("the client `kubernetes`", pinned("kubernetes")),
        ("torch", pinned("torch")),
        ("torch_xla", pinned("torch-xla")),
        ("libtpu", pinned("libtpu")),
    ],
)
def test_the_tested_version_is_the_pinned_one(what: str, version: str) -> None:
    assert re.match(rf"{re.escape(version)}\b", documented()[what][1])


@pytest.mark.parametrize("image", ["operator", "trainer_image"])
def test_the_tested_python_is_the_one_of_the_images(image: str) -> None:
    base = re.search(r"BASE_IMAGE=python:([0-9.]+)-", (ROOT / image / "Dockerfile").read_text(encoding="utf-8"))
    assert base is not None
    tested = {what: tested for what, (_, tested) in documented().items() if what.startswith("Python")}
    assert set(tested.values()) == {base[1]}


@pytest.mark.parametrize(
    ("what", "version"), [("kopf", required("kopf")), ("the client `kubernetes`", required("kubernetes"))]
)
def test_the_required_version_is_the_one_that_the_package_asks_for(what: str, version: str) -> None:
    assert documented()[what][0] == f"{version} or newer"


def test_the_required_kubernetes_is_the_one_that_the_chart_asks_for() -> None:
    chart = yaml.safe_load((ROOT / "charts" / "tpu-training-operator" / "Chart.yaml").read_text(encoding="utf-8"))
    (wanted,) = re.findall(r"^>=(\d+\.\d+)\.0-0$", chart["kubeVersion"])
    assert documented()["Kubernetes"][0] == f"{wanted} or newer"


def test_the_required_pythons_are_those_of_package_and_setup() -> None:
    table = documented()
    assert f">={table['Python of the operator and `tpujob`'][0].split()[0]}" == PROJECT["requires-python"]
    first, last = re.findall(r"3\.\d+", table["Python of the workers"][0])
    setup = (ROOT / "scripts" / "setup").read_text(encoding="utf-8")
    low, high = (tuple(map(int, version.split("."))) for version in (first, last))
    assert f"{low} <= sys.version_info[:2] <= {high}" in setup
