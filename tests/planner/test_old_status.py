"""A status that shows an earlier attempt than the workers have: restored from a backup, or edited."""

from datetime import timedelta

import pytest

from tests.planner.model_cluster import ModelCluster, copied
from tests.planner.operators import one_pass
from tests.planner.story import fails, gang, given_a_created_gang, later, some_passes, until_running
from tpu_training_operator.api.status import State
from tpu_training_operator.kube.cluster import Object

OLD = timedelta(minutes=6)


def given_an_old_status(age: timedelta = OLD) -> tuple[ModelCluster, Object]:
    """Attempt 2 has run for so long. The other is the status of attempt 1 that was starting."""
    cluster = given_a_created_gang()
    backup = copied(cluster.job["status"])
    until_running(cluster)
    fails(cluster, "digits-1-0-1")
    until_running(cluster)
    for pod in cluster.pods.values():
        pod["metadata"]["creationTimestamp"] = (cluster.now - age).strftime("%Y-%m-%dT%H:%M:%SZ")
    # The failed one, which was kept for its log.
    cluster.pods.pop("digits-1-0-1", None)
    return cluster, backup


def restore(cluster: ModelCluster, status: Object) -> None:
    cluster.job["status"] = status
    cluster.touch(cluster.job)


def test_the_next_attempt_replaces_the_workers_and_charges_nothing() -> None:
    cluster, backup = given_an_old_status()
    restore(cluster, backup)
    decided = one_pass(cluster)
    assert [event.reason for event in decided.events] == ["StatusLost"]
    assert (cluster.status.attempt, cluster.status.restarts.total) == (3, 0)
    assert {name[:8] for name in cluster.pods} == {"digits-2"}
    until_running(cluster)
    assert gang(cluster) == sorted(cluster.pods) == [f"digits-3-0-{host}" for host in range(4)]


def test_nothing_is_done_while_the_read_may_be_old() -> None:
    cluster, backup = given_an_old_status(timedelta(minutes=4))
    restore(cluster, backup)
    before = copied(cluster.pods)
    assert one_pass(cluster).again == timedelta(seconds=1)
    assert (cluster.pods, cluster.job["status"]) == (before, backup)
    later(cluster, seconds=60)
    assert cluster.status.attempt == 3


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_suspension_stops_the_workers_that_the_status_does_not_know(is_readable: bool) -> None:
    cluster, backup = given_an_old_status()
    restore(cluster, backup)
    if not is_readable:
        cluster.job["spec"]["slice"] = {"acceleratorType": "v99-16"}
    cluster.edit_run_policy(suspend=True)
    some_passes(cluster, 4, seconds=20)
    assert cluster.pods == {}
    assert cluster.status.state is (State.SUSPENDED if is_readable else State.INVALID)


def test_the_chips_of_workers_that_the_status_does_not_know_count() -> None:
    cluster, backup = given_an_old_status()
    restore(cluster, backup)
    one_pass(cluster)
    goodput = cluster.status.goodput
    assert goodput.chip_seconds.held == 16
