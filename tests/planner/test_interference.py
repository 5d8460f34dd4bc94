"""What others do to a job and its workers beside the operator, and that its status tells it as it is."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.planner import kubelet
from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import Operator, Pass, Trouble, look, one_pass
from tests.planner.story import (
    WORKERS,
    described,
    fails,
    given_a_begun_attempt,
    given_a_running_gang,
    ready_message,
    reason,
)
from tpu_training_operator.api.status import State
from tpu_training_operator.domain.cluster_state.observed import format_time
from tpu_training_operator.domain.plan.plan import Plan
from tpu_training_operator.kube.cluster import Object
from tpu_training_operator.kube.errors import Forbidden

# Jobs and namespaces that are being deleted.


def test_a_job_that_a_finalizer_keeps_stops_its_workers_and_says_so(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_running_gang()
    cluster.job["metadata"] |= {"deletionTimestamp": format_time(cluster.now), "finalizers": ["example.com/audit"]}
    fails(cluster, WORKERS[0])
    decided = one_pass(cluster)
    assert described(decided) == [f"delete Pod {name}" for name in WORKERS[1:]]
    assert [event.reason for event in decided.events] == ["Suspended"]
    assert "metadata.finalizers" in ready_message(cluster)
    assert ready_message(cluster) == snapshot
    kubelet.sweep(cluster)
    one_pass(cluster)
    assert (cluster.status.attempt, cluster.status.last_failure, list(cluster.pods)) == (1, None, WORKERS[:1])
    assert one_pass(cluster).again is None


def test_who_orphans_the_workers_of_a_job_keeps_them() -> None:
    cluster = given_a_running_gang()
    cluster.job["metadata"] |= {"deletionTimestamp": format_time(cluster.now), "finalizers": ["orphan"]}
    assert look(cluster) == Plan()


def test_nothing_fails_in_a_namespace_that_is_being_deleted(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_running_gang()
    cluster.others["Namespace/default"] = {
        "kind": "Namespace",
        "metadata": {"name": "default", "deletionTimestamp": format_time(cluster.now)},
    }
    for name in WORKERS[1:]:
        kubelet.delete_by_hand(cluster, cluster.pods[name])
    one_pass(cluster)
    assert (cluster.status.attempt, cluster.status.last_failure) == (1, None)
    assert ready_message(cluster) == snapshot
    for _ in range(3):
        kubelet.sweep(cluster)
        one_pass(cluster)
    assert (cluster.status.attempt, cluster.status.restarts.total, cluster.pods) == (1, 0, {})


def test_a_job_is_not_blocked_by_a_namespace_that_is_being_deleted() -> None:
    cluster = given_a_begun_attempt()
    cluster.others["Namespace/default"] = {
        "kind": "Namespace",
        "metadata": {"name": "default", "deletionTimestamp": format_time(cluster.now)},
    }
    operator = Operator(cluster)
    for _ in range(2):
        operator.work(trouble=Trouble(0, Forbidden(403, "Forbidden", "the namespace is being terminated")))
        cluster.now += timedelta(seconds=10)
    assert reason(cluster.status) == ("False", "BeingDeleted")


# Webhooks.


@pytest.mark.parametrize(
    "changed",
    [
        {"labels": {}},
        {"ownerReferences": []},
    ],
    ids=str,
)
def test_a_webhook_that_strips_a_worker_is_told_at_once(changed: dict[str, Any], snapshot: SnapshotAssertion) -> None:
    cluster = given_a_begun_attempt()
    cluster.mutate = lambda pod: pod["metadata"].update(changed)
    Operator(cluster).work()
    assert ready_message(cluster) == snapshot
    assert (cluster.status.state, cluster.pods) == (State.BLOCKED, {})


def test_a_webhook_that_lets_workers_restart_in_place_is_told_at_once(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_begun_attempt()
    cluster.mutate = lambda pod: pod["spec"].update(restartPolicy="Always")
    Operator(cluster).work()
    assert ready_message(cluster) == snapshot
    assert cluster.pods == {}


def test_a_job_whose_workers_a_webhook_changes_creates_them_only_now_and_then(snapshot: SnapshotAssertion) -> None:
    """Their coming and going is news of the job, and would cause the next pass at once."""
    cluster = given_a_begun_attempt()
    cluster.mutate = lambda pod: pod["spec"].update(restartPolicy="Always")
    operator = Operator(cluster)
    assert created_pods(operator.work())
    assert not created_pods(operator.work())
    assert ready_message(cluster) == snapshot
    cluster.now += timedelta(seconds=30)
    assert created_pods(operator.work())
    cluster.mutate = lambda pod: None
    cluster.now += timedelta(seconds=30)
    operator.work()
    assert list(cluster.pods) == WORKERS


def created_pods(made: Pass) -> list[str]:
    return [effect for effect in made.effects if effect.startswith("create Pod")]


# Workers that are gone, and workers that only seem to be.


def lose_label(cluster: ModelCluster, pod: Object) -> None:
    del pod["metadata"]["labels"]["tpu-operator.dev/job-name"]


def lose_owner(cluster: ModelCluster, pod: Object) -> None:
    pod["metadata"]["ownerReferences"] = []


def lose_node_object(cluster: ModelCluster, pod: Object) -> None:
    """PodGC marks the pods of a node that does not exist, and deletes them at once."""
    disruption = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}
    disruption |= {"message": "PodGC: node no longer exists", "lastTransitionTime": format_time(cluster.now)}
    pod["status"] |= {"phase": "Failed", "conditions": [*pod["status"]["conditions"], disruption]}
    cluster.record()
    kubelet.vanish(cluster, pod)


@pytest.mark.parametrize(
    ("happens", "told"),
    [
        (lose_label, "WorkerHidden"),
        (lose_owner, "WorkerHidden"),
        (lose_node_object, "NodeLost"),
        (kubelet.vanish, "PodDeleted"),
    ],
)
def test_a_missing_worker_is_told_as_what_became_of_it(
    happens: Callable[[ModelCluster, Object], None], told: str, snapshot: SnapshotAssertion
) -> None:
    cluster = given_a_running_gang()
    operator = Operator(cluster)
    operator.work()
    happens(cluster, cluster.pods[WORKERS[2]])
    operator.work()
    failure = cluster.status.last_failure
    assert (failure.pod, failure.reason) == (WORKERS[2], told)
    assert failure.message == snapshot
