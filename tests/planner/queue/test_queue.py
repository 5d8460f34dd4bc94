"""A job in one of Kueue's queues, step by step."""

import re
from datetime import timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.planner import kubelet, kueue
from tests.planner.model_cluster import ModelCluster, copied
from tests.planner.operators import look, one_pass
from tests.planner.story import (
    all_finish,
    all_passes,
    described,
    given_a_job,
    ready_message,
    reason,
    resume,
    suspend,
)
from tpu_training_operator.api.conditions import ConditionType
from tpu_training_operator.api.status import State
from tpu_training_operator.domain.cluster_state.observed import format_time

GIVEN_UP = ["DeactivatedDueToAdmissionCheck", "DeactivatedDueToRequeuingLimitExceeded"]


def given_a_queued_job(changes: dict[str, Any] | None = None, *, listens: bool = False) -> ModelCluster:
    cluster = given_a_job(changes, listens=listens)
    kueue.put_in_queue(cluster)
    one_pass(cluster)
    return cluster


def given_a_running_job(changes: dict[str, Any] | None = None) -> ModelCluster:
    cluster = given_a_queued_job(changes)
    kueue.admit(cluster)
    all_passes(cluster)
    return cluster


def test_a_job_without_a_queue_makes_no_request_about_one() -> None:
    cluster = given_a_job()
    for _ in range(4):
        one_pass(cluster)
        reads = cluster.operator._connection.requests.reads
        assert not [read for read in reads if "Workload" in read or "Flavor" in read]
    assert kueue.workload(cluster) is None


def test_a_queued_job_has_a_workload_for_all_its_workers_and_no_worker() -> None:
    cluster = given_a_queued_job()
    body = kueue.seen(cluster).raw
    (pod_set,) = body["spec"]["podSets"]
    assert (body["spec"]["queueName"], pod_set["count"]) == ("research", 4)
    assert pod_set["template"]["spec"]["containers"][0]["resources"]["limits"] == {"google.com/tpu": "4"}
    assert cluster.status.state is State.QUEUED
    assert cluster.status.attempt == 0
    assert cluster.pods == {}
    assert one_pass(cluster).again == timedelta(seconds=15)
    assert cluster.pods == {}


def test_the_status_says_in_kueues_words_why_the_job_waits() -> None:
    cluster = given_a_queued_job()
    kueue.pend(cluster, "WaitingForQuota", "insufficient unused quota for google.com/tpu in flavor v5e-spot")
    one_pass(cluster)
    expected = "queue research: WaitingForQuota: insufficient unused quota for google.com/tpu in flavor v5e-spot"
    assert ready_message(cluster) == expected


def test_reserved_quota_is_not_enough(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_queued_job()
    check = {"name": "dws", "state": "Pending", "message": "the request is not provisioned yet"}
    kueue.reserve(cluster, admissionChecks=[check])
    all_passes(cluster)
    assert (cluster.status.attempt, cluster.pods) == (0, {})
    assert ready_message(cluster) == snapshot


def test_an_admitted_job_runs_where_its_flavor_is() -> None:
    cluster = given_a_running_job()
    assert cluster.status.state is State.RUNNING
    for pod in cluster.pods.values():
        assert pod["spec"]["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
        assert kueue.FLAVOR["spec"]["tolerations"][0] in pod["spec"]["tolerations"]
        kueue_labels = [key for key in pod["metadata"]["labels"] if "kueue" in key]
        assert kueue_labels == []


def test_what_admission_checks_ask_for_reaches_the_pods() -> None:
    cluster = given_a_queued_job()
    annotations = {"autoscaling.x-k8s.io/consume-provisioning-request": "digits-1"}
    update = {"name": "main", "annotations": annotations, "nodeSelector": {"zone": "a"}}
    kueue.admit(cluster, admissionChecks=[{"name": "dws", "state": "Ready", "podSetUpdates": [update]}])
    all_passes(cluster)
    assert len(cluster.pods) == 4
    for pod in cluster.pods.values():
        assert annotations.items() <= pod["metadata"]["annotations"].items()
        assert pod["spec"]["nodeSelector"]["zone"] == "a"


@pytest.mark.parametrize(
    ("selector", "values"),
    [
        ({"cloud.google.com/gke-tpu-topology": "2x2"}, ["'4x4'", "'2x2'"]),
        ({"cloud.google.com/gke-spot": "false"}, ["'true'", "'false'"]),
    ],
    ids=["topology", "spot"],
)
def test_a_conflict_of_values_is_said_and_nothing_is_created(
    selector: dict[str, str], values: list[str], snapshot: SnapshotAssertion
) -> None:
    cluster = given_a_queued_job()
    update = {"name": "main", "nodeSelector": selector}
    kueue.admit(cluster, admissionChecks=[{"name": "dws", "state": "Ready", "podSetUpdates": [update]}])
    all_passes(cluster)
    assert cluster.pods == {}
    assert (cluster.status.state, reason(cluster.status)[1]) == (State.BLOCKED, "PlacementConflict")
    assert re.findall(r"'[^']+'", ready_message(cluster)) == values
    assert ready_message(cluster) == snapshot


def test_an_evicted_gang_saves_and_stops_before_its_quota_is_given_back() -> None:
    cluster = given_a_running_job()
    kueue.evict(cluster)
    one_pass(cluster)
    assert cluster.status.state is State.QUEUED
    assert reason(cluster.status, ConditionType.ADMITTED) == ("False", "Evicted")
    assert len(cluster.pods) == 4
    assert described(look(cluster)) == [f"delete Pod digits-1-0-{host}" for host in range(4)]
    one_pass(cluster)
    assert all("deletionTimestamp" in pod["metadata"] for pod in cluster.pods.values())
    assert kueue.seen(cluster).holds_quota
    kubelet.sweep(cluster)
    one_pass(cluster)
    assert not kueue.seen(cluster).holds_quota
    assert kueue.seen(cluster).condition("Requeued")["status"] == "True"
    assert cluster.status.restarts.by_class == {}


@pytest.mark.parametrize("what", ["evicted", "suspended"])
def test_workers_that_never_had_a_node_hold_no_quota_although_a_finalizer_keeps_them(what: str) -> None:
    cluster = given_a_queued_job()
    kueue.admit(cluster)
    for _ in range(3):
        one_pass(cluster)
    assert len(cluster.pods) == 4
    for pod in cluster.pods.values():
        deleted = {"deletionTimestamp": format_time(cluster.now), "deletionGracePeriodSeconds": 0}
        pod["metadata"] |= deleted | {"finalizers": ["example.com/audit"]}
    if what == "evicted":
        kueue.evict(cluster)
    cluster.edit_run_policy(suspend=what == "suspended")
    for _ in range(4):
        one_pass(cluster)
        kueue.works(cluster, has_room=False)
    assert (kueue.seen(cluster).holds_quota, len(cluster.pods)) == (False, 4)


def test_a_job_that_is_admitted_again_begins_its_next_attempt() -> None:
    cluster = given_a_running_job()
    kueue.evict(cluster, "PodsReadyTimeout")
    all_passes(cluster, 4)
    assert kueue.seen(cluster).condition("Requeued")["status"] == "False"
    kueue.works(cluster)
    all_passes(cluster)
    assert (cluster.status.state, cluster.status.attempt) == (State.RUNNING, 2)


def test_a_restart_keeps_the_workload_and_its_quota() -> None:
    cluster = given_a_running_job()
    before = kueue.seen(cluster).raw["metadata"]["uid"]
    assert pods_ready(cluster) == ("True", "Started")
    kubelet.end(cluster, cluster.pods["digits-1-0-2"], 137)
    for _ in range(3):
        one_pass(cluster)
    assert kueue.seen(cluster).holds_quota
    assert pods_ready(cluster) == ("False", "WaitForRecovery")
    kubelet.sweep(cluster)
    cluster.now += timedelta(minutes=10)
    all_passes(cluster)
    assert (cluster.status.attempt, cluster.status.state) == (2, State.RUNNING)
    assert kueue.seen(cluster).raw["metadata"]["uid"] == before
    assert pods_ready(cluster) == ("True", "Recovered")


def pods_ready(cluster: ModelCluster) -> tuple[str, str]:
    found = kueue.seen(cluster).condition("PodsReady")
    return str(found.get("status")), str(found.get("reason"))


def test_a_gang_that_starts_is_known_to_wait() -> None:
    cluster = given_a_queued_job()
    kueue.admit(cluster)
    one_pass(cluster)
    one_pass(cluster)
    assert len(cluster.pods) == 4
    assert pods_ready(cluster) == ("False", "WaitForStart")


@pytest.mark.parametrize(("code", "said"), [(0, "Succeeded"), (1, "Failed")])
def test_the_workload_has_finished_when_no_worker_is_active(code: int, said: str) -> None:
    cluster = given_a_running_job({"spec.runPolicy": {"restart": {"limits": [{"class": "Infrastructure", "max": 0}]}}})
    if code:
        kubelet.end(cluster, cluster.pods["digits-1-0-0"], 137)
    else:
        all_finish(cluster)
    one_pass(cluster)
    assert str(cluster.status.state) == said
    one_pass(cluster)
    if code:
        assert not kueue.seen(cluster).is_finished
        kubelet.sweep(cluster)
        one_pass(cluster)
    assert kueue.seen(cluster).condition("Finished")["reason"] == said
    assert reason(cluster.status, ConditionType.ADMITTED) == ("False", "QuotaReleased")
    assert described(look(cluster)) == []


def test_a_suspended_job_leaves_the_queue_and_a_resumed_one_returns() -> None:
    cluster = given_a_running_job()
    suspend(cluster)
    one_pass(cluster)
    assert kueue.seen(cluster).is_admitted, "its workers still save"
    kubelet.sweep(cluster)
    one_pass(cluster)
    assert not kueue.seen(cluster).is_active
    kueue.works(cluster)
    all_passes(cluster, 2)
    assert not kueue.seen(cluster).holds_quota
    assert (cluster.status.state, cluster.pods) == (State.SUSPENDED, {})
    resume(cluster)
    assert cluster.status.state is State.QUEUED
    assert kueue.seen(cluster).is_active
    kueue.works(cluster)
    all_passes(cluster)
    assert (cluster.status.state, cluster.status.attempt) == (State.RUNNING, 2)


def test_a_job_whose_workers_have_changed_while_it_was_suspended_asks_for_other_quota() -> None:
    cluster = given_a_running_job()
    before = kueue.seen(cluster)
    suspend(cluster)
    kubelet.sweep(cluster)
    all_passes(cluster, 2)
    kueue.works(cluster)
    cluster.edit_trainer(resources={"limits": {"memory": "9Gi"}}, tolerations=[{"key": "team", "operator": "Exists"}])
    cluster.edit_run_policy(suspend=False)
    all_passes(cluster, 2)
    after = kueue.seen(cluster)
    assert (after.name, after.uid != before.uid, after.is_active) == (before.name, True, True)
    (pod_set,) = after.raw["spec"]["podSets"]
    assert pod_set["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] == "9Gi"
    assert cluster.status.state is State.QUEUED
    kueue.admit(cluster)
    all_passes(cluster)
    assert (cluster.status.state, cluster.status.attempt) == (State.RUNNING, 2)


def test_quota_counts_the_workers_that_still_stop_before_others_are_asked_for() -> None:
    """As in a job that a change has made Invalid before it came to rest."""
    cluster = given_a_running_job()
    before = kueue.seen(cluster).uid
    suspend(cluster)
    cluster.edit_trainer(resources={"limits": {"memory": "9Gi"}})
    resume(cluster)
    one_pass(cluster)
    assert (kueue.seen(cluster).uid, kueue.seen(cluster).is_admitted) == (before, True)
    assert "waiting for 4 workers to stop" in ready_message(cluster)
    kubelet.sweep(cluster)
    all_passes(cluster, 2)
    assert kueue.seen(cluster).uid != before
    kueue.admit(cluster)
    all_passes(cluster)
    assert (cluster.status.state, cluster.status.attempt) == (State.RUNNING, 2)


def test_a_job_suspended_from_the_start_has_no_workload_and_holds_no_quota() -> None:
    cluster = given_a_queued_job({"spec.runPolicy": {"suspend": True}})
    all_passes(cluster)
    assert kueue.workload(cluster) is None


def test_a_job_that_kueue_has_deactivated_says_how_to_go_on() -> None:
    cluster = given_a_running_job()
    kueue.workload(cluster)["spec"]["active"] = False
    kueue.works(cluster)
    all_passes(cluster, 5)
    assert not kueue.seen(cluster).holds_quota
    assert not kueue.seen(cluster).is_active, "only its owner may activate it again"
    assert (cluster.status.state, reason(cluster.status)[1]) == (State.BLOCKED, "Deactivated")
    assert "suspend and resume the job" in ready_message(cluster)


@pytest.mark.parametrize("why", ["Deactivated", *GIVEN_UP])
def test_a_job_that_was_deactivated_returns_to_the_queue_once_it_is_suspended_and_resumed(why: str) -> None:
    cluster = given_a_running_job()
    kueue.workload(cluster)["spec"]["active"] = False
    kueue.evict(cluster, why)
    all_passes(cluster, 5)
    assert cluster.status.state is State.BLOCKED
    for is_wanted in (True, False):
        cluster.edit_run_policy(suspend=is_wanted)
        all_passes(cluster, 2)
    kueue.works(cluster)
    all_passes(cluster)
    assert (cluster.status.state, cluster.status.attempt) == (State.RUNNING, 2)


def test_a_gang_whose_workload_is_deactivated_says_so_before_kueue_does(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_running_job()
    kueue.workload(cluster)["spec"]["active"] = False
    one_pass(cluster)
    assert ready_message(cluster) == snapshot


def test_a_job_that_was_evicted_says_why_and_then_what_it_lacks_now() -> None:
    cluster = given_a_running_job()
    kueue.evict(cluster)
    all_passes(cluster, 4)
    evicted = "evicted by Kueue, Preempted: Preempted to accommodate a workload of higher priority"
    assert ready_message(cluster) == f"queue research: {evicted}"
    kueue.pend(cluster, *kueue.BUSY)
    one_pass(cluster)
    assert ready_message(cluster) == f"queue research: {': '.join(kueue.BUSY)}; before that, {evicted}"


def test_a_resumed_job_no_longer_says_that_it_was_deactivated(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_running_job()
    for is_wanted in (True, False):
        cluster.edit_run_policy(suspend=is_wanted)
        all_passes(cluster, 3)
        kueue.works(cluster, has_room=False)
        all_passes(cluster, 2)
    assert ready_message(cluster) == snapshot
    kueue.pend(cluster, *kueue.BUSY)
    one_pass(cluster)
    assert ready_message(cluster) == f"queue research: {': '.join(kueue.BUSY)}"


def test_a_gang_whose_workload_is_deleted_stops_and_queues_again() -> None:
    cluster = given_a_running_job()
    name = kueue.seen(cluster).name
    del cluster.others[f"Workload/{name}"]
    all_passes(cluster, 2)
    assert kueue.workload(cluster) is None, "while workers are active"
    all_passes(cluster, 2)
    assert kueue.workload(cluster) is not None
    assert (cluster.status.state, cluster.pods) == (State.QUEUED, {})


def test_a_lost_status_of_an_admitted_gang_stops_nobody() -> None:
    cluster = given_a_running_job()
    uids = {pod["metadata"]["uid"] for pod in cluster.pods.values()}
    cluster.job["status"] = {}
    cluster.now += timedelta(minutes=10)
    all_passes(cluster)
    assert {pod["metadata"]["uid"] for pod in cluster.pods.values()} == uids
    assert cluster.status.state is State.RUNNING
    assert reason(cluster.status, ConditionType.ADMITTED) == ("True", "Admitted")


def test_a_job_that_changes_its_queue_before_admission_waits_in_the_other() -> None:
    cluster = given_a_queued_job()
    cluster.job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "production"
    one_pass(cluster)
    assert kueue.seen(cluster).queue == "production"


CLASSES = {
    f"{kind}/{name}": {"kind": kind, "value": value, "metadata": {"name": name}}
    for kind, name, value in (("WorkloadPriorityClass", "urgent", 1000), ("PriorityClass", "high", 7))
}


@pytest.mark.parametrize("before", [{}, {"spec.trainer.priorityClassName": "high"}])
def test_a_class_that_is_named_while_the_job_waits_changes_its_priority(before: dict[str, Any]) -> None:
    cluster = given_a_job(before)
    cluster.others |= copied(CLASSES)
    kueue.put_in_queue(cluster)
    one_pass(cluster)
    cluster.job["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] = "urgent"
    one_pass(cluster)
    spec = kueue.seen(cluster).raw["spec"]
    assert (spec["priority"], spec["priorityClassRef"]["name"]) == (1000, "urgent")
    assert described(look(cluster)) == []


def test_an_admitted_job_keeps_its_priority() -> None:
    cluster = given_a_running_job()
    cluster.job["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] = "urgent"
    all_passes(cluster, 3)
    assert "priorityClassRef" not in kueue.seen(cluster).raw["spec"]
    assert cluster.status.state is State.RUNNING


def test_a_class_that_does_not_exist_is_said(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_queued_job()
    cluster.job["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] = "urgent"
    one_pass(cluster)
    assert ready_message(cluster) == snapshot


def test_a_missing_flavor_is_said(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_queued_job()
    cluster.flavors.clear()
    kueue.admit(cluster)
    all_passes(cluster)
    assert cluster.pods == {}
    assert ready_message(cluster) == snapshot


def test_queued_provisioning_without_a_queue_is_refused(snapshot: SnapshotAssertion) -> None:
    slices = {"acceleratorType": "v5litepod-16", "provisioning": {"type": "Queued"}}
    cluster = given_a_job({"spec.slice": slices})
    one_pass(cluster)
    assert cluster.status.state is State.INVALID
    assert ready_message(cluster) == snapshot
    with_queue = given_a_queued_job({"spec.slice": slices})
    assert with_queue.status.state is State.QUEUED
