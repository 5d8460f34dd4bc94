"""docs/command.md lists exactly the variables that a user's own loop receives."""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from tests.contract.jobs import KINDS_OF_JOBS, stored_job
from tests.contract.pods import REPORTING, worker_environments
from tpu_contract.protocol import ENV_REPORT_DIRECTORY

PAGE = Path(__file__).parents[2].joinpath("docs", "command.md").read_text(encoding="utf-8")
[SECTION] = re.findall(r"^## What each host receives\n(.*?)^## ", PAGE, re.DOTALL | re.MULTILINE)
# `TPUJOB_PROGRESS_*` stands for all that begin so.
NAMES = [
    name
    for line in SECTION.splitlines()
    if line.startswith("| `")
    for name in re.findall(r"`([^`]+)`", line.split("|")[1])
]

OWN_LOOP = {"trainer.entrypoint": ..., "trainer.command": ["python", "train.py"]}
# A report and Lightning's Trainer are for an entrypoint.
KINDS = {
    kind: OWN_LOOP | changes
    for kind, changes in KINDS_OF_JOBS.items()
    if not changes.keys() & {"report", "trainer.loop"}
}
LOCAL = {ENV_REPORT_DIRECTORY}


def variables(changes: Mapping[str, Any]) -> set[str]:
    """Of worker 0, which is told the most."""
    (first, *_) = worker_environments(stored_job(changes), REPORTING)
    return set(first)


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS.keys())
def test_every_variable_is_on_the_page(changes: Mapping[str, Any]) -> None:
    assert {each for each in variables(changes) if not any(fnmatchcase(each, name) for name in NAMES)} == set()


def test_the_page_promises_no_other() -> None:
    given = LOCAL.union(*(variables(changes) for changes in KINDS.values()))
    assert [name for name in NAMES if not any(fnmatchcase(each, name) for each in given)] == []
    assert len(NAMES) == len(set(NAMES)) > 30
