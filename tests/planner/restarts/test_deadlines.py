"""How long a job may be active, and how long it stays after it has finished."""

from datetime import timedelta

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.planner import kubelet
from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import actions, look, one_pass
from tests.planner.story import (
    WORKERS,
    all_finish,
    described,
    finish,
    get_ready,
    given_a_created_gang,
    given_a_running_gang,
    is_seen_to_fail,
    later,
    passes,
    reason,
    resume,
    suspend,
)
from tests.unit.kstatus import kstatus
from tpu_training_operator.api.conditions import ConditionType
from tpu_training_operator.api.status import State
from tpu_training_operator.domain.cluster_state.observed import format_time
from tpu_training_operator.domain.plan.plan import Plan

LIMIT = timedelta(seconds=100)
ACTIVE = {"spec.runPolicy": {"activeDeadlineSeconds": 100}}
TTL = {"spec.runPolicy": {"ttlSecondsAfterFinished": 60}}


def given_a_finished_job(code: int = 0) -> ModelCluster:
    cluster = given_a_running_gang(TTL)
    for pod in cluster.pods.values():
        kubelet.end(cluster, pod, code)
    one_pass(cluster)
    return cluster


# activeDeadlineSeconds


def test_a_job_that_has_been_active_for_too_long_fails(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_running_gang(ACTIVE)
    cluster.now += LIMIT - timedelta(seconds=1)
    assert look(cluster) == Plan(again=timedelta(seconds=1))
    cluster.now += timedelta(seconds=1)
    decided = one_pass(cluster)
    assert (cluster.status.state, actions(decided)) == (State.FAILED, [])
    assert reason(cluster.status, ConditionType.FAILED) == ("True", "DeadlineExceeded")
    assert "100 s" in decided.events[0].message
    assert decided.events[0].message == snapshot
    assert kstatus(cluster.job) == "Failed"


def test_the_workers_of_a_job_past_its_deadline_are_stopped() -> None:
    cluster = given_a_running_gang(ACTIVE)
    cluster.now += LIMIT
    one_pass(cluster)
    assert described(look(cluster)) == [f"delete Pod {name}" for name in WORKERS]


def test_the_wait_for_nodes_does_not_count() -> None:
    cluster = given_a_created_gang(ACTIVE)
    cluster.now += 50 * LIMIT
    get_ready(cluster)
    assert look(cluster) == Plan(again=LIMIT)


def test_a_suspension_does_not_count() -> None:
    cluster = given_a_running_gang(ACTIVE)
    passes(cluster, 40)
    suspend(cluster)
    one_pass(cluster)
    kubelet.sweep(cluster)
    cluster.now += 50 * LIMIT
    one_pass(cluster)
    resume(cluster)
    one_pass(cluster)
    get_ready(cluster)
    assert look(cluster) == Plan(again=timedelta(seconds=60))


def test_the_wait_between_two_attempts_counts() -> None:
    cluster = given_a_running_gang(ACTIVE)
    passes(cluster, 40)
    is_seen_to_fail(cluster, WORKERS[1])
    later(cluster, seconds=60)
    assert reason(cluster.status) == ("False", "DeadlineExceeded")


def test_a_job_that_finished_before_its_deadline_succeeds_even_if_seen_after_it() -> None:
    cluster = given_a_running_gang(ACTIVE)
    all_finish(cluster)
    cluster.now += 50 * LIMIT
    one_pass(cluster)
    assert cluster.status.state is State.SUCCEEDED


def test_the_deadline_can_be_moved_while_the_job_runs() -> None:
    cluster = given_a_running_gang(ACTIVE)
    cluster.now += LIMIT
    cluster.edit_run_policy(activeDeadlineSeconds=150)
    assert look(cluster).again == timedelta(seconds=50)


def test_without_a_deadline_a_job_runs_forever() -> None:
    cluster = given_a_running_gang()
    passes(cluster, 10**8)
    assert look(cluster) == Plan()


# ttlSecondsAfterFinished


@pytest.mark.parametrize("code", [0, 1])
def test_a_finished_job_is_deleted_when_its_time_to_live_is_over(code: int) -> None:
    cluster = given_a_finished_job(code)
    passes(cluster, 59)
    assert look(cluster) == Plan(again=timedelta(seconds=1))
    passes(cluster, 1)
    assert described(look(cluster)) == ["delete TPUTrainingJob digits"]
    one_pass(cluster)
    assert cluster.job_is_gone


def test_without_a_time_to_live_a_finished_job_stays() -> None:
    cluster = given_a_running_gang()
    finish(cluster)
    passes(cluster, 10**8)
    assert look(cluster) == Plan()


def test_the_time_to_live_does_not_run_before_the_job_has_finished() -> None:
    cluster = given_a_running_gang(TTL)
    passes(cluster, 10**8)
    assert look(cluster) == Plan()


def test_the_time_to_live_can_be_set_after_the_job_has_finished() -> None:
    cluster = given_a_running_gang()
    finish(cluster)
    passes(cluster, 100)
    cluster.edit_run_policy(ttlSecondsAfterFinished=100)
    assert described(one_pass(cluster)) == ["delete TPUTrainingJob digits"]
    assert cluster.job_is_gone


def test_a_finished_job_with_an_invalid_spec_is_deleted_too() -> None:
    cluster = given_a_finished_job()
    cluster.job["spec"]["surprise"] = "of a newer operator"
    passes(cluster, 60)
    assert described(look(cluster)) == ["delete TPUTrainingJob digits"]


# suspend


def test_a_gang_that_has_succeeded_when_it_is_suspended_has_succeeded() -> None:
    cluster = given_a_running_gang()
    all_finish(cluster)
    suspend(cluster)
    assert (cluster.status.state, cluster.status.completion_time) == (State.SUCCEEDED, format_time(cluster.now))
