"""How the page shows the end of a run: the verdict, and, after a failure, the error, the log and nothing empty."""

from dataclasses import replace
from html import unescape
from typing import Any

import pytest

from tests.unit.histories import SUCCEEDED, attempt, history, page_of, run_of
from tpu_training_operator.html_report.ending import Badge, JobEnd, JobResult, LogTail, badge

FINITE, BROKEN = run_of(20), run_of(20, broken=(19, 20))
RECOVERED = run_of(20, broken=(7, 8))
WARNED = {"name": "warning", "tunedOn": "", "runsOn": "", "rule": "the training makes 75 updates"}
WHERE, GIST = "slice 0 host 2: UserError (exit code 1)", "KeyError: 'label' (train.py:20)"
FAILED = JobEnd(JobResult.FAILED, "UserError", WHERE, GIST)
PEER_LOST = {"code": "PeerLost", "message": "the connection to a peer was lost"}
TRACEBACK = "Traceback (most recent call last):\n  File \"train.py\", line 20, in loss\nKeyError: 'label'"


@pytest.mark.parametrize(
    ("recorded", "outcome", "end", "kind", "words"),
    [
        (FINITE, SUCCEEDED, None, "well", "Succeeded"),
        (RECOVERED, SUCCEEDED, None, "well", "Succeeded"),
        (BROKEN, SUCCEEDED, None, "bad", "Succeeded, loss not finite"),
        (BROKEN, SUCCEEDED, JobEnd(JobResult.SUCCEEDED), "bad", "Succeeded, loss not finite"),
        ({}, SUCCEEDED, None, "well", "Succeeded"),
        (FINITE, None, None, "running", "Running"),
        (BROKEN, None, None, "bad", "Running, loss not finite"),
        (FINITE, {"code": "Preempted", "message": "stopped"}, None, "pause", "Stopped on request"),
        (FINITE, PEER_LOST, None, "bad", "Lost a peer"),
        (FINITE, PEER_LOST, FAILED, "bad", "Failed in the task's code"),
        (FINITE, None, FAILED, "bad", "Failed in the task's code"),
        (FINITE, None, JobEnd(JobResult.FAILED, "Crashed"), "bad", "Failed"),
        (FINITE, SUCCEEDED, JobEnd(JobResult.FAILED, "Succeeded"), "bad", "Failed"),
        (FINITE, None, JobEnd(JobResult.CANCELLED), "pause", "Cancelled"),
        (FINITE, None, JobEnd(JobResult.SUCCEEDED), "well", "Succeeded"),
        (FINITE, {"code": "OfTheFuture", "message": ""}, None, "bad", "OfTheFuture"),
    ],
)
def test_the_verdict_is_the_jobs_and_never_good_without_a_finite_loss(
    recorded: Any, outcome: Any, end: JobEnd | None, kind: str, words: str
) -> None:
    assert badge(history(recorded, outcome=outcome), end) == Badge(kind, words)


def test_a_failure_elsewhere_is_told_with_its_worker_its_traceback_and_its_log() -> None:
    end = replace(FAILED, message=TRACEBACK, log=LogTail("pods/a-1-0-2/log.txt", ["b", "c"]))
    page = unescape(page_of(FINITE, end, outcome=PEER_LOST))
    assert f"<b>{GIST}</b>" in page
    assert WHERE in page
    assert f'aria-label="Error message">{TRACEBACK}</pre>' in page
    assert 'pods/a-1-0-2/log.txt">b\nc</pre>' in page
    assert PEER_LOST["message"] not in page


def test_without_the_job_a_traceback_is_told_with_its_last_line_first() -> None:
    page = unescape(page_of(outcome={"code": "UserError", "message": TRACEBACK}))
    assert page.index("<b>KeyError: 'label'</b>") < page.index("What went wrong") < page.index("line 20, in loss")


def test_a_long_message_of_one_line_is_told_once_and_its_first_sentence_stands_out() -> None:
    page = page_of(FINITE, outcome={"code": "NotFinite", "message": "the loss is nan. What helps: a lower rate"})
    assert "<b>the loss is nan.</b> What " in page
    assert "a lower rate" in page
    assert page.count("What helps") == 1
    assert "What went wrong" not in page


def test_a_failure_before_the_first_step_has_no_empty_sections() -> None:
    page = page_of({"attempts": [attempt(1, 0, 0, "UserError")]}, outcome={"code": "UserError", "message": TRACEBACK})
    sections = ("failure", "numbers", "recipe", "environment")
    assert [part.partition('"')[0] for part in page.split('<section id="')[1:]] == list(sections)


def test_of_a_failed_run_nobody_says_that_there_was_no_problem() -> None:
    assert "no problems" in page_of(FINITE, outcome=SUCCEEDED)
    assert "no problems" not in page_of(FINITE, outcome=SUCCEEDED, spec={"scaling": [WARNED]})
    assert "no problems" not in page_of(FINITE, outcome=PEER_LOST)
    assert "no problems" not in page_of(FINITE, FAILED)


def test_a_success_says_its_metrics_in_the_key_numbers_only() -> None:
    evaluations = [{"step": 20, "metrics": {"clean/f1": 0.5, "a+b": 1e-9}}]
    message = "trained 20 steps, loss 0.35, clean/f1 0.5, a+b 1e-09; 2 steps skipped, because loss was not finite"
    page = page_of(FINITE | {"evaluations": evaluations}, outcome={"code": "Succeeded", "message": message})
    assert ">trained 20 steps; 2 steps " in page


def test_a_loss_that_is_not_finite_is_no_number_and_keeps_the_last_one_that_was() -> None:
    page = page_of(BROKEN)
    assert '"bad">not finite<small>0.' in page
    assert "at step 18</small>" in page
    nothing = page_of(run_of(3, broken=(1, 2, 3)))
    assert "The loss of 3 steps was NaN" in nothing
    assert "Loss over steps" not in nothing
