"""What the planner does about workers that fail or disappear."""

from datetime import timedelta

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.planner import kubelet
from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import actions, look, one_pass
from tests.planner.story import (
    WORKERS,
    described,
    fails,
    given_a_created_gang,
    given_a_running_gang,
    is_seen_to_fail,
    later,
    passes,
    ready_message,
    reason,
    some_passes,
    suspend,
    until_running,
)
from tests.unit.jobs import restart_limits
from tests.unit.kstatus import kstatus
from tpu_training_operator.api.conditions import ConditionType, Reason
from tpu_training_operator.api.status import State
from tpu_training_operator.domain.cluster_state.observed import Observed, format_time, parse_time
from tpu_training_operator.domain.cluster_state.obstacles import Obstacle
from tpu_training_operator.domain.objects.actions import Delete
from tpu_training_operator.domain.plan.blocked import show_obstacle


def test_a_failure_raises_the_attempt_and_does_nothing_else() -> None:
    cluster = given_a_running_gang()
    fails(cluster, WORKERS[1])
    decided = one_pass(cluster)
    assert actions(decided) == []
    assert (cluster.status.attempt, cluster.status.state) == (2, State.RESTARTING)
    assert cluster.status.restarts.by_class == {"Infrastructure": 1}
    assert decided.again == timedelta(0)
    assert reason(cluster.status, ConditionType.GANG_READY)[0] == "False"
    assert kstatus(cluster.job) == "InProgress"


def test_the_message_names_worker_node_class_and_cause(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_running_gang()
    fails(cluster, WORKERS[1])
    [event] = one_pass(cluster).events
    assert event.warning
    assert "attempt 2" in event.message
    assert "slice 0" in event.message
    assert "host 1" in event.message
    assert event.message == snapshot


def test_the_cause_is_charged_and_not_its_lost_peers() -> None:
    cluster = given_a_running_gang()
    fails(cluster, WORKERS[0], 69)
    cluster.now += timedelta(seconds=1)
    is_seen_to_fail(cluster, WORKERS[3], 137, reason="OOMKilled")
    failure = cluster.status.last_failure
    assert (failure.pod, failure.reason) == (WORKERS[3], "OOMKilled")
    assert cluster.status.restarts.by_class == {"OutOfMemory": 1}


def test_lost_peers_are_given_five_seconds_to_show_their_cause() -> None:
    cluster = given_a_running_gang()
    fails(cluster, WORKERS[0], 69)
    decided = one_pass(cluster)
    assert (cluster.status.attempt, decided.again) == (1, timedelta(seconds=5))
    later(cluster, seconds=5)
    assert cluster.status.restarts.by_class == {"Infrastructure": 1}


def test_the_status_keeps_the_first_and_the_latest_failure() -> None:
    cluster = given_a_running_gang()
    is_seen_to_fail(cluster, WORKERS[1])
    until_running(cluster)
    is_seen_to_fail(cluster, "digits-2-0-3", 75)
    first, last = cluster.status.first_failure, cluster.status.last_failure
    assert (first.pod, last.pod) == (WORKERS[1], "digits-2-0-3")
    assert (first.attempt, last.attempt) == (1, 2)


def test_an_error_of_the_user_fails_the_job_at_once(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_running_gang()
    is_seen_to_fail(cluster, WORKERS[0], 1, message='{"message": "KeyError: label"}')
    assert (cluster.status.attempt, cluster.status.state) == (1, State.FAILED)
    assert reason(cluster.status, ConditionType.STALLED) == ("True", "NotRetryable")
    assert "slice 0" in ready_message(cluster)
    assert "host 0" in ready_message(cluster)
    assert "exit code 1" in ready_message(cluster)
    assert ready_message(cluster) == snapshot
    assert kstatus(cluster.job) == "Failed"


def test_without_a_restart_left_the_job_fails(snapshot: SnapshotAssertion) -> None:
    limits = {"spec.runPolicy": {"restart": {"limits": [{"class": "Infrastructure", "max": 1}]}}}
    cluster = given_a_running_gang(limits)
    is_seen_to_fail(cluster, WORKERS[1])
    until_running(cluster)
    is_seen_to_fail(cluster, "digits-2-0-1")
    assert (cluster.status.attempt, cluster.status.state) == (2, State.FAILED)
    assert cluster.status.restarts.by_class == {"Infrastructure": 1}
    assert reason(cluster.status) == ("False", "RestartLimitReached")
    assert "Infrastructure is 1 in 24 h" in ready_message(cluster)
    assert ready_message(cluster) == snapshot


# Failures that another attempt would repeat.


def ended_twice(code: int, *messages: str, limits: dict[str, int] | None = None) -> ModelCluster:
    """Worker 2 ends its first attempts with the code, each time with the next message."""
    cluster = given_a_running_gang({"spec.runPolicy": {"restart": {"limits": restart_limits(limits or {})}}})
    for attempt, message in enumerate(messages, 1):
        assert cluster.status.attempt == attempt
        if attempt > 1:
            until_running(cluster)
        is_seen_to_fail(cluster, f"digits-{attempt}-0-2", code, message=message)
    return cluster


def test_replicas_that_diverge_at_the_same_step_again_end_the_job(snapshot: SnapshotAssertion) -> None:
    cluster = ended_twice(76, '{"message": "came apart", "step": 120}', '{"message": "came apart", "step": 120}')
    assert (cluster.status.attempt, cluster.status.state) == (2, State.FAILED)
    assert reason(cluster.status) == ("False", "DivergedTwice")
    assert "step 120" in ready_message(cluster)
    assert "attempt 1" in ready_message(cluster)
    assert ready_message(cluster) == snapshot


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ('{"message": "came apart", "step": 120}', '{"message": "came apart", "step": 240}'),
        ('{"message": "came apart"}', '{"message": "came apart"}'),
        ("came apart", '{"step": "120"}'),
        ('{"step": true}', '{"step": true}'),
    ],
)
def test_replicas_that_diverge_at_another_or_an_unknown_step_restart(first: str, second: str) -> None:
    cluster = ended_twice(76, first, second)
    assert (cluster.status.attempt, cluster.status.restarts.by_class) == (3, {"Unknown": 2})


def test_a_loss_of_nan_ends_the_job(snapshot: SnapshotAssertion) -> None:
    cluster = ended_twice(65, "loss is NaN since step 7")
    assert reason(cluster.status) == ("False", "NotRetryable")
    assert "exit code 65" in ready_message(cluster)
    assert ready_message(cluster) == snapshot


def test_a_loss_of_nan_may_be_given_restarts() -> None:
    cluster = ended_twice(65, "loss is NaN", limits={"NotFinite": 1})
    assert cluster.status.restarts.by_class == {"NotFinite": 1}


def test_storage_that_denies_access_twice_is_a_user_error(snapshot: SnapshotAssertion) -> None:
    cluster = ended_twice(77, "403 for gs://bucket")
    status = cluster.status
    assert (status.attempt, status.restarts.by_class) == (2, {"Infrastructure": 1})
    assert status.restarts.next_attempt_time == format_time(cluster.now), "at once"
    until_running(cluster)
    is_seen_to_fail(cluster, "digits-2-0-0", 77, message="403 for gs://bucket")
    failure = cluster.status.last_failure
    assert (cluster.status.state, failure.failure_class) == (State.FAILED, "UserError")
    assert reason(cluster.status) == ("False", "NotRetryable")
    assert "403" in ready_message(cluster)
    assert ready_message(cluster) == snapshot


def test_a_directory_that_denies_access_is_no_matter_of_the_bucket(snapshot: SnapshotAssertion) -> None:
    said = "/mnt/run: cannot write step-probe-1: Permission denied"
    cluster = ended_twice(77, said)
    until_running(cluster)
    is_seen_to_fail(cluster, "digits-2-0-0", 77, message=said)
    assert ready_message(cluster) == snapshot


def test_storage_that_denies_access_is_not_tried_again_without_a_restart_left() -> None:
    cluster = ended_twice(77, "403", limits={"Infrastructure": 0})
    failure = cluster.status.last_failure
    assert (cluster.status.state, failure.failure_class) == (State.FAILED, "UserError")


def test_storage_that_denied_access_before_the_last_attempt_is_tried_again() -> None:
    cluster = ended_twice(77, "403")
    until_running(cluster)
    is_seen_to_fail(cluster, "digits-2-0-0")
    until_running(cluster)
    is_seen_to_fail(cluster, "digits-3-0-0", 77)
    assert (cluster.status.attempt, cluster.status.restarts.by_class) == (4, {"Infrastructure": 3})


# How a gang is replaced.


def test_leftovers_are_deleted_before_anything_is_created() -> None:
    cluster = given_a_running_gang()
    is_seen_to_fail(cluster, WORKERS[1])
    cluster.now += timedelta(minutes=10)
    assert described(one_pass(cluster)) == [f"delete Pod {name}" for name in WORKERS if name != WORKERS[1]]
    assert described(one_pass(cluster)) == []
    kubelet.sweep(cluster)
    assert "create Pod digits-2-0-0" in described(one_pass(cluster))


def test_the_worker_that_failed_last_is_kept_for_its_log_until_another_fails() -> None:
    cluster = given_a_running_gang()
    for failed in ("digits-1-0-1", "digits-2-0-3"):
        is_seen_to_fail(cluster, failed)
        gang = until_running(cluster)
        assert sorted(cluster.pods) == sorted([failed, *gang])
        assert cluster.status.state is State.RUNNING
    for name in gang:
        kubelet.end(cluster, cluster.pods[name])
    for _ in range(3):
        one_pass(cluster)
    assert "digits-2-0-3" in cluster.pods, "logs are for people to delete"


def test_a_worker_that_is_about_to_end_is_waited_for_and_kept() -> None:
    cluster = given_a_running_gang()
    kubelet.leave(cluster, cluster.pods[WORKERS[1]], 70)
    one_pass(cluster)
    assert described(one_pass(cluster)) == [f"delete Pod {name}" for name in WORKERS if name != WORKERS[1]]
    for name in WORKERS:
        if name != WORKERS[1]:
            kubelet.vanish(cluster, cluster.pods[name])
    assert described(one_pass(cluster)) == [], "the next worker cannot have the chips yet"
    gang = until_running(cluster)
    assert sorted(cluster.pods) == sorted([WORKERS[1], *gang])


def test_a_worker_that_never_comes_to_its_end_is_deleted() -> None:
    cluster = given_a_running_gang()
    kubelet.leave(cluster, cluster.pods[WORKERS[1]], 70)
    one_pass(cluster)
    one_pass(cluster)
    passes(cluster, 11)
    assert described(one_pass(cluster)) == [f"delete Pod {WORKERS[1]}"]


def test_a_worker_whose_sidecar_runs_on_is_deleted_at_once() -> None:
    cluster = given_a_running_gang()
    failed = cluster.pods[WORKERS[1]]
    kubelet.leave(cluster, failed, 70)
    failed["status"]["containerStatuses"].append({"name": "proxy", "state": {"running": {}}})
    one_pass(cluster)
    assert f"delete Pod {WORKERS[1]}" in described(one_pass(cluster))


def test_a_worker_that_was_deleted_or_still_runs_is_not_kept() -> None:
    cluster = given_a_running_gang()
    kubelet.delete_by_hand(cluster, cluster.pods[WORKERS[1]])
    one_pass(cluster)
    assert until_running(cluster) == sorted(cluster.pods)


def test_a_worker_that_is_kept_makes_room_for_one_that_a_quota_refuses() -> None:
    """A quota on the number of objects also counts pods that have ended."""
    cluster = given_a_running_gang()
    is_seen_to_fail(cluster, WORKERS[1])
    one_pass(cluster)
    kubelet.sweep(cluster)
    job, pods = cluster.read()
    refused = show_obstacle(
        Observed.of(job, pods), Obstacle(Reason.NOT_PERMITTED, "exceeded quota"), cluster.now
    ).status
    cluster.write_status({**job, "status": refused.as_json()})
    assert described(one_pass(cluster)) == [f"delete Pod {WORKERS[1]}"]
    assert until_running(cluster) == sorted(cluster.pods)


def test_a_suspended_job_keeps_no_worker_at_all() -> None:
    cluster = given_a_running_gang()
    is_seen_to_fail(cluster, WORKERS[1])
    until_running(cluster)
    cluster.edit_run_policy(suspend=True)
    some_passes(cluster, 3)
    assert (cluster.status.state, cluster.pods) == (State.SUSPENDED, {})


def test_a_suspended_job_waits_only_for_workers_that_still_run() -> None:
    cluster = given_a_running_gang()
    is_seen_to_fail(cluster, WORKERS[1])
    workers = until_running(cluster)
    kept = [cluster.pods[workers[0]], cluster.pods[WORKERS[1]]]
    suspend(cluster)
    assert "waiting for 4 workers to stop" in ready_message(cluster), "not for the one that is kept for its log"
    one_pass(cluster)
    kubelet.sweep(cluster)
    for pod in kept:
        # Only a finalizer keeps it.
        cluster.pods[pod["metadata"]["name"]] = pod
        pod["metadata"] |= {"deletionTimestamp": format_time(cluster.now), "deletionGracePeriodSeconds": 0}
    one_pass(cluster)
    assert "no workers are running" in ready_message(cluster)
    assert kstatus(cluster.job) == "Current"


def test_a_deletion_names_the_uid_of_the_pod() -> None:
    cluster = given_a_running_gang()
    is_seen_to_fail(cluster, WORKERS[1])
    wanted = {action.name: action.uid for action in actions(look(cluster)) if isinstance(action, Delete)}
    assert wanted == {name: cluster.pods[name]["metadata"]["uid"] for name in WORKERS if name != WORKERS[1]}


def test_what_the_previous_attempt_shared_is_deleted() -> None:
    cluster = given_a_running_gang()
    is_seen_to_fail(cluster, WORKERS[1])
    until_running(cluster)
    addresses = ["EndpointSlice/digits-0", "Endpoints/digits"]
    expected = ["ConfigMap/digits-2", "ConfigMap/digits-2-env", *addresses, "Service/digits"]
    assert sorted(cluster.others) == expected


def test_the_second_restart_waits_for_its_time() -> None:
    cluster = given_a_running_gang()
    is_seen_to_fail(cluster, WORKERS[1])
    until_running(cluster)
    is_seen_to_fail(cluster, "digits-2-0-1")
    one_pass(cluster)
    kubelet.sweep(cluster)
    earliest = cluster.status.restarts.next_attempt_time
    assert earliest is not None
    wait = parse_time(earliest) - cluster.now
    assert timedelta(seconds=2) <= wait <= timedelta(seconds=5)
    decided = one_pass(cluster)
    assert (actions(decided), decided.again) == ([], wait)
    cluster.now += wait
    assert actions(one_pass(cluster)) != []


def test_a_gang_leaves_the_one_that_preempted_it_time_to_take_its_place() -> None:
    """Even if the job's own backoff is shorter."""
    backoff = {"initialSeconds": 1, "maxSeconds": 1}
    cluster = given_a_running_gang({"spec.runPolicy": {"restart": {"backoff": backoff}}})
    kubelet.preempt(cluster, cluster.pods[WORKERS[0]])
    one_pass(cluster)
    assert cluster.status.restarts.by_class == {"Preemption": 1}
    one_pass(cluster)
    kubelet.sweep(cluster)
    decided = one_pass(cluster)
    assert (actions(decided), decided.again) == ([], timedelta(seconds=10))
    passes(cluster, 10)
    assert "create Pod digits-2-0-0" in described(one_pass(cluster))


# Disappearing pods.


def test_a_pod_deleted_by_hand_from_a_running_gang_restarts_it() -> None:
    cluster = given_a_running_gang()
    kubelet.delete_by_hand(cluster, cluster.pods[WORKERS[2]])
    one_pass(cluster)
    assert cluster.status.attempt == 2
    assert cluster.status.restarts.by_class == {"Infrastructure": 1}


def test_a_pod_gone_from_a_running_gang_without_a_trace_restarts_it() -> None:
    cluster = given_a_running_gang()
    kubelet.vanish(cluster, cluster.pods[WORKERS[2]])
    one_pass(cluster)
    failure = cluster.status.last_failure
    assert (failure.pod, failure.host, failure.reason) == (WORKERS[2], 2, "PodDeleted")


def test_a_pod_that_goes_before_the_gang_is_ready_is_created_again() -> None:
    cluster = given_a_created_gang()
    kubelet.delete_by_hand(cluster, cluster.pods[WORKERS[2]])
    one_pass(cluster)
    assert cluster.status.attempt == 1
    assert sorted(cluster.pods) == WORKERS
