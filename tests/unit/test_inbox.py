"""What an operator remembers of what workers said, and what it asks them for."""

from datetime import timedelta
from typing import Any

import pytest

from tests.unit.pods import NOON
from tpu_training_operator.api.status import ReportPhase
from tpu_training_operator.domain.report import Inbox, Report
from tpu_training_operator.kube.cluster import JobKey
from tpu_training_operator.runtime import inbox as module
from tpu_training_operator.runtime.inbox import Inboxes

KEY = JobKey("default", "digits")
STACKS = "Thread 1: in step"


def said(step: int = 10, phase: ReportPhase = ReportPhase.TRAINING, attempt: int = 1, **fields: Any) -> Report:
    return Report(attempt, "uid", NOON, phase, step, **fields)


@pytest.fixture
def inboxes() -> Inboxes:
    return Inboxes(lambda: NOON)


def test_a_job_that_was_never_heard_is_listened_to_since_the_beginning() -> None:
    now = NOON
    inboxes = Inboxes(lambda: now)
    now += timedelta(hours=1)
    assert inboxes.of(KEY) == Inbox(listening_since=NOON)


def test_the_last_report_is_kept(inboxes: Inboxes) -> None:
    for step in (1, 2, 3):
        inboxes.put(KEY, said(step))
    assert inboxes.of(KEY).report == said(3)


def test_a_later_attempt_replaces_an_earlier_one_and_never_the_other_way_round(inboxes: Inboxes) -> None:
    inboxes.put(KEY, said(attempt=2))
    inboxes.put(KEY, said(attempt=1))
    assert inboxes.of(KEY).report == said(attempt=2)
    inboxes.put(KEY, said(attempt=3))
    assert inboxes.of(KEY).report == said(attempt=3)


def test_stacks_are_wanted_from_when_they_are_asked_for_until_they_come(inboxes: Inboxes) -> None:
    inboxes.put(KEY, said())
    assert not inboxes.wants_stacks(KEY)
    inboxes.ask_for_stacks(KEY)
    assert inboxes.wants_stacks(KEY)
    inboxes.put(KEY, said(stacks=STACKS))
    assert not inboxes.wants_stacks(KEY)


def test_stacks_are_kept_while_the_gang_stands_still(inboxes: Inboxes) -> None:
    inboxes.put(KEY, said())
    inboxes.ask_for_stacks(KEY)
    inboxes.put(KEY, said(stacks=STACKS))
    inboxes.put(KEY, said())
    assert inboxes.of(KEY).report == said(stacks=STACKS)


@pytest.mark.parametrize(
    "goes_on", [said(11), said(phase=ReportPhase.EVALUATING), said(attempt=2), said(11, stacks=STACKS)], ids=str
)
def test_a_gang_that_goes_on_is_asked_anew_when_it_stands_still_again(inboxes: Inboxes, goes_on: Report) -> None:
    inboxes.put(KEY, said())
    inboxes.ask_for_stacks(KEY)
    inboxes.put(KEY, said(stacks=STACKS))
    inboxes.put(KEY, goes_on)
    inbox = inboxes.of(KEY)
    assert inbox.asked_for_stacks is None
    assert inbox.report is not None
    assert inbox.report.stacks is None


def test_to_ask_twice_does_not_put_off_the_answer() -> None:
    now = NOON
    inboxes = Inboxes(lambda: now)
    inboxes.ask_for_stacks(KEY)
    now += timedelta(seconds=10)
    inboxes.ask_for_stacks(KEY)
    assert inboxes.of(KEY).asked_for_stacks == NOON


def test_a_report_that_could_not_be_heard_is_noted_for_its_job_alone() -> None:
    now = NOON
    inboxes = Inboxes(lambda: now)
    inboxes.put(KEY, said())
    now += timedelta(hours=1)
    inboxes.could_not_listen(KEY)
    assert inboxes.of(KEY) == Inbox(listening_since=NOON, unheard=now, report=said())
    assert inboxes.of(JobKey("default", "letters")) == Inbox(listening_since=NOON)


def test_of_the_jobs_that_could_not_be_heard_only_the_latest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_UNHEARD", 2)
    inboxes = Inboxes(lambda: NOON)
    for name in ("a", "b", "a", "c"):
        inboxes.could_not_listen(JobKey("default", name))
    assert [inboxes.of(JobKey("default", name)).unheard for name in "abc"] == [NOON, None, NOON]


def test_what_is_forgotten_takes_no_room(inboxes: Inboxes) -> None:
    keys = [JobKey("default", f"digits-{number}") for number in range(1000)]
    for key in keys:
        inboxes.put(key, said())
    assert inboxes.between_writes > timedelta(seconds=5)
    for key in keys:
        inboxes.forget(key)
    assert inboxes.between_writes == timedelta(seconds=5)
    assert inboxes.of(keys[0]) == Inbox(listening_since=NOON)
