"""The versions in docs/install.md are those that the tests run with and the packages ask for."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CHART = "charts/tpu-training-operator/Chart.yaml"
SETUP = r"\(3, (\d+)\) <= sys.version_info\[:2\] <= \(3, (\d+)\)"

# Words at the beginning of a row, what its cells begin with, and where the versions stand that take the place of {}.
REQUIRED = [
    ("Kubernetes", "{} or newer", CHART, r">=(\d+\.\d+)\.0-0"),
    ("kopf", "{} or newer", "pyproject.toml", r'"kopf>=([^"]+)"'),
    ("the client `kubernetes`", "{} or newer", "pyproject.toml", r'"kubernetes>=([^"]+)"'),
    ("Python of the operator", "{} or newer", "pyproject.toml", r'requires-python = ">=([^"]+)"'),
    ("Python of the workers", "3.{} to 3.{}", "scripts/setup", SETUP),
]
TESTED = [
    ("Kubernetes", "{}", "tests/cluster/go/kubernetes/go.mod", r"require k8s\.io/kubernetes v(\S+)"),
    ("helm", "{}", "tests/cluster/go/helm/go.mod", r"require helm\.sh/helm/v4 v(\S+)"),
    ("Python of the operator", "{}", "operator/Dockerfile", r"BASE_IMAGE=python:([0-9.]+)-"),
    ("Python of the workers", "{}", "trainer_image/Dockerfile", r"BASE_IMAGE=python:([0-9.]+)-"),
    ("the client `kubernetes`", "{}", "constraints.txt", r"(?m)^kubernetes==(\S+)"),
    *((package, "{}", "constraints.txt", rf"(?m)^{package}==(\S+)") for package in ("kopf", "torch", "libtpu")),
    ("torch_xla", "{}", "constraints.txt", r"(?m)^torch-xla==(\S+)"),
]


def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("column", "what", "form", "path", "pattern"),
    [*((2, *row) for row in REQUIRED), *((3, *row) for row in TESTED)],
)
def test_the_page_names_the_version(column: int, what: str, form: str, path: str, pattern: str) -> None:
    versions = re.search(pattern, text_of(path))
    assert versions is not None, f"{path} has no {pattern}"
    table = text_of("docs/install.md").partition("\n## Versions\n")[2]
    (row,) = [line for line in table.splitlines() if re.match(rf"\| {re.escape(what)}[ ,]", line)]
    assert re.match(rf"{re.escape(form.format(*versions.groups()))}(?![\w.])", row.split("|")[column].strip())
