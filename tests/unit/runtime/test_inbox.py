"""What an operator remembers of what workers said, and what it asks them for."""

from datetime import timedelta
from typing import Any

import pytest

from tests.unit.pods import NOON
from tpu_contract.protocol import ReportPhase
from tpu_training_operator.domain.cluster_state.worker_reports import Inbox, WorkerReport
from tpu_training_operator.kube.cluster import JobKey
from tpu_training_operator.runtime import inbox as module
from tpu_training_operator.runtime.inbox import Inboxes

KEY = JobKey("default", "digits")
STACKS = "Thread 1: in step"


def said(step: int = 10, phase: ReportPhase = ReportPhase.TRAINING, attempt: int = 1, **fields: Any) -> WorkerReport:
    return WorkerReport(attempt, "uid", NOON, phase, step, **fields)


@pytest.fixture
def inboxes() -> Inboxes:
    return Inboxes(lambda: NOON)


def test_a_job_without_reports_has_been_listened_to_since_the_start() -> None:
    now = NOON
    inboxes = Inboxes(lambda: now)
    now += timedelta(hours=1)
    assert inboxes.of(KEY) == Inbox(listening_since=NOON)


def test_the_last_report_is_kept(inboxes: Inboxes) -> None:
    for step in (1, 2, 3):
        inboxes.put(KEY, said(step))
    assert inboxes.of(KEY).report == said(3)


def test_only_a_later_attempt_replaces_a_report(inboxes: Inboxes) -> None:
    inboxes.put(KEY, said(attempt=2))
    inboxes.put(KEY, said(attempt=1))
    assert inboxes.of(KEY).report == said(attempt=2)
    inboxes.put(KEY, said(attempt=3))
    assert inboxes.of(KEY).report == said(attempt=3)


def test_stacks_are_wanted_until_they_arrive(inboxes: Inboxes) -> None:
    inboxes.put(KEY, said())
    assert not inboxes.wants_stacks(KEY)
    inboxes.ask_for_stacks(KEY)
    assert inboxes.wants_stacks(KEY)
    inboxes.put(KEY, said(stacks=STACKS))
    assert not inboxes.wants_stacks(KEY)


def test_stacks_are_kept_while_the_gang_makes_no_progress(inboxes: Inboxes) -> None:
    inboxes.put(KEY, said())
    inboxes.ask_for_stacks(KEY)
    inboxes.put(KEY, said(stacks=STACKS))
    inboxes.put(KEY, said())
    assert inboxes.of(KEY).report == said(stacks=STACKS)


@pytest.mark.parametrize(
    "goes_on", [said(11), said(phase=ReportPhase.EVALUATING), said(attempt=2), said(11, stacks=STACKS)], ids=str
)
def test_progress_drops_the_stacks_so_the_next_hang_asks_again(inboxes: Inboxes, goes_on: WorkerReport) -> None:
    inboxes.put(KEY, said())
    inboxes.ask_for_stacks(KEY)
    inboxes.put(KEY, said(stacks=STACKS))
    inboxes.put(KEY, goes_on)
    inbox = inboxes.of(KEY)
    assert inbox.asked_for_stacks is None
    assert inbox.report.stacks is None


def test_asking_twice_does_not_extend_the_wait() -> None:
    now = NOON
    inboxes = Inboxes(lambda: now)
    inboxes.ask_for_stacks(KEY)
    now += timedelta(seconds=10)
    inboxes.ask_for_stacks(KEY)
    assert inboxes.of(KEY).asked_for_stacks == NOON


def test_a_lost_report_is_noted_for_its_own_job_only() -> None:
    now = NOON
    inboxes = Inboxes(lambda: now)
    inboxes.put(KEY, said())
    now += timedelta(hours=1)
    inboxes.note_loss(KEY)
    assert inboxes.of(KEY) == Inbox(listening_since=NOON, last_loss=now, report=said())
    assert inboxes.of(JobKey("default", "letters")) == Inbox(listening_since=NOON)


def test_only_the_latest_jobs_with_lost_reports_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_LOSSES", 2)
    inboxes = Inboxes(lambda: NOON)
    for name in ("a", "b", "a", "c"):
        inboxes.note_loss(JobKey("default", name))
    assert [inboxes.of(JobKey("default", name)).last_loss for name in "abc"] == [NOON, None, NOON]


def test_forgotten_jobs_take_no_room(inboxes: Inboxes) -> None:
    keys = [JobKey("default", f"digits-{number}") for number in range(1000)]
    for key in keys:
        inboxes.put(key, said())
    assert inboxes.between_writes > timedelta(seconds=5)
    for key in keys:
        inboxes.forget(key)
    assert inboxes.between_writes == timedelta(seconds=5)
    assert inboxes.of(keys[0]) == Inbox(listening_since=NOON)
