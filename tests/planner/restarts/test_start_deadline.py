"""A partly placed gang must not hold nodes that another gang waits for."""

import re
from datetime import timedelta

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.planner import kubelet
from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import actions, look, one_pass
from tests.planner.story import WORKERS, described, given_a_created_gang, later, reason, until_running
from tests.unit.jobs import job
from tests.unit.kstatus import kstatus
from tpu_training_operator.api.conditions import ConditionType, Reason
from tpu_training_operator.api.status import State
from tpu_training_operator.domain.cluster_state.observed import Observed, format_time, parse_time
from tpu_training_operator.domain.cluster_state.obstacles import Obstacle
from tpu_training_operator.domain.plan.blocked import show_obstacle
from tpu_training_operator.domain.plan.common.restart_limits import pause_after_release
from tpu_training_operator.domain.plan.plan import Plan

DEADLINE = timedelta(seconds=100)
POLICY = {"spec.runPolicy": {"startDeadlineSeconds": 100, "restart": {"backoff": {"maxSeconds": 40}}}}


def given_a_partly_placed_gang(placed: int = 3) -> ModelCluster:
    cluster = given_a_created_gang(POLICY)
    for name in WORKERS[:placed]:
        kubelet.place(cluster, cluster.pods[name])
    return cluster


def given_a_released_gang() -> ModelCluster:
    cluster = given_a_partly_placed_gang()
    cluster.now += DEADLINE
    one_pass(cluster)
    return cluster


def given_a_gang_of_which_a_part_is_refused() -> ModelCluster:
    """Two of the four run; a quota refuses the others, and the status says so."""
    cluster = given_a_created_gang(POLICY)
    for name in WORKERS[2:]:
        kubelet.vanish(cluster, cluster.pods[name])
    for pod in cluster.pods.values():
        kubelet.make_ready(cluster, pod)
    job, pods = cluster.read()
    status = show_obstacle(Observed.of(job, pods), Obstacle(Reason.NOT_PERMITTED, "exceeded quota"), cluster.now).status
    cluster.write_status({**job, "status": status.as_json()})
    return cluster


def test_a_gang_that_exceeds_a_quota_releases_its_nodes() -> None:
    cluster = given_a_gang_of_which_a_part_is_refused()
    cluster.now += DEADLINE - timedelta(seconds=1)
    assert "create Pod digits-1-0-3" in described(look(cluster)), "until then it is tried again"
    later(cluster, seconds=1)
    assert (cluster.status.attempt, reason(cluster.status)) == (2, ("False", "SomePodsUnschedulable"))
    assert described(one_pass(cluster)) == ["delete Pod digits-1-0-0", "delete Pod digits-1-0-1"]


@pytest.mark.parametrize("placed", [1, 2, 3])
def test_a_partly_placed_gang_waits_until_the_deadline_without_a_hint(placed: int) -> None:
    cluster = given_a_partly_placed_gang(placed)
    assert look(cluster) == Plan(again=DEADLINE)
    cluster.now += DEADLINE - timedelta(seconds=1)
    assert look(cluster) == Plan(again=timedelta(seconds=1))


def test_at_the_deadline_the_attempt_is_raised_and_nothing_else_is_done() -> None:
    cluster = given_a_partly_placed_gang()
    cluster.now += DEADLINE
    decided = one_pass(cluster)
    assert actions(decided) == []
    assert (cluster.status.attempt, cluster.status.state) == (2, State.RESTARTING)
    assert decided.again == timedelta(0)
    assert reason(cluster.status) == ("False", "SomePodsUnschedulable")
    assert reason(cluster.status, ConditionType.GANG_READY) == ("False", "SomePodsUnschedulable")
    assert kstatus(cluster.job) == "InProgress"


def test_the_event_of_a_release_says_how_many_workers_had_no_node(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_partly_placed_gang()
    cluster.now += DEADLINE
    [event] = one_pass(cluster).events
    assert (event.reason, event.warning) == ("NodesReleased", True)
    assert event.message.startswith("attempt 2 starts in ")
    assert "1 of 4" in event.message
    assert "100 s" in event.message
    assert event.message == snapshot


def test_a_release_is_charged_to_no_failure_class() -> None:
    status = given_a_released_gang().status
    assert (status.restarts.by_class, status.last_failure) == ({}, None)


def test_the_chips_are_free_at_once_and_asked_for_again_after_the_pause() -> None:
    cluster = given_a_released_gang()
    assert described(look(cluster)) == [f"delete Pod {name}" for name in WORKERS]
    one_pass(cluster)
    kubelet.sweep(cluster)
    one_pass(cluster)
    earliest = parse_time(cluster.status.restarts.next_attempt_time or "")
    assert look(cluster) == Plan(again=earliest - cluster.now)
    cluster.now = earliest
    assert "create Pod digits-2-0-0" in described(look(cluster))


def test_the_next_attempt_can_succeed() -> None:
    cluster = given_a_released_gang()
    assert until_running(cluster) == [name.replace("digits-1-", "digits-2-") for name in WORKERS]


def test_a_gang_without_any_node_waits_forever() -> None:
    cluster = given_a_created_gang(POLICY)
    cluster.now += timedelta(days=30)
    assert look(cluster) == Plan()


def test_a_gang_whose_containers_run_has_no_start_deadline() -> None:
    cluster = given_a_created_gang(POLICY)
    for pod in cluster.pods.values():
        kubelet.start(cluster, pod)
    one_pass(cluster)
    later(cluster, days=1)
    assert (cluster.status.attempt, cluster.status.state) == (1, State.STARTING)


@pytest.mark.parametrize(("given", "limit"), [(100, 1800), (2000, 2000)])
def test_a_gang_that_has_its_nodes_and_does_not_start_is_replaced(given: int, limit: int) -> None:
    cluster = given_a_created_gang({"spec.runPolicy": {"startDeadlineSeconds": given}})
    for pod in cluster.pods.values():
        kubelet.place(cluster, pod)
    kubelet.start(cluster, cluster.pods[WORKERS[0]])
    cluster.pods[WORKERS[2]]["status"]["containerStatuses"] = [
        {"name": "trainer", "state": {"waiting": {"reason": "ContainerCreating"}}}
    ]
    kubelet.start(cluster, cluster.pods[WORKERS[1]])
    kubelet.start(cluster, cluster.pods[WORKERS[3]])
    cluster.now += timedelta(seconds=limit - 1)
    assert look(cluster).again == timedelta(seconds=1)
    later(cluster, seconds=1)
    failure = cluster.status.last_failure
    assert (failure.pod, failure.failure_class, failure.reason) == (WORKERS[2], "Infrastructure", "NotStarted")
    assert re.findall(r"\d+ s|ContainerCreating", failure.message) == [f"{limit} s", "ContainerCreating"]
    assert cluster.status.restarts.by_class == {"Infrastructure": 1}


def test_the_deadline_starts_again_with_every_worker_that_gets_a_node() -> None:
    cluster = given_a_partly_placed_gang(1)
    cluster.now += timedelta(seconds=90)
    kubelet.place(cluster, cluster.pods[WORKERS[1]])
    cluster.now += timedelta(seconds=30)
    assert look(cluster) == Plan(again=timedelta(seconds=70))


def test_a_gang_that_queued_for_long_is_not_released_while_its_nodes_come_up() -> None:
    cluster = given_a_created_gang(POLICY)
    cluster.now += timedelta(hours=5)
    kubelet.place(cluster, cluster.pods[WORKERS[0]])
    assert look(cluster) == Plan(again=DEADLINE)


def test_the_time_runs_from_the_youngest_worker() -> None:
    cluster = given_a_partly_placed_gang()
    cluster.now += timedelta(seconds=40)
    cluster.pods[WORKERS[3]]["metadata"]["creationTimestamp"] = format_time(cluster.now)
    assert look(cluster) == Plan(again=DEADLINE)


def test_the_deadline_can_be_changed_while_the_gang_waits() -> None:
    cluster = given_a_partly_placed_gang()
    cluster.now += timedelta(seconds=10)
    cluster.edit_run_policy(startDeadlineSeconds=5)
    one_pass(cluster)
    assert cluster.status.attempt == 2


def test_a_failure_comes_before_the_deadline() -> None:
    cluster = given_a_partly_placed_gang()
    kubelet.start(cluster, cluster.pods[WORKERS[0]])
    kubelet.end(cluster, cluster.pods[WORKERS[0]], 137)
    cluster.now += DEADLINE
    one_pass(cluster)
    assert cluster.status.restarts.by_class == {"Infrastructure": 1}


# The pause.


def pauses(uid: str) -> list[float]:
    policy = job(POLICY).spec.run_policy
    return [pause_after_release(policy, f"{uid}/{attempt}").total_seconds() for attempt in range(1, 200)]


def test_a_pause_is_half_to_one_and_a_half_of_the_longest_backoff() -> None:
    assert all(20 <= pause <= 60 for pause in pauses("a"))
    assert max(pauses("a")) - min(pauses("a")) > 35


def test_pauses_differ_between_jobs_and_are_the_same_every_time() -> None:
    assert pauses("a") == pauses("a")
    assert sum(abs(a - b) < 1 for a, b in zip(pauses("a"), pauses("b"), strict=True)) < 20
