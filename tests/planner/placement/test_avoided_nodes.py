"""A node whose chips failed the gang twice is avoided while the gang finds other nodes."""

from collections.abc import Callable

import pytest

from tests.planner import kubelet
from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import look, one_pass
from tests.planner.scheduler import avoided, place_all
from tests.planner.story import (
    described,
    finish,
    get_ready,
    given_a_job,
    passes,
    present,
    some_passes,
)
from tpu_training_operator.domain.plan.plan import Plan
from tpu_training_operator.kube.cluster import Object

BAD = "node-1"
NODES = ["node-0", BAD, "node-2", "node-3"]
POLICY = {"startDeadlineSeconds": 100, "restart": {"windowSeconds": 3600}}


def given_a_job_on_four_nodes() -> ModelCluster:
    cluster = given_a_job({"spec.runPolicy": POLICY})
    one_pass(cluster)
    one_pass(cluster)
    return cluster


def it_runs(cluster: ModelCluster, nodes: list[str]) -> None:
    place_all(cluster, nodes)
    get_ready(cluster)


def chips_fail(cluster: ModelCluster, node: str) -> None:
    """The chips fail, and the next attempt is created and placed as far as there are nodes."""
    pod = next(pod for pod in present(cluster) if pod["spec"]["nodeName"] == node)
    kubelet.find_chips_busy(cluster, pod)
    some_passes(cluster, 3, seconds=30)


def given_two_faults(first: str = BAD, second: str = BAD, *, between: float = 0) -> ModelCluster:
    cluster = given_a_job_on_four_nodes()
    it_runs(cluster, NODES)
    chips_fail(cluster, first)
    passes(cluster, between)
    it_runs(cluster, NODES)
    chips_fail(cluster, second)
    return cluster


def test_a_node_is_used_again_after_one_fault() -> None:
    cluster = given_a_job_on_four_nodes()
    it_runs(cluster, NODES)
    chips_fail(cluster, BAD)
    assert [fault.node for fault in cluster.status.device_faults] == [BAD]
    assert cluster.status.avoided_nodes == []
    assert {frozenset(avoided(pod)) for pod in present(cluster)} == {frozenset()}


def given_an_unfit(what: Callable[[ModelCluster, Object], None]) -> ModelCluster:
    cluster = given_a_job_on_four_nodes()
    it_runs(cluster, NODES)
    what(cluster, next(pod for pod in present(cluster) if pod["spec"]["nodeName"] == BAD))
    some_passes(cluster, 3, seconds=30)
    return cluster


@pytest.mark.parametrize("what", [kubelet.find_host_unfit, kubelet.find_chip_missing])
def test_a_host_that_was_measured_to_be_unfit_is_avoided_at_once(what: Callable[[ModelCluster, Object], None]) -> None:
    cluster = given_an_unfit(what)
    assert (cluster.status.attempt, cluster.status.avoided_nodes) == (2, [BAD])
    assert {frozenset(avoided(pod)) for pod in present(cluster)} == {frozenset({BAD})}


@pytest.mark.parametrize("what", [kubelet.find_slice_unfit, kubelet.find_chips_held])
def test_an_unfit_slice_and_chips_that_are_only_held_exclude_no_node(
    what: Callable[[ModelCluster, Object], None],
) -> None:
    cluster = given_an_unfit(what)
    assert (cluster.status.attempt, cluster.status.avoided_nodes) == (2, [])


def test_no_worker_is_placed_on_a_node_after_two_faults() -> None:
    cluster = given_two_faults()
    assert cluster.status.avoided_nodes == [BAD]
    assert len(present(cluster)) == 4
    assert all(avoided(pod) == {BAD} for pod in present(cluster))


def test_one_fault_each_on_two_nodes_excludes_neither() -> None:
    assert given_two_faults(BAD, "node-2").status.avoided_nodes == []


def test_faults_further_apart_than_the_window_exclude_no_node() -> None:
    assert given_two_faults(between=3600).status.avoided_nodes == []


@pytest.mark.parametrize("how", ["killed", "deleted"])
def test_other_failures_exclude_no_node(how: str) -> None:
    cluster = given_a_job_on_four_nodes()
    for attempt in (1, 2):
        it_runs(cluster, NODES)
        pod = cluster.pods[f"digits-{attempt}-0-1"]
        if how == "killed":
            kubelet.end(cluster, pod, 137)
        else:
            kubelet.delete_by_hand(cluster, pod)
        some_passes(cluster, 3, seconds=30)
    assert (cluster.status.attempt, cluster.status.device_faults, cluster.status.avoided_nodes) == (3, [], [])


def test_a_gang_that_finds_another_node_runs_without_the_bad_one() -> None:
    cluster = given_two_faults()
    it_runs(cluster, [*NODES, "node-4"])
    assert {pod["spec"]["nodeName"] for pod in present(cluster)} == {"node-0", "node-2", "node-3", "node-4"}


@pytest.mark.parametrize("nodes", [NODES, []], ids=["a part of it finds nodes", "it finds no node at all"])
def test_a_gang_that_cannot_be_placed_without_the_node_may_use_it_again(nodes: list[str]) -> None:
    cluster = given_two_faults()
    place_all(cluster, nodes)
    waits = look(cluster).again
    assert waits is not None
    cluster.now += waits
    [event] = one_pass(cluster).events
    assert event.message.endswith(f"; the job may use {BAD} again")
    assert (cluster.status.attempt, cluster.status.avoided_nodes, cluster.status.device_faults) == (4, [], [])


def test_a_gang_that_avoids_no_node_waits_forever_for_its_first() -> None:
    cluster = given_a_job_on_four_nodes()
    passes(cluster, 10**6)
    assert look(cluster) == Plan()


def test_a_finished_job_avoids_nothing() -> None:
    cluster = given_two_faults()
    it_runs(cluster, [*NODES, "node-4"])
    finish(cluster)
    assert cluster.status.avoided_nodes == []
    assert described(look(cluster)) == []
