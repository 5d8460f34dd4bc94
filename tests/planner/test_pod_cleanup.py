"""Unwanted pods: which the next attempt waits for, which are deleted by force, and when."""

from datetime import timedelta
from typing import Any

import pytest

from tests.planner import kubelet
from tests.planner.checks.test_entry_check import AUTO, POD, REQUIRE, checked, given_a_check
from tests.planner.model_cluster import GRACE, ModelCluster
from tests.planner.operators import look, one_pass
from tests.planner.story import (
    WORKERS,
    described,
    fails,
    given_a_running_gang,
    is_seen_to_fail,
    later,
    passes,
    ready_message,
    suspend,
)
from tpu_training_operator.api.status import State
from tpu_training_operator.domain.cluster_state.observed import format_time
from tpu_training_operator.domain.plan.plan import Plan

# For a node that is silent but not known to be lost.
SILENCE = timedelta(seconds=30)
# A watch may never report that a pod is gone.
UNHEARD = timedelta(seconds=15)
# For the last of those that leave, until those that have left are written down.
LEAVE = timedelta(seconds=10)
# The worker that fails by itself; its pod is kept for the log.
FAILED = WORKERS[0]


def given_a_gang_with_a_node_that_is_lost(*, known: bool) -> ModelCluster:
    """`known`: the control plane has noticed and deletes the node's pods."""
    cluster = given_a_running_gang()
    pod = cluster.pods[WORKERS[1]]
    kubelet.lose_node(cluster, pod)
    if known:
        kubelet.give_up(cluster, pod)
    else:
        fails(cluster, WORKERS[0])
    one_pass(cluster)
    assert cluster.status.attempt == 2
    return cluster


def given_leftovers_of_which_one_does_not_go(*, known: bool) -> ModelCluster:
    cluster = given_a_gang_with_a_node_that_is_lost(known=known)
    one_pass(cluster)
    kubelet.sweep(cluster)
    assert set(cluster.pods) - {FAILED} == {WORKERS[1]}
    if not known:
        chips_are_counted(cluster)
    return cluster


def chips_are_counted(cluster: ModelCluster) -> None:
    """The status says that the others have given their chips back, once they have waited for the one that does not."""
    cluster.now += LEAVE
    one_pass(cluster)


def test_the_next_attempt_begins_beside_a_worker_on_a_lost_node() -> None:
    cluster = given_leftovers_of_which_one_does_not_go(known=True)
    assert "create Pod digits-2-0-1" in described(look(cluster))


def test_the_next_attempt_waits_for_a_worker_on_a_silent_node() -> None:
    cluster = given_leftovers_of_which_one_does_not_go(known=False)
    assert look(cluster) == Plan(again=UNHEARD)


def test_the_next_attempt_starts_soon_after_the_old_workers_are_gone_without_a_hint() -> None:
    cluster = given_a_running_gang()
    is_seen_to_fail(cluster, WORKERS[0])
    waits = one_pass(cluster).again
    assert waits == UNHEARD
    kubelet.sweep(cluster)
    cluster.now += waits
    assert "create Pod digits-2-0-0" in described(look(cluster))


def test_a_suspension_looks_again_soon_without_a_hint() -> None:
    cluster = given_a_running_gang()
    suspend(cluster)
    assert one_pass(cluster).again == UNHEARD
    kubelet.sweep(cluster)
    assert one_pass(cluster).again is None


@pytest.mark.parametrize(("known", "wait"), [(True, GRACE), (False, GRACE + SILENCE - LEAVE)])
def test_a_worker_is_deleted_by_force_once_its_node_is_given_up(known: bool, wait: timedelta) -> None:
    cluster = given_leftovers_of_which_one_does_not_go(known=known)
    cluster.now += wait - timedelta(seconds=1)
    assert not any("by force" in action for action in described(look(cluster)))
    assert look(cluster).again == timedelta(seconds=1)
    cluster.now += timedelta(seconds=1)
    assert described(look(cluster))[0] == f"delete Pod {WORKERS[1]} by force"
    one_pass(cluster)
    assert WORKERS[1] not in cluster.pods


def test_the_new_gang_starts_beside_the_old_worker_without_a_hint() -> None:
    cluster = given_leftovers_of_which_one_does_not_go(known=True)
    one_pass(cluster)
    chips_are_counted(cluster)
    assert look(cluster) == Plan(again=GRACE - LEAVE)


def test_a_worker_that_saves_on_a_live_node_with_a_taint_is_waited_for() -> None:
    cluster = given_a_running_gang()
    kubelet.taint_node(cluster, cluster.pods[WORKERS[1]])
    one_pass(cluster)
    for _ in range(2):
        assert one_pass(cluster).again == UNHEARD
        cluster.now += UNHEARD
    assert sorted(cluster.pods) == WORKERS, "its grace period is not over"
    kubelet.sweep(cluster)
    assert "create Pod digits-2-0-1" in described(look(cluster))


def test_a_worker_that_stops_in_time_is_not_deleted_by_force() -> None:
    cluster = given_leftovers_of_which_one_does_not_go(known=False)
    cluster.now += GRACE + SILENCE
    kubelet.nodes_come_back(cluster)
    kubelet.sweep(cluster)
    assert not any("by force" in action for action in described(look(cluster)))


@pytest.mark.parametrize("known", [True, False])
def test_a_suspension_ends_although_a_node_is_lost(known: bool) -> None:
    cluster = given_leftovers_of_which_one_does_not_go(known=known)
    suspend(cluster)
    while waits := one_pass(cluster).again:
        cluster.now += waits
    assert (cluster.status.state, cluster.pods) == (State.SUSPENDED, {})
    assert look(cluster).again is None


def test_a_failed_job_releases_a_lost_node_too() -> None:
    cluster = given_a_running_gang()
    kubelet.lose_node(cluster, cluster.pods[WORKERS[1]])
    is_seen_to_fail(cluster, WORKERS[0], 1)
    assert cluster.status.state is State.FAILED
    one_pass(cluster)
    kubelet.sweep(cluster)
    chips_are_counted(cluster)
    waits = look(cluster).again
    assert waits == GRACE + SILENCE - LEAVE
    cluster.now += waits
    assert described(look(cluster)) == [f"delete Pod {WORKERS[1]} by force"]


def held_by_a_finalizer(cluster: ModelCluster, name: str) -> None:
    """Another controller's finalizer keeps the pod, forced or not."""
    cluster.pods[name]["metadata"]["deletionGracePeriodSeconds"] = 0


def test_a_worker_that_only_a_finalizer_holds_is_deleted_once() -> None:
    cluster = given_leftovers_of_which_one_does_not_go(known=False)
    held_by_a_finalizer(cluster, WORKERS[1])
    passes(cluster, 1000)
    decided = look(cluster)
    assert (not any("delete Pod" in action for action in described(decided)), decided.again) == (True, None)


def test_a_worker_that_only_a_finalizer_holds_is_not_waited_for() -> None:
    cluster = given_leftovers_of_which_one_does_not_go(known=False)
    held_by_a_finalizer(cluster, WORKERS[1])
    assert "create Pod digits-2-0-1" in described(look(cluster))


@pytest.mark.parametrize(("changes", "state"), [(AUTO, State.STARTING), (REQUIRE, State.BLOCKED)])
def test_an_entry_check_whose_pod_a_finalizer_keeps_is_not_waited_for_in_silence(
    changes: dict[str, Any], state: State
) -> None:
    cluster = given_a_check(changes)
    kubelet.start(cluster, cluster.pods[POD])
    deleted = {"deletionTimestamp": format_time(cluster.now), "deletionGracePeriodSeconds": 0}
    cluster.pods[POD]["metadata"] |= deleted | {"finalizers": ["example.com/audit"]}
    one_pass(cluster)
    assert checked(cluster) == ("Unknown", "CheckingEntry"), "it may go at any moment"
    later(cluster, seconds=60)
    assert cluster.status.state is state
    assert f"{POD} is deleted, but a final" in ready_message(cluster)
    assert checked(cluster) == (("False", "EntryNotChecked") if changes == AUTO else ("Unknown", "CheckingEntry"))
