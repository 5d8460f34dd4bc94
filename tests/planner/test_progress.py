"""What the status shows from the workers' reports, and how often a report causes a write."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner import kubelet
from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import Operator, look, one_pass
from tests.planner.story import fails, given_a_running_gang, is_seen_to_fail, later, passes, some_passes, suspend
from tests.unit.pods import at, time_at
from tpu_contract.protocol import ReportPhase
from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.api.status import Activity, BestCheckpoint, Progress, State, Status
from tpu_training_operator.domain.cluster_state.observed import format_time
from tpu_training_operator.domain.cluster_state.worker_reports import WorkerReport
from tpu_training_operator.domain.plan.common.progress import apply_report, carry_over
from tpu_training_operator.domain.plan.plan import Plan

TWICE = {"spec.runPolicy": {"restart": {"limits": [{"class": "Infrastructure", "max": 1}]}}}


def given_a_gang_that_reported(step: int, checkpoint: int | None = None, changes: Any = None) -> ModelCluster:
    cluster = given_a_running_gang(changes, listens=True)
    passes(cluster, 10)
    reports(cluster, step, checkpoint_step=checkpoint)
    return cluster


def reports(cluster: ModelCluster, step: int, phase: ReportPhase = ReportPhase.TRAINING, **fields: Any) -> Plan:
    kubelet.report(cluster, step, phase, **fields)
    return one_pass(cluster)


def restart(cluster: ModelCluster) -> None:
    """A worker is killed, and the next attempt runs."""
    fails(cluster, f"digits-{cluster.status.attempt}-0-1")
    runs_again(cluster)


def runs_again(cluster: ModelCluster) -> None:
    some_passes(cluster, 3, seconds=300)
    for pod in cluster.pods.values():
        kubelet.make_ready(cluster, pod)
    one_pass(cluster)
    assert cluster.status.state is State.RUNNING


def progress(cluster: ModelCluster) -> Progress:
    shown = cluster.status.progress
    assert shown is not None
    return shown


def test_a_report_is_shown_unchanged() -> None:
    cluster = given_a_running_gang(listens=True)
    passes(cluster, 10)
    said = {
        "total_steps": 400,
        "examples_per_second": "512.5",
        "loss": "0.25",
        "metrics": {"accuracy": "0.9"},
        "checkpoint_step": 80,
        "estimated_remaining_seconds": 77,
    }
    reports(cluster, 100, warnings=("slow input",), **said)
    times = dict.fromkeys(("last_report_time", "last_advance_time"), format_time(cluster.now))
    assert progress(cluster) == Progress(phase=ReportPhase.TRAINING, step=100, warnings=["slow input"], **said, **times)
    assert (progress(cluster).percent, progress(cluster).time_left) == (25, "1m17s")


def test_metrics_stay_until_new_ones_are_reported() -> None:
    cluster = given_a_running_gang(listens=True)
    reports(cluster, 100, metrics={"accuracy": "0.9"})
    passes(cluster, 10)
    reports(cluster, 101)
    assert progress(cluster).metrics == {"accuracy": "0.9"}


def test_the_best_checkpoint_stays_until_a_better_one_is_reported_also_in_the_next_attempt() -> None:
    cluster = given_a_running_gang(listens=True)
    best = BestCheckpoint(name="step-00000060-5f0c-1", step=60, metric="accuracy", value="0.9")
    reports(cluster, 100, best_checkpoint=best)
    passes(cluster, 10)
    reports(cluster, 101)
    assert progress(cluster).best_checkpoint == best
    assert carry_over(progress(cluster)).best_checkpoint == best


def test_the_status_is_written_for_reports_once_in_five_seconds() -> None:
    cluster = given_a_running_gang(listens=True)
    passes(cluster, 10)
    operator, written = Operator(cluster, cluster.inboxes), []
    for second in range(60):
        kubelet.report(cluster, second + 1)
        if "write status" in operator.work().effects:
            written.append(second)
        passes(cluster, 1)
    assert written == list(range(0, 60, 5))


def test_a_report_that_waits_for_its_write_is_not_forgotten() -> None:
    cluster = given_a_gang_that_reported(10)
    passes(cluster, 2)
    decided = reports(cluster, 11)
    assert (progress(cluster).step, decided.again) == (10, timedelta(seconds=3))
    later(cluster, seconds=3)
    assert progress(cluster).step == 11


def test_a_decision_is_written_with_the_latest_report() -> None:
    cluster = given_a_gang_that_reported(10)
    passes(cluster, 2)
    kubelet.report(cluster, 11, checkpoint_step=11)
    is_seen_to_fail(cluster, "digits-1-0-1")
    assert (cluster.status.attempt, progress(cluster).step, progress(cluster).checkpoint_step) == (2, 11, 11)


def test_a_report_counts_once() -> None:
    cluster = given_a_gang_that_reported(10)
    passes(cluster, 100)
    assert look(cluster).status is None


def test_the_step_never_decreases_within_an_attempt() -> None:
    cluster = given_a_gang_that_reported(100)
    passes(cluster, 10)
    reports(cluster, 90)
    assert progress(cluster).step == 100


def test_the_next_attempt_begins_at_its_own_step() -> None:
    cluster = given_a_gang_that_reported(100, checkpoint=60)
    restart(cluster)
    assert (progress(cluster).step, progress(cluster).phase) == (100, None)
    reports(cluster, 61)
    assert (progress(cluster).step, progress(cluster).checkpoint_step) == (61, 60)


def test_the_attempt_after_a_suspension_begins_at_its_own_step() -> None:
    cluster = given_a_gang_that_reported(100, checkpoint=60)
    suspend(cluster)
    kubelet.sweep(cluster)
    cluster.edit_run_policy(suspend=False)
    runs_again(cluster)
    assert progress(cluster).phase is None
    reports(cluster, 61)
    assert progress(cluster).step == 61


def test_a_report_of_an_earlier_attempt_is_ignored() -> None:
    cluster = given_a_gang_that_reported(100)
    restart(cluster)
    passes(cluster, 10)
    assert look(cluster) == Plan(again=None)


def test_a_report_of_an_older_job_of_the_same_name_is_ignored() -> None:
    cluster = given_a_gang_that_reported(100, checkpoint=60)
    cluster.apply_again()
    cluster.collect_garbage()
    kubelet.sweep(cluster)
    one_pass(cluster)
    one_pass(cluster)
    for pod in cluster.pods.values():
        kubelet.make_ready(cluster, pod)
    one_pass(cluster)
    assert (cluster.status.state, cluster.status.attempt, cluster.status.progress) == (State.RUNNING, 1, None)


def test_a_gang_that_succeeded_is_in_phase_done() -> None:
    cluster = given_a_gang_that_reported(100)
    for pod in cluster.pods.values():
        kubelet.end(cluster, pod, message='{"step": 300}')
    one_pass(cluster)
    assert (progress(cluster).step, progress(cluster).phase) == (300, ReportPhase.DONE)


# Budgets.


def test_after_a_new_checkpoint_all_restarts_are_left() -> None:
    cluster = given_a_gang_that_reported(100, checkpoint=60, changes=TWICE)
    for step in (110, 120, 130):
        restart(cluster)
        assert len(cluster.status.restarts.charged) == 1
        reports(cluster, step, checkpoint_step=step)
        assert cluster.status.restarts.charged == {}
    assert cluster.status.restarts.by_class == {"Infrastructure": 3}


@pytest.mark.parametrize("checkpoint", [None, 50, 60])
def test_an_old_checkpoint_refills_nothing(checkpoint: int | None) -> None:
    cluster = given_a_gang_that_reported(100, checkpoint=60, changes=TWICE)
    restart(cluster)
    reports(cluster, 100, checkpoint_step=checkpoint)
    is_seen_to_fail(cluster, "digits-2-0-1")
    assert cluster.status.state is State.FAILED
    assert progress(cluster).checkpoint_step == 60


def test_a_failure_before_the_window_does_not_count() -> None:
    cluster = given_a_running_gang(
        {"spec.runPolicy": {"restart": {"limits": [{"class": "Infrastructure", "max": 1}], "windowSeconds": 3600}}}
    )
    for _ in range(3):
        restart(cluster)
        passes(cluster, 3600)
    assert (cluster.status.attempt, cluster.status.state) == (4, State.RUNNING)
    restart(cluster)
    is_seen_to_fail(cluster, "digits-5-0-1")
    assert cluster.status.state is State.FAILED


def test_a_checkpoint_counts_before_the_failure_that_follows_it() -> None:
    cluster = given_a_gang_that_reported(100, checkpoint=60, changes=TWICE)
    restart(cluster)
    kubelet.report(cluster, 110, checkpoint_step=105)
    is_seen_to_fail(cluster, "digits-2-0-1")
    assert (cluster.status.state, cluster.status.attempt) == (State.RESTARTING, 3)


# A clock that was set back by a day.


def test_reports_count_again_at_once_when_the_clock_was_set_back() -> None:
    cluster = given_a_gang_that_reported(10)
    cluster.now -= timedelta(days=1)
    reports(cluster, 10)
    now = format_time(cluster.now)
    assert (progress(cluster).last_report_time, progress(cluster).last_advance_time) == (now, now)
    passes(cluster, 10)
    reports(cluster, 11)
    assert (progress(cluster).step, progress(cluster).last_advance_time) == (11, format_time(cluster.now))


# Properties of reports.

_report = st.builds(
    WorkerReport,
    attempt=st.integers(1, 2),
    pod_uid=st.just("uid"),
    received=st.integers(-100, 100).map(at),
    phase=st.sampled_from(ReportPhase),
    step=st.integers(0, 50),
    checkpoint_step=st.none() | st.integers(0, 50),
)


@given(st.lists(_report, max_size=20))
def test_no_order_of_reports_takes_anything_back(said: list[WorkerReport]) -> None:
    status = Status(attempt=1)
    for report in said:
        before, status = status.progress, apply_report(status, report, 300, at(10**6))
        after = status.progress
        if before is None or after is None:
            assert before is None
            continue
        assert before.step <= after.step
        assert (before.checkpoint_step or 0) <= (after.checkpoint_step or 0)
        assert (before.last_report_time or "") <= (after.last_report_time or "")
        assert apply_report(status, replace(report, received=at(-200)), 300, at(10**6)) == status


# A status from a newer operator.


def test_a_status_from_a_newer_operator_is_read() -> None:
    failure = {
        "attempt": 1,
        "pod": "digits-1-0-0",
        "slice": 0,
        "host": 0,
        "reason": "New",
        "message": "",
        "class": "Cosmic",
        "time": time_at(0),
        "ray": 7,
    }
    status = Status.read(
        {
            "attempt": 1,
            "state": "Levitating",
            "progress": {"phase": "Dreaming", "step": 5, "totalSteps": 10},
            "firstFailure": failure,
            "lastFailure": failure,
            "restarts": {"byClass": {"Cosmic": 3}, "charged": {"Cosmic": [time_at(0)]}},
            "goodput": {"activity": "Dreaming", "since": time_at(0), "dreamSeconds": 3},
            "conditions": [],
            "novelty": True,
        }
    )
    assert (status.state, status.progress and status.progress.phase) == (None, None)
    assert status.last_failure.failure_class is FailureClass.UNKNOWN
    assert status.goodput.activity is Activity.TRAIN


def test_a_job_of_a_newer_operator_continues() -> None:
    cluster = given_a_gang_that_reported(100)
    status = cluster.job["status"]
    status |= {"state": "Levitating", "progress": {**status["progress"], "phase": "Dreaming"}}
    status["goodput"] |= {"activity": "Dreaming"}
    passes(cluster, 10)
    reports(cluster, 101)
    assert (cluster.status.attempt, progress(cluster).step) == (1, 101)
    restart(cluster)
    assert cluster.status.restarts.by_class == {"Infrastructure": 1}
