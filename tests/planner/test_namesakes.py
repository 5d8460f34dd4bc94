"""Objects with the job's names that are not its own: from a deleted job of the same name, or forged."""

from datetime import timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.planner import kubelet
from tests.planner.model_cluster import ModelCluster, copied
from tests.planner.operators import Operator, look, one_pass
from tests.planner.story import (
    WORKERS,
    described,
    fails,
    given_a_begun_attempt,
    given_a_created_gang,
    given_a_running_gang,
    is_seen_to_fail,
    later,
    ready_message,
    reason,
    until_running,
)
from tests.unit.kstatus import kstatus
from tpu_training_operator.api.status import State
from tpu_training_operator.domain.cluster_state.observed import format_time
from tpu_training_operator.kube.cluster import Object

# The job was deleted and applied again.


def given_a_job_applied_again() -> ModelCluster:
    """The old workers still run; the garbage collector has not started."""
    cluster = given_a_running_gang()
    cluster.job_is_gone = True
    cluster.apply_again()
    one_pass(cluster)
    return cluster


def test_a_new_job_waits_for_the_workers_of_its_namesake_without_alarm(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_job_applied_again()
    seen = []
    for _ in range(4):
        assert one_pass(cluster).again == timedelta(seconds=5)
        assert kstatus(cluster.job) == "InProgress"
        assert reason(cluster.status) == ("False", "WaitingForDeletedJob")
        seen.append(ready_message(cluster))
        cluster.collect_garbage()
        cluster.now += timedelta(seconds=5)
    assert [event["reason"] for event in cluster.events if event["type"] == "Warning"] == []
    assert seen[0] == snapshot
    assert seen[-1] == snapshot
    kubelet.sweep(cluster)
    assert until_running(cluster) == WORKERS


def test_waiting_for_a_namesake_writes_the_status_once() -> None:
    cluster = given_a_job_applied_again()
    cluster.collect_garbage()
    for _ in range(3):
        one_pass(cluster)
    version = cluster.job["metadata"]["resourceVersion"]
    for _ in range(5):
        later(cluster, seconds=5)
    assert cluster.job["metadata"]["resourceVersion"] == version


def test_an_old_worker_that_never_goes_costs_an_attempt_but_not_the_job() -> None:
    cluster = given_a_job_applied_again()
    kubelet.lose_node(cluster, cluster.pods[WORKERS[1]])
    cluster.collect_garbage()
    kubelet.sweep(cluster)
    assert list(cluster.pods) == [WORKERS[1]]
    for _ in range(200):
        one_pass(cluster)
        cluster.now += timedelta(seconds=20)
        for pod in cluster.pods.values():
            kubelet.make_ready(cluster, pod)
    assert (cluster.status.attempt, cluster.status.state) == (2, State.RUNNING)


@pytest.mark.parametrize(
    ("owners", "terminating", "expected"),
    [
        ([{"uid": "old"}], False, "WaitingForDeletedJob"),
        ([{"uid": "old", "apiVersion": "tpu-operator.dev/v1"}], False, "WaitingForDeletedJob"),
        ([{"uid": "old", "name": "letters"}], False, "NameConflict"),
        ([{"uid": "old", "kind": "Job", "apiVersion": "batch/v1"}], False, "NameConflict"),
        ([{"uid": "old", "apiVersion": "example.com/v1"}], False, "NameConflict"),
        ([{"uid": "old", "controller": False}], False, "NameConflict"),
        ([], False, "NameConflict"),
        ([], True, "WaitingForDeletedJob"),
    ],
)
def test_an_object_that_is_going_is_waited_for_and_a_foreign_one_blocks(
    owners: list[Object], terminating: bool, expected: str
) -> None:
    cluster = given_a_begun_attempt()
    stranger = kubelet.stranger(WORKERS[2], attempt=1)
    own = {
        "apiVersion": "tpu-operator.dev/v1alpha1",
        "kind": "TPUTrainingJob",
        "name": "digits",
        "uid": cluster.uid,
        "controller": True,
    }
    stranger["metadata"]["ownerReferences"] = [own | owner for owner in owners]
    if terminating:
        stranger["metadata"]["deletionTimestamp"] = format_time(cluster.now)
    cluster.pods[WORKERS[2]] = stranger
    one_pass(cluster)
    assert reason(cluster.status) == ("False", expected)


# Somebody with the right to create pods copies labels and owner references.


def forge(
    cluster: ModelCluster, name: str, attempt: str = "1", slice_index: str = "0", host_index: str = "0"
) -> Object:
    body: Any = copied(cluster.pods[WORKERS[0]])
    body["metadata"] |= {"name": name, "uid": f"forged-{name}", "creationTimestamp": format_time(cluster.now)}
    labels = {"attempt": attempt, "slice-index": slice_index, "host-index": host_index}
    body["metadata"]["labels"] |= {f"tpu-operator.dev/{label}": value for label, value in labels.items()}
    cluster.pods[name] = body
    return body


FORGED = {
    "a later attempt": ("digits-7-0-0", "7"),
    "a later attempt without its name": ("mine", "7"),
    "another worker 0": ("mine", "1"),
    "a host too many": ("digits-1-0-4", "1", "0", "4"),
    "a slice too many": ("digits-1-1-0", "1", "1"),
    "no number": ("digits-x-0-0", "x"),
    "a number of another script": ("digits-1-0-0-b", "1", "0", "\N{SUPERSCRIPT TWO}"),
}


@pytest.mark.parametrize("forgery", FORGED)
@pytest.mark.parametrize("phase", ["Running", "Failed"])
def test_a_forged_pod_does_not_affect_a_running_gang(forgery: str, phase: str) -> None:
    cluster = given_a_running_gang()
    forge(cluster, *FORGED[forgery])["status"]["phase"] = phase
    before = copied({name: cluster.pods[name] for name in WORKERS})
    for _ in range(10):
        one_pass(cluster)
        cluster.now += timedelta(minutes=2)
    assert {name: cluster.pods[name] for name in WORKERS} == before
    assert (cluster.status.attempt, cluster.status.state) == (1, State.RUNNING)


@pytest.mark.parametrize("forgery", FORGED)
def test_the_gang_restarts_and_succeeds_beside_a_forged_pod(forgery: str) -> None:
    cluster = given_a_running_gang()
    forge(cluster, *FORGED[forgery])
    fails(cluster, WORKERS[1])
    own = until_running(cluster)
    # While no worker of its own runs, nothing tells a forged worker of attempt 7 from those of a status that was lost.
    attempt = 8 if forgery == "a later attempt" else 2
    assert own == [f"digits-{attempt}-0-{host}" for host in range(4)]
    for name in own:
        kubelet.end(cluster, cluster.pods[name])
    one_pass(cluster)
    assert (cluster.status.attempt, cluster.status.state) == (attempt, State.SUCCEEDED)
    assert cluster.status.restarts.total == 1


def test_a_pod_created_before_its_attempt_does_not_become_a_worker() -> None:
    cluster = given_a_running_gang()
    forge(cluster, "digits-2-0-0", "2")
    is_seen_to_fail(cluster, WORKERS[1])
    assert cluster.status.attempt == 3
    assert "delete Pod digits-2-0-0" in described(look(cluster))
    assert until_running(cluster) == [f"digits-3-0-{host}" for host in range(4)]


@pytest.mark.parametrize("label", ["attempt", "slice-index", "host-index"])
def test_a_worker_that_loses_a_label_stays_that_worker(label: str) -> None:
    cluster = given_a_running_gang()
    del cluster.pods[WORKERS[2]]["metadata"]["labels"][f"tpu-operator.dev/{label}"]
    assert described(look(cluster)) == []
    assert (cluster.status.attempt, cluster.status.state) == (1, State.RUNNING)


def test_a_worker_that_is_hidden_by_a_lost_label_is_named(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_created_gang()
    hidden = cluster.pods[WORKERS[2]]
    del hidden["metadata"]["labels"]["tpu-operator.dev/job-name"]
    operator = Operator(cluster, cluster.inboxes)
    view = [pod for pod in cluster.read()[1] if pod["metadata"]["name"] != WORKERS[2]]
    operator.work(seen=(cluster.read()[0], view))
    assert cluster.status.state == State.BLOCKED
    assert ready_message(cluster) == snapshot
