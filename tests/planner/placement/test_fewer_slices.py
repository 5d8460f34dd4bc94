"""A job on several slices that may run on fewer: how many it takes, and how it comes back to all of them."""

from datetime import timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.planner import kubelet
from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import one_pass
from tests.planner.story import given_a_begun_attempt, given_a_job, later, passes, ready_message
from tpu_training_operator.api.constants import LABEL_SLICE_INDEX
from tpu_training_operator.api.status import State
from tpu_training_operator.kube.cluster import Object

OTHER = {"slice": {"acceleratorType": "v6e-16"}, "waitForPreviousSeconds": 1200}
FOUR = {"spec.slice": {"acceleratorType": "v5litepod-8", "count": 4}, "spec.trainer.backend": "XLASPMD"}
FEWER = FOUR | {"spec.placement.count": {"min": 1}}
GROWING = FOUR | {
    "spec.placement": {"count": {"min": 1}, "returnToPreferred": "AtCheckpoint", "minRunSeconds": 1800},
    "spec.checkpoint": {"uri": "gs://bucket/jobs"},
}


def slice_of(pod: Object) -> int:
    return int(pod["metadata"]["labels"][LABEL_SLICE_INDEX])


def held(cluster: ModelCluster) -> list[str]:
    return [name for name in sorted(cluster.pods) if "hold" in name]


def given_nodes(cluster: ModelCluster, slices: int, minutes: float = 0, rounds: int = 6) -> None:
    """The cluster has nodes for so many slices, and time passes after the first of them."""
    for turn in range(rounds):
        kubelet.sweep(cluster)
        for name, pod in cluster.pods.items():
            if slice_of(pod) < slices and "hold" not in name:
                kubelet.make_ready(cluster, pod)
        one_pass(cluster)
        if turn == 2:
            cluster.now += timedelta(minutes=minutes)


def where(cluster: ModelCluster) -> tuple[int, str, int]:
    placement, resolved = cluster.status.placement, cluster.status.resolved
    return placement.option_index, placement.slice, resolved.accumulation_steps


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (4, (0, "4 x v5litepod-8", 1)),
        # Over three slices a batch of 128 does not divide.
        (3, (1, "2 x v5litepod-8", 2)),
        (2, (1, "2 x v5litepod-8", 2)),
        (1, (2, "v5litepod-8", 4)),
    ],
)
def test_a_job_runs_on_as_many_slices_as_it_has_found_and_keeps_its_batch(nodes: int, expected: Any) -> None:
    cluster = given_a_begun_attempt(FEWER)
    given_nodes(cluster, nodes, minutes=10, rounds=12)
    assert where(cluster) == expected
    assert cluster.status.state is State.RUNNING
    assert cluster.status.resolved.global_batch_size == 128
    assert cluster.status.restarts.total == 0


def test_it_waits_for_all_of_them_first_and_says_how_many_are_there(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_begun_attempt(FEWER)
    given_nodes(cluster, 2, minutes=9.9)
    assert where(cluster)[0] == 0
    later(cluster, seconds=6)
    assert where(cluster)[0] == 1
    assert "600 s" in ready_message(cluster)
    assert "2 of 4" in ready_message(cluster)
    assert ready_message(cluster) == snapshot


def test_a_slice_of_which_one_host_is_missing_does_not_count() -> None:
    cluster = given_a_begun_attempt(FEWER)
    given_nodes(cluster, 0)
    for name in ("digits-1-0-0", "digits-1-0-1", "digits-1-1-0"):
        kubelet.place(cluster, cluster.pods[name])
    # Its other host may come up.
    later(cluster, seconds=599)
    assert where(cluster)[0] == 0
    later(cluster, seconds=1)
    assert where(cluster)[:2] == (2, "v5litepod-8")


def test_without_any_slice_it_asks_for_the_fewest_and_then_goes_on_to_the_alternatives() -> None:
    cluster = given_a_begun_attempt(FOUR | {"spec.placement": {"count": {"min": 1}, "alternatives": [OTHER]}})
    seen = [where(cluster)[1]]
    for _ in range(3):
        given_nodes(cluster, 0, minutes=20)
        seen.append(where(cluster)[1])
    assert seen == ["4 x v5litepod-8", "v5litepod-8", "v6e-16", "4 x v5litepod-8"]


def test_a_job_that_loses_a_slice_goes_on_with_the_others() -> None:
    cluster = given_a_begun_attempt(FEWER | {"spec.recipe.globalBatchSize": 96 * 4})
    given_nodes(cluster, 4)
    assert cluster.status.state is State.RUNNING
    passes(cluster, 60)
    kubelet.lose_node_for_good(cluster, cluster.pods["digits-1-3-1"])
    one_pass(cluster)
    assert (cluster.status.attempt, where(cluster)[0]) == (2, 0)
    given_nodes(cluster, 3, minutes=10, rounds=12)
    assert where(cluster)[:2] == (1, "3 x v5litepod-8")
    assert cluster.status.state is State.RUNNING
    placement = cluster.status.placement
    assert placement.moves[-1].reason == "Lost"
    assert cluster.status.restarts.by_class == {"Infrastructure": 1}


def given_a_gang_on_two(changes: dict[str, Any]) -> ModelCluster:
    cluster = given_a_begun_attempt(changes)
    given_nodes(cluster, 2, minutes=10, rounds=12)
    assert cluster.status.state is State.RUNNING
    later(cluster, seconds=1800)
    return cluster


def test_only_the_slices_that_it_lacks_are_asked_for() -> None:
    cluster = given_a_gang_on_two(GROWING)
    assert held(cluster) == [f"digits-hold0-{slice_}-{host}" for slice_ in (2, 3) for host in (0, 1)]


def test_it_grows_by_all_of_them_at_once(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_gang_on_two(GROWING)
    for name in held(cluster):
        kubelet.make_ready(cluster, cluster.pods[name])
    one_pass(cluster)
    assert where(cluster) == (0, "4 x v5litepod-8", 1)
    assert ready_message(cluster) == snapshot
    given_nodes(cluster, 4, rounds=8)
    assert (held(cluster), cluster.status.state) == ([], State.RUNNING)


def test_it_grows_by_those_that_come_once_no_more_are_coming() -> None:
    cluster = given_a_gang_on_two(GROWING | {"spec.recipe.globalBatchSize": 96 * 4, "spec.placement.count.min": 2})
    assert where(cluster)[1] == "2 x v5litepod-8"
    for name in held(cluster)[:2]:
        kubelet.make_ready(cluster, cluster.pods[name])
    later(cluster, seconds=599)
    assert where(cluster)[1] == "2 x v5litepod-8"
    later(cluster, seconds=1)
    assert where(cluster)[1] == "3 x v5litepod-8"
    given_nodes(cluster, 3, rounds=8)
    assert (held(cluster), cluster.status.state) == ([], State.RUNNING)


@pytest.mark.parametrize(
    "changes",
    [
        {"spec.placement.count": {"min": 3}},
        {"spec.placement.count": {"min": 4}},
        {"spec.slice.count": 64, "spec.recipe.globalBatchSize": 512, "spec.placement.batch": "Scaled"},
    ],
    ids=str,
)
def test_numbers_of_slices_that_cannot_be_used_are_refused_before_the_job_starts(
    changes: Any, snapshot: SnapshotAssertion
) -> None:
    cluster = given_a_job(FEWER | changes)
    one_pass(cluster)
    assert cluster.status.state is State.INVALID
    assert ready_message(cluster).startswith("spec.placement.count")
    assert ready_message(cluster) == snapshot
    assert not cluster.pods
