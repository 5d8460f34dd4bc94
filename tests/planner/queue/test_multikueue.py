"""A job that somebody else runs, and the copy of one that Kueue sends here."""

from datetime import timedelta
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from tests.planner import kueue, multikueue
from tests.planner.model_cluster import ModelCluster, copied
from tests.planner.multikueue import MANAGED
from tests.planner.operators import Crash, Operator, look, one_pass
from tests.planner.story import (
    all_finish,
    all_passes,
    described,
    finish,
    given_a_job,
    later,
    ready_message,
    reason,
    suspend,
)
from tpu_training_operator.api.conditions import ConditionType
from tpu_training_operator.api.status import State
from tpu_training_operator.kube.cluster import Object


def given_a_managed_job(changes: dict[str, Any] | None = None) -> ModelCluster:
    """In a queue of this cluster, and with a Workload."""
    cluster = given_a_job(MANAGED | (changes or {}))
    kueue.put_in_queue(cluster)
    one_pass(cluster)
    return cluster


def given_a_copy() -> ModelCluster:
    """Kueue has admitted its Workload."""
    cluster = multikueue.copy_of(given_a_managed_job())
    kueue.admit(cluster)
    return cluster


@cache
def a_status_elsewhere(*, evicted: bool = False, has_stopped: bool = False, has_ended: bool = False) -> Object:
    """Of a copy that runs, that an eviction stops or has stopped, or that has succeeded."""
    copy = given_a_copy()
    all_passes(copy)
    assert copy.status.state is State.RUNNING
    if evicted:
        kueue.evict(copy)
        one_pass(copy)
        one_pass(copy)
    if has_ended:
        all_finish(copy)
    if has_stopped or has_ended:
        all_passes(copy)
    return copied(copy.job["status"])


def given_a_job_that_runs_elsewhere() -> ModelCluster:
    cluster = given_a_managed_job()
    multikueue.dispatch(cluster)
    multikueue.sync(cluster, a_status_elsewhere())
    one_pass(cluster)
    return cluster


# Here.


def test_a_job_of_another_controller_is_not_touched_and_nothing_is_asked_about_it() -> None:
    cluster = given_a_job({"spec.managedBy": "example.com/somebody"})
    kueue.put_in_queue(cluster)
    all_passes(cluster, 3)
    assert (cluster.others, cluster.pods, cluster.events) == ({}, {}, [])
    assert "status" not in cluster.job
    assert cluster.operator._connection.requests.reads.count("get Workload") == 0


def test_our_own_name_is_as_good_as_none() -> None:
    cluster = given_a_job({"spec.managedBy": "tpu-operator.dev/tpu-training-operator"})
    all_passes(cluster)
    assert cluster.status.state is State.RUNNING


def test_a_job_for_another_cluster_has_a_workload_and_nothing_else(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_managed_job()
    (body,) = cluster.others.values()
    assert body["kind"] == "Workload"
    assert (body["spec"]["podSets"][0]["count"], body["spec"]["queueName"]) == (4, "research")
    kueue.reserve(cluster, admissionChecks=[{"name": "clusters", "state": "Pending", "message": "asks x, y"}])
    one_pass(cluster)
    assert (cluster.status.state, cluster.status.attempt) == (State.QUEUED, 0)
    assert ready_message(cluster) == snapshot


def test_without_a_queue_nothing_happens_but_that_the_job_says_what_is_missing(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_job(MANAGED)
    all_passes(cluster, 3)
    assert (cluster.others, cluster.pods, cluster.status.state) == ({}, {}, State.BLOCKED)
    assert ready_message(cluster) == snapshot
    assert len(cluster.events) == 1
    kueue.put_in_queue(cluster)
    all_passes(cluster, 2)
    assert (cluster.status.state, kueue.numbers(cluster)) == (State.QUEUED, [0])


def a_life_elsewhere(lives_for: int | None) -> tuple[Object, int]:
    """How a job ends that is admitted, evicted, admitted again, suspended and resumed, and succeeds in another cluster;
    and after how many effects of an operator that dies after so many and is started again."""
    cluster = given_a_job(MANAGED)
    kueue.put_in_queue(cluster)
    operator, left, effects = Operator(cluster), lives_for, 0
    running, ended = a_status_elsewhere(), a_status_elsewhere(has_ended=True)
    stopped = a_status_elsewhere(evicted=True, has_stopped=True)
    acts = [
        lambda: None,
        *(lambda: multikueue.dispatch(cluster), lambda: multikueue.sync(cluster, running)),
        *(lambda: kueue.evict(cluster), lambda: multikueue.sync(cluster, stopped)),
        *(lambda: multikueue.dispatch(cluster), lambda: multikueue.sync(cluster, running)),
        *(lambda: cluster.edit_run_policy(suspend=True), lambda: kueue.works(cluster)),
        *(lambda: cluster.edit_run_policy(suspend=False), lambda: kueue.works(cluster)),
        *(lambda: multikueue.sync(cluster, running), lambda: multikueue.sync(cluster, ended)),
    ]
    for act in acts:
        act()
        for _ in range(6):
            done = operator.work(lives_for=left)
            effects += len(done.effects)
            left = None if left is None or isinstance(done.error, Crash) else left - len(done.effects)
            assert cluster.pods == {}
    return {
        "status": cluster.job["status"],
        "others": [_without_versions(body) for body in cluster.workloads()],
    }, effects


def _without_versions(body: Object) -> Object:
    return {**body, "metadata": {"name": body["metadata"]["name"]}}


def test_a_crash_after_any_effect_changes_nothing_for_a_job_of_another_cluster() -> None:
    undisturbed, effects = a_life_elsewhere(None)
    assert effects > 10
    assert undisturbed["status"]["state"] == "Succeeded"
    ends = {effect: a_life_elsewhere(effect)[0] for effect in range(effects + 1)}
    assert {effect: end for effect, end in ends.items() if end != undisturbed} == {}


def test_the_status_of_the_copy_stays_as_kueue_writes_it() -> None:
    cluster = given_a_managed_job()
    multikueue.dispatch(cluster)
    running = a_status_elsewhere()
    multikueue.sync(cluster, running)
    all_passes(cluster)
    assert cluster.job["status"] == running
    assert cluster.pods == {}


def test_kueue_is_told_that_the_workers_elsewhere_are_ready() -> None:
    cluster = given_a_managed_job()
    multikueue.dispatch(cluster)
    one_pass(cluster)
    assert kueue.seen(cluster).condition("PodsReady")["reason"] == "WaitForStart"
    multikueue.sync(cluster, a_status_elsewhere())
    one_pass(cluster)
    assert kueue.seen(cluster).condition("PodsReady")["reason"] == "Started"


def test_an_eviction_here_frees_quota_when_the_copy_has_stopped() -> None:
    cluster = given_a_job_that_runs_elsewhere()
    kueue.evict(cluster)
    one_pass(cluster)
    assert kueue.seen(cluster).holds_quota, "the copy still runs"
    multikueue.sync(cluster, a_status_elsewhere(evicted=True))
    one_pass(cluster)
    assert kueue.seen(cluster).holds_quota, "its workers still save"
    stopped = multikueue.copy_of(cluster)
    one_pass(stopped)
    all_passes(stopped)
    multikueue.sync(cluster, stopped.job["status"])
    one_pass(cluster)
    assert not kueue.seen(cluster).holds_quota
    one_pass(cluster)
    assert (cluster.status.state, cluster.status.attempt) == (State.QUEUED, 0)


def test_a_cluster_that_is_lost_does_not_hold_quota_here_for_ever() -> None:
    cluster = given_a_job_that_runs_elsewhere()
    kueue.evict(cluster, "AdmissionCheck")
    one_pass(cluster)
    assert kueue.seen(cluster).holds_quota
    later(cluster, minutes=11)
    assert not kueue.seen(cluster).holds_quota


def test_a_suspended_job_ends_its_copy_and_a_resumed_one_queues_again() -> None:
    cluster = given_a_job_that_runs_elsewhere()
    suspend(cluster)
    assert multikueue.copy_is_to_go(cluster)
    kueue.works(cluster)
    all_passes(cluster, 3)
    assert not kueue.seen(cluster).holds_quota
    assert (cluster.status.state, reason(cluster.status, ConditionType.SUSPENDED)[0]) == (State.SUSPENDED, "True")
    cluster.edit_run_policy(suspend=False)
    all_passes(cluster, 2)
    assert kueue.seen(cluster).is_active
    assert (cluster.status.state, reason(cluster.status, ConditionType.SUSPENDED)[0]) == (State.QUEUED, "False")


def test_a_job_whose_workers_have_changed_while_it_was_suspended_asks_for_other_quota() -> None:
    cluster = given_a_job_that_runs_elsewhere()
    before = kueue.seen(cluster).uid
    suspend(cluster)
    kueue.works(cluster)
    all_passes(cluster, 3)
    cluster.edit_trainer(resources={"limits": {"memory": "9Gi"}})
    cluster.edit_run_policy(suspend=False)
    all_passes(cluster, 3)
    after = kueue.seen(cluster)
    assert (after.uid != before, after.is_active) == (True, True)
    (pod_set,) = after.raw["spec"]["podSets"]
    assert pod_set["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] == "9Gi"


def test_a_job_that_cannot_start_anywhere_is_told_before_it_is_sent() -> None:
    cluster = given_a_managed_job({"spec.slice": {"acceleratorType": "v5litepod-17"}})
    assert (cluster.status.state, cluster.others) == (State.INVALID, {})


def test_a_job_that_has_ended_elsewhere_lives_here_as_long_as_it_says() -> None:
    cluster = given_a_job_that_runs_elsewhere()
    cluster.edit_run_policy(ttlSecondsAfterFinished=60)
    copy = given_a_copy()
    all_passes(copy)
    all_finish(copy)
    one_pass(copy)
    multikueue.sync(cluster, copy.job["status"])
    assert described(look(cluster)) == []
    cluster.now = copy.now + timedelta(seconds=61)
    assert described(look(cluster)) == ["delete TPUTrainingJob digits"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(["admit", "sync", "stop", "evict", "suspend", "resume", "room", "delete", "hour"]), max_size=12
    )
)
def test_no_order_of_events_gives_a_job_of_others_a_pod(events: list[str]) -> None:
    cluster = given_a_managed_job()
    acts = {
        "admit": lambda: multikueue.dispatch(cluster),
        "sync": lambda: multikueue.sync(cluster, a_status_elsewhere()),
        "stop": lambda: multikueue.sync(cluster, a_status_elsewhere(evicted=True)),
        "evict": lambda: kueue.evict(cluster),
        "suspend": lambda: cluster.edit_run_policy(suspend=True),
        "resume": lambda: cluster.edit_run_policy(suspend=False),
        "room": lambda: kueue.works(cluster),
        "delete": lambda: [cluster.others.pop(name) for name in list(cluster.others)],
        "hour": lambda: setattr(cluster, "now", cluster.now + timedelta(hours=1)),
    }
    for event in events:
        acts[event]()
        one_pass(cluster)
        assert cluster.pods == {}
        assert {body["kind"] for body in cluster.others.values()} <= {"Workload"}


# In the other cluster.


def test_a_copy_runs_under_the_workload_that_kueue_has_made() -> None:
    cluster = given_a_copy()
    name = kueue.seen(cluster).name
    all_passes(cluster)
    assert cluster.status.state is State.RUNNING
    (body,) = [body for body in cluster.others.values() if body["kind"] == "Workload"]
    assert body["metadata"]["name"] == name
    (owner,) = body["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == ("uid-of-the-copy", True)
    assert body["metadata"]["labels"]["kueue.x-k8s.io/multikueue-origin"] == "here"
    assert kueue.seen(cluster).condition("PodsReady")["reason"] == "Started"


def test_an_evicted_copy_stops_before_its_quota_is_given_back() -> None:
    cluster = given_a_copy()
    all_passes(cluster)
    kueue.evict(cluster)
    one_pass(cluster)
    one_pass(cluster)
    assert kueue.seen(cluster).holds_quota
    all_passes(cluster, 2)
    assert not kueue.seen(cluster).holds_quota


def test_a_copy_that_has_ended_stays_until_kueue_deletes_it() -> None:
    cluster = given_a_copy()
    cluster.edit_run_policy(ttlSecondsAfterFinished=1)
    all_passes(cluster)
    finish(cluster)
    one_pass(cluster)
    later(cluster, hours=1)
    assert kueue.seen(cluster).condition("Finished")["reason"] == "Succeeded"
    assert described(look(cluster)) == []


def test_a_copy_without_its_workload_waits_and_makes_none(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_copy()
    cluster.others.clear()
    all_passes(cluster, 3)
    assert (cluster.others, cluster.pods, cluster.status.state) == ({}, {}, State.BLOCKED)
    assert ready_message(cluster) == snapshot


@pytest.mark.parametrize("what", ["count", "limits", "name"])
def test_a_workload_for_less_than_the_job_needs_is_refused(what: str) -> None:
    cluster = given_a_copy()
    body = kueue.workload(cluster)
    (pod_set,) = body["spec"]["podSets"]
    match what:
        case "count":
            pod_set["count"] = 1
        case "limits":
            pod_set["template"]["spec"]["containers"][0]["resources"]["limits"]["google.com/tpu"] = "1"
        case "name":
            pod_set["name"] = "other"
    all_passes(cluster, 3)
    assert (cluster.pods, cluster.status.state) == ({}, State.BLOCKED)
    assert "is for" in ready_message(cluster)


def test_the_workload_of_another_job_is_not_taken() -> None:
    cluster = given_a_copy()
    body = kueue.workload(cluster)
    body["metadata"]["ownerReferences"] = [
        {"apiVersion": "batch/v1", "kind": "Job", "name": "other", "uid": "1", "controller": True}
    ]
    all_passes(cluster, 3)
    assert (cluster.pods, cluster.status.state) == ({}, State.BLOCKED)
    assert "has another owner" in ready_message(cluster)
