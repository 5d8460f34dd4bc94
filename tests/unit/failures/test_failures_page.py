"""docs/failures.md explains every reason of a failure and what to do about it."""

import copy
import re
from datetime import timedelta
from pathlib import Path

import pytest

from tests.unit.ended_pods import ENDED
from tests.unit.pods import NOON, pod, seen
from tests.unit.stuck_pods import STUCK
from tpu_training_operator.api.run_policy import FailureClass, Restart
from tpu_training_operator.domain.failures.first import hang_failure, missing_worker
from tpu_training_operator.domain.failures.table import TABLE
from tpu_training_operator.domain.job.naming import WorkerId
from tpu_training_operator.domain.plan.restarts.waiting import Late, start_failure

PAGE = Path(__file__).parents[3].joinpath("docs/failures.md").read_text(encoding="utf-8")
SECTIONS = {section.partition("\n")[0]: section for section in PAGE.split("\n## ")}


def rows(section: str) -> list[list[str]]:
    """The cells of its table, without the header."""
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def reasons_in_code() -> set[tuple[str, str]]:
    """With their classes. The pods that the table is tested with have one for every row."""
    first, hidden = WorkerId(1, 0, 0), copy.deepcopy(pod())
    del hidden["metadata"]["labels"]
    gone = [missing_worker(first, "digits", trace, NOON) for trace in (None, *seen(hidden))]
    without_a_pod = (*gone, hang_failure(*seen(pod()), "no step", 1, NOON))
    late = Late(*seen(pod()), timedelta(0), NOON)
    without_a_pod += (
        start_failure(late, "", 1, NOON),
        hang_failure(*seen(pod()), "no end", 1, NOON, reason="Straggler"),
    )
    told = {(case.reason, case.failure_class) for case in (*ENDED, *STUCK)}
    fixed = {(row.reason, str(row.failure_class)) for row in TABLE if isinstance(row.reason, str)}
    return told | fixed | {(failure.reason, str(failure.failure_class)) for failure in without_a_pod}


def test_the_page_lists_exactly_the_reasons_of_each_class() -> None:
    documented = {
        (reason, str(failure_class))
        for failure_class in FailureClass
        for row in rows(str(failure_class))
        for reason in re.findall(r"`(\w+)`", row[0])
    }
    assert documented == reasons_in_code()


def test_every_reason_says_what_happened_and_what_to_do() -> None:
    table = [row for failure_class in FailureClass for row in rows(str(failure_class))]
    assert [row for row in table if len(row) != 3 or not all(row)] == []


@pytest.mark.parametrize("failure_class", FailureClass)
def test_the_page_gives_the_default_limits(failure_class: FailureClass) -> None:
    told = {re.sub(r"\[(\w+)\].*", r"\1", row[0]): row[1] for row in rows("Restart limits")}
    limit = Restart().limit_of(failure_class)
    assert told[failure_class] == ("unlimited" if limit is None else str(limit))
