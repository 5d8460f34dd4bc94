"""The workflows of a public CI: linted, harmless, and honest about never having run."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.helm import REPOSITORY
from tests.cluster import binaries

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*"))
each = pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)


def read(workflow: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(workflow.read_text()))


def test_actionlint_finds_nothing() -> None:
    actionlint = binaries.ensure("actionlint")["actionlint"]
    # Without what else it would call, shellcheck and pyflakes, which differ from machine to machine.
    alone = ("-shellcheck=", "-pyflakes=", "-no-color")
    done = subprocess.run(
        [str(actionlint), *alone, *map(str, WORKFLOWS)], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_there_are_one_for_tests_and_one_for_releases() -> None:
    assert [path.name for path in WORKFLOWS] == ["release.yaml", "test.yaml"]


@each
def test_it_says_that_it_has_never_run(workflow: Path) -> None:
    assert workflow.read_text().startswith("# Never run: ")


@each
def test_every_action_is_pinned_by_commit(workflow: Path) -> None:
    used = re.findall(r"uses: +(\S+)(.*)", workflow.read_text())
    loose = [
        action
        for action, comment in used
        if not action.startswith("./") and not (re.search(r"@[0-9a-f]{40}$", action) and re.search(r"# v\d", comment))
    ]
    assert used
    assert loose == []


@each
def test_it_may_only_read_except_where_a_release_is_published(workflow: Path) -> None:
    content = read(workflow)
    assert content["permissions"] == {"contents": "read"}
    more = {name: job["permissions"] for name, job in content["jobs"].items() if "permissions" in job}
    assert more == ({"publish": {"contents": "write"}} if workflow.name == "release.yaml" else {})


@each
def test_whoever_opens_a_pull_request_puts_no_words_into_a_script(workflow: Path) -> None:
    """Expressions reach scripts as environment variables only, and no checkout leaves its token behind."""
    jobs = read(workflow)["jobs"].values()
    steps = [step for job in jobs for step in job.get("steps", ())]
    assert [step["run"] for step in steps if "${{" in step.get("run", "")] == []
    checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]
    assert [step["with"]["persist-credentials"] for step in checkouts] == [False] * len(checkouts)


def test_what_can_write_runs_nothing_of_the_repository() -> None:
    publish = read(REPOSITORY / ".github" / "workflows" / "release.yaml")["jobs"]["publish"]
    assert not [step for step in publish["steps"] if "checkout" in step.get("uses", "")]


def test_a_release_needs_the_tests() -> None:
    jobs = read(REPOSITORY / ".github" / "workflows" / "release.yaml")["jobs"]
    assert jobs["test"]["uses"] == "./.github/workflows/test.yaml"
    assert (jobs["build"]["needs"], jobs["publish"]["needs"]) == ("test", "build")
