"""What the status says about a waiting gang, and how often that is written."""

from datetime import timedelta

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.planner import kubelet
from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import one_pass
from tests.planner.story import (
    WORKERS,
    fails,
    given_a_created_gang,
    given_a_running_gang,
    later,
    ready_message,
    some_passes,
    until_running,
)
from tests.unit.kstatus import kstatus
from tpu_training_operator.api.status import State
from tpu_training_operator.domain.cluster_state.observed import format_time
from tpu_training_operator.domain.cluster_state.pod_events import explain_wait
from tpu_training_operator.kube.cluster import Object

NO_NODE = "0/9 nodes are available: 9 Insufficient google.com/tpu."


def writes(cluster: ModelCluster) -> int:
    return int(cluster.job["metadata"]["resourceVersion"])


def waits(cluster: ModelCluster, seconds: float) -> None:
    """The operator reconciles when it asked to, and every ten seconds because some pod has changed."""
    end = cluster.now + timedelta(seconds=seconds)
    while cluster.now < end:
        again = one_pass(cluster).again
        step = timedelta(seconds=10) if again is None else min(again, timedelta(seconds=10))
        cluster.now += max(step, timedelta(seconds=1))


def finds_no_node(cluster: ModelCluster, name: str, message: str = NO_NODE) -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    cluster.pods[name]["status"]["conditions"] = [condition]


def stands_in(cluster: ModelCluster, name: str, reason: str, message: str | None = None) -> None:
    """The pod has a node, and its container waits."""
    pod = cluster.pods[name]
    kubelet.place(cluster, pod)
    waiting = {"reason": reason} | ({"message": message} if message else {})
    pod["status"]["containerStatuses"] = [{"name": "trainer", "state": {"waiting": waiting}}]


def tell(cluster: ModelCluster, name: str, reason: str, note: str, kind: str = "Warning") -> None:
    cluster.pod_events.append(
        {
            "metadata": {"creationTimestamp": format_time(cluster.now)},
            "type": kind,
            "reason": reason,
            "note": note,
            "regarding": {"uid": cluster.pods[name]["metadata"]["uid"]},
        }
    )


def test_hosts_are_counted_and_grouped_by_reason_largest_group_first() -> None:
    cluster = given_a_created_gang()
    kubelet.make_ready(cluster, cluster.pods[WORKERS[0]])
    stands_in(cluster, WORKERS[1], "CreateContainerConfigError", 'secret "token" not found')
    for name in WORKERS[2:]:
        finds_no_node(cluster, name)
    waits(cluster, 30)
    assert ready_message(cluster).startswith("attempt 1: 1 of 4 hosts ready")
    assert f"2 hosts: no node: {NO_NODE}" in ready_message(cluster)
    assert "CreateContainerConfigError" in ready_message(cluster)
    assert (cluster.status.state, kstatus(cluster.job)) == (State.STARTING, "InProgress")


def test_what_worker_0_lacks_comes_first_since_its_peers_follow_it_to_their_nodes() -> None:
    cluster = given_a_created_gang()
    for name in WORKERS:
        finds_no_node(cluster, name, "0/84 nodes are available: 4 node(s) didn't match pod affinity rules.")
    finds_no_node(cluster, WORKERS[0])
    waits(cluster, 30)
    assert f"1 host: no node: {NO_NODE}; 3 hosts: no node: 0/84" in ready_message(cluster)


def test_a_volume_that_cannot_be_mounted_is_recognised_from_the_pods_events(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_created_gang()
    for name in WORKERS:
        stands_in(cluster, name, "ContainerCreating")
    tell(cluster, WORKERS[1], "FailedMount", "MountVolume.SetUp failed\nfor volume data")
    tell(cluster, WORKERS[1], "Pulled", "image is there", kind="Normal")
    waits(cluster, 30)
    assert "attempt 1" in ready_message(cluster)
    assert "0 of 4" in ready_message(cluster)
    assert "4 hosts" in ready_message(cluster)
    assert ready_message(cluster) == snapshot


def test_the_failure_of_a_gang_that_never_starts_says_what_it_waited_for(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_created_gang()
    for name in WORKERS:
        stands_in(cluster, name, "ContainerCreating")
        tell(cluster, name, "FailedMount", "MountVolume.SetUp failed for volume data")
    waits(cluster, 1800)
    one_pass(cluster)
    failure = cluster.status.last_failure
    assert "1800 s" in failure.message
    assert failure.message == snapshot


def test_the_message_includes_what_the_autoscaler_decided() -> None:
    cluster = given_a_created_gang()
    for name in WORKERS:
        finds_no_node(cluster, name)
    tell(cluster, WORKERS[0], "FailedScheduling", NO_NODE)
    tell(cluster, WORKERS[0], "NotTriggerScaleUp", "pod didn't trigger scale-up: 1 max limit reached", kind="Normal")
    waits(cluster, 30)
    assert ready_message(cluster).endswith(": 1 max limit reached)")
    assert f"4 hosts: no node: {NO_NODE}" in ready_message(cluster)
    assert "digits-1-0-0: NotTrigger" in ready_message(cluster)


def test_a_gang_that_is_being_replaced_also_says_what_it_waits_for(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_running_gang()
    fails(cluster, WORKERS[1])
    some_passes(cluster, 3)
    one_pass(cluster)
    waits(cluster, 30)
    assert "attempt 2" in ready_message(cluster)
    assert "0 of 4" in ready_message(cluster)
    assert "4 hosts" in ready_message(cluster)
    assert ready_message(cluster) == snapshot
    assert cluster.status.state is State.RESTARTING
    assert len(until_running(cluster)) == 4


def test_a_gang_that_starts_at_once_costs_no_further_write() -> None:
    cluster = given_a_created_gang()
    before = writes(cluster)
    for name in WORKERS:
        kubelet.make_ready(cluster, cluster.pods[name])
        later(cluster, seconds=2)
    assert (cluster.status.state, writes(cluster)) == (State.RUNNING, before + 1)
    assert cluster.event_lists == 0


def test_an_hour_of_waiting_costs_few_writes_and_reads() -> None:
    cluster = given_a_created_gang({"spec.slice.acceleratorType": "v5litepod-4"})
    before = writes(cluster)
    waits(cluster, 3600)
    assert writes(cluster) - before <= 14
    assert cluster.event_lists <= 30
    assert cluster.status.goodput.queue >= 3000


def test_counts_that_change_all_the_time_are_written_once_a_minute() -> None:
    cluster = given_a_created_gang({"spec.slice.acceleratorType": "v5litepod-64", "spec.recipe.globalBatchSize": 256})
    waits(cluster, 60)
    before = writes(cluster)
    for index, pod in enumerate(list(cluster.pods.values())):
        finds_no_node(cluster, pod["metadata"]["name"], f"0/{index} nodes are available")
        waits(cluster, 10)
    assert writes(cluster) - before <= 5, "less than three minutes, and one new reason"


def test_a_kubelet_that_alternates_between_two_reasons_gives_no_new_reason() -> None:
    cluster = given_a_created_gang()
    for name in WORKERS:
        stands_in(cluster, name, "ErrImagePull", "503")
    waits(cluster, 30)
    before = writes(cluster)
    for second in range(24):
        reason = ("ErrImagePull", "ImagePullBackOff")[second % 2]
        for name in WORKERS:
            stands_in(cluster, name, reason, "503")
        waits(cluster, 10)
    assert writes(cluster) - before <= 5


def test_a_new_reason_is_written_within_ten_seconds(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_created_gang()
    waits(cluster, 60)
    for name in WORKERS:
        stands_in(cluster, name, "ErrImagePull", "503")
    waits(cluster, 11)
    assert "attempt 1" in ready_message(cluster)
    assert "0 of 4" in ready_message(cluster)
    assert "4 hosts" in ready_message(cluster)
    assert ready_message(cluster) == snapshot


def test_the_message_has_a_bounded_length() -> None:
    cluster = given_a_created_gang({"spec.slice.acceleratorType": "v5litepod-256", "spec.recipe.globalBatchSize": 256})
    for number, name in enumerate(list(cluster.pods)):
        stands_in(cluster, name, "CreateContainerError" if number % 2 else "ErrImagePull", f"{number} " + "x" * 5000)
    waits(cluster, 30)
    assert len(ready_message(cluster)) <= 1000
    assert "more for other reasons" in ready_message(cluster)


@pytest.mark.parametrize(
    ("events", "line"),
    [
        ([], ""),
        ([{"type": "Normal", "reason": "Pulling"}], ""),
        ([{"type": "Warning", "reason": "FailedScheduling"}], ""),
        ([{"type": "Warning", "reason": "FailedMount"}], "FailedMount"),
        ([{"type": "Warning", "reason": "FailedMount", "note": "a\n b"}], "FailedMount: a b"),
        (
            [
                {"type": "Warning", "reason": "FailedMount", "deprecatedLastTimestamp": "2026-01-15T12:00:09Z"},
                {"type": "Warning", "reason": "Failed", "eventTime": "2026-01-15T12:00:08.000000Z"},
                {"type": "Warning", "reason": "Old", "eventTime": None, "series": None},
            ],
            "FailedMount",
        ),
        ([{"type": "Warning", "reason": "FailedMount", "note": "x" * 900}], "FailedMount: " + "x" * 184 + "..."),
    ],
)
def test_the_newest_event_that_explains_why_a_pod_waits_counts(events: list[Object], line: str) -> None:
    made = {"metadata": {"creationTimestamp": "2026-01-15T12:00:00Z"}}
    assert explain_wait([made | event for event in events]) == line
