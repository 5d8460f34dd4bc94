"""What a finished run's directory tells its report page: from result.json and the log of who failed first."""

import json
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.unit.histories import document, run_of
from tests.unit.statuses import condition, failure, status
from tpu_training_operator.api.conditions import ConditionType
from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.api.status import Failure
from tpu_training_operator.cli.main import main
from tpu_training_operator.cli.run.job_end import MOST_LINES, RESULT, job_end
from tpu_training_operator.cli.run.run import what_ended
from tpu_training_operator.html_report.ending import JobEnd, JobResult, LogTail

TRACEBACK = "Traceback (most recent call last):\n  File \"/app/train.py\", line 20, in loss\nKeyError: 'label'"
FAILURE = {
    "attempt": 2,
    "pod": "small-2-0-3",
    "slice": 0,
    "host": 3,
    "exitCode": 1,
    "class": "UserError",
    "reason": "UserError",
    "message": TRACEBACK[-40:],
    "time": "2026-11-22T21:06:00Z",
    "step": 4,
}


def ended(directory: Path, log: str | None = None, **changes: Any) -> JobEnd | None:
    given = {"state": "Failed", "message": "", "attempts": 2, "failure": FAILURE, "logs": "/elsewhere/pods"}
    result = given | changes
    (directory / RESULT).write_text(json.dumps(result))
    if log is not None:
        pod = directory / "pods" / result["failure"]["pod"]
        pod.mkdir(parents=True)
        (pod / "log.txt").write_text(log)
    return job_end(directory)


def test_the_log_has_the_whole_traceback_and_the_lines_before_it(tmp_path: Path) -> None:
    lines = [f"batch {number}" for number in range(100)]
    end = ended(tmp_path, "\n".join([*lines, "\x1b[31mred", f"UserError: {TRACEBACK}", ""]))
    assert end == JobEnd(
        JobResult.FAILED,
        cause="UserError",
        where="slice 0 host 3, attempt 2, after step 4: UserError (exit code 1)",
        gist="KeyError: 'label'",
        message=TRACEBACK,
        log=LogTail("pods/small-2-0-3/log.txt", [*lines[-MOST_LINES + 1 :], "red"]),
    )


def test_what_kubernetes_took_from_the_log_is_not_told_twice(tmp_path: Path) -> None:
    message = "the worker was ended by SIGSEGV (exit code 139): step 1\nstep 2"
    end = ended(tmp_path, "step 1\nstep 2\n", failure=FAILURE | {"message": message, "reason": "Crashed"})
    assert (end.message, end.log) == ("", LogTail("pods/small-2-0-3/log.txt", ["step 1", "step 2"]))
    assert end.gist.endswith("; its last line: step 2")


def test_without_a_log_the_failures_own_message_stands(tmp_path: Path) -> None:
    end = ended(tmp_path)
    assert (end.message, end.log) == (FAILURE["message"], None)


def test_a_failure_that_a_restart_has_overcome_is_not_the_end(tmp_path: Path) -> None:
    assert ended(tmp_path, state="Succeeded") == JobEnd(JobResult.SUCCEEDED)


def test_a_job_that_something_else_has_ended_after_a_restart_tells_its_own_message(tmp_path: Path) -> None:
    end = ended(tmp_path, attempts=3, message="rung 2 of 3: no")
    assert end == JobEnd(JobResult.FAILED, gist="rung 2 of 3: no")


OVER = "10.02 of 10 chip-hours (spec.runPolicy.budget) are used"
LOST = replace(failure(2, 60), failure_class=FailureClass.PREEMPTION, message="the node is gone\nfor good", step=4)


@pytest.mark.parametrize(
    ("last", "lines"),
    [
        (None, [OVER]),
        (replace(LOST, attempt=1), [OVER]),
        (LOST, ["Preemption on slice 0 host 0 after 4 steps:", "  the node is gone", "  for good"]),
        (replace(LOST, attempt=0, step=None), [OVER]),
    ],
)
def test_a_run_says_once_what_ended_it(last: Failure | None, lines: list[str]) -> None:
    ready = replace(condition(ConditionType.READY, False, 90, "BudgetExceeded"), message=OVER)
    assert list(what_ended(status(attempt=2, last_failure=last, conditions=[ready]))) == lines


def test_a_job_that_failed_without_a_worker_tells_its_own_message(tmp_path: Path) -> None:
    end = ended(tmp_path, failure=None, message="no start within 5 s")
    assert end == JobEnd(JobResult.FAILED, gist="no start within 5 s")


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"state": "Odd", "failure": null}', '{"state": "Failed", "failure": {"pod": 1}}']
)
def test_what_is_not_a_result_tells_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / RESULT).write_text(content)
    assert job_end(tmp_path) is None


def test_the_page_of_a_directory_shows_how_its_job_ended(tmp_path: Path) -> None:
    lost = {"code": "PeerLost", "message": "a peer went away"}
    (tmp_path / "history.json").write_bytes(document(run_of(4), outcome=lost))
    ended(tmp_path, f"batch 4\nUserError: {TRACEBACK}\n")
    page = tmp_path / "page.html"
    assert CliRunner().invoke(main, ["report", str(tmp_path), "-o", str(page)]).exit_code == 0
    text = unescape(page.read_text(encoding="utf-8"))
    assert all(words in text for words in ("Failed in the task's code", "line 20, in loss", "batch 4", "host 3"))
