"""An operator whose watch of pods is later than its watch of the job."""

from datetime import timedelta

import pytest

from tests.planner import kubelet
from tests.planner.checks import test_entry_check as checks
from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import Operator, Pass
from tests.planner.scheduler import place_all
from tpu_training_operator.api.status import State

ALL = 10**6
NODES = [f"node-{number}" for number in range(4)]


def all_start(cluster: ModelCluster) -> None:
    place_all(cluster, NODES, list(cluster.pods.values()))
    for pod in list(cluster.pods.values()):
        kubelet.make_ready(cluster, pod)


def knowing_only_the_job(late: Operator) -> Pass:
    late.hear(jobs=ALL, pods=0)
    return late.work(has_heard_all=False)


def given_a_running_gang() -> tuple[ModelCluster, Operator, Operator]:
    """Returns an operator that has heard of nothing, and the one that has started the gang."""
    cluster = ModelCluster()
    late, other = Operator(cluster), Operator(cluster)
    for _ in range(2):
        other.work()
    all_start(cluster)
    other.work()
    return cluster, late, other


def test_the_gang_of_another_operator_is_not_taken_for_one_that_has_lost_its_workers() -> None:
    cluster, late, _ = given_a_running_gang()
    assert cluster.status.state is State.RUNNING
    done = knowing_only_the_job(late)
    assert (cluster.status.attempt, cluster.status.last_failure, done.effects) == (1, None, [])


def test_workers_are_not_created_beside_those_of_an_earlier_attempt() -> None:
    cluster, late, other = given_a_running_gang()
    kubelet.end(cluster, next(iter(cluster.pods.values())), code=137)
    other.work()
    assert cluster.status.attempt == 2
    done = knowing_only_the_job(late)
    assert not [effect for effect in done.effects if effect.startswith("create Pod")]
    assert {pod["metadata"]["labels"]["tpu-operator.dev/attempt"] for pod in cluster.pods.values()} <= {"1"}


def test_the_failed_worker_keeps_its_log_although_it_is_last_known_to_run() -> None:
    cluster, late, other = given_a_running_gang()
    late.hear(jobs=ALL, pods=ALL)
    failed, *peers = sorted(cluster.pods)
    kubelet.end(cluster, cluster.pods[failed], code=137)
    other.work()
    assert cluster.status.last_failure.pod == failed
    done = knowing_only_the_job(late)
    assert sorted(done.effects) == [f"delete Pod/{name}" for name in peers]
    assert failed in cluster.pods


@pytest.mark.parametrize("suspended", [False, True])
def test_the_entry_check_keeps_its_log_although_it_is_last_known_to_run(suspended: bool) -> None:
    cluster = checks.given_a_check(checks.AUTO)
    late, other = Operator(cluster), Operator(cluster)
    kubelet.start(cluster, cluster.pods[checks.POD])
    late.hear(jobs=ALL, pods=ALL)
    kubelet.end(cluster, cluster.pods[checks.POD])
    for _ in range(9):
        other.work()
    assert cluster.status.attempt == 1
    if suspended:
        cluster.edit_run_policy(suspend=True)
        other.work()
        assert cluster.status.state is State.SUSPENDED
    knowing_only_the_job(late)
    assert checks.POD in cluster.pods


def test_an_operator_knows_what_it_has_done_before_a_watch_tells_it() -> None:
    cluster = ModelCluster()
    alone = Operator(cluster)
    done = [alone.work(has_heard_all=False) for _ in range(3)]
    assert [effect.split("/")[0] for effect in done[1].effects].count("create Pod") == len(cluster.pods) > 0
    assert [each.reads for each in done] == [("list Pod",), ("get TPUTrainingJob",), ()]


@pytest.mark.parametrize("meanwhile", ["a heard edit", "an unheard edit", "somebody creates a worker"])
def test_the_first_workers_are_created_without_another_list_only_if_nothing_has_happened(meanwhile: str) -> None:
    cluster = ModelCluster()
    alone, other = Operator(cluster), Operator(cluster)
    alone.work()
    if meanwhile == "somebody creates a worker":
        other.work(lives_for=4)
        assert len(cluster.pods) == 1
    else:
        cluster.edit_run_policy(startDeadlineSeconds=60)
    done = alone.work(has_heard_all=meanwhile != "an unheard edit")
    assert "list Pod" in done.reads


def test_workers_of_an_attempt_that_is_over_are_not_created_although_the_present_pods_are_gone() -> None:
    """On old news the gang is to be released; its pods are read, and there are none: another operator was faster."""
    cluster = ModelCluster({"spec.runPolicy": {"startDeadlineSeconds": 60}})
    late, other = Operator(cluster), Operator(cluster)
    for _ in range(2):
        other.work()
    place_all(cluster, NODES, list(cluster.pods.values())[:1])
    late.hear(jobs=ALL, pods=ALL)
    cluster.now += timedelta(seconds=61)
    for _ in range(2):
        other.work()
        kubelet.sweep(cluster)
    assert (cluster.status.attempt, cluster.pods) == (2, {})
    done = late.work(has_heard_all=False)
    assert not [effect for effect in done.effects if effect.startswith("create Pod")]
