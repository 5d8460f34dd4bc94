"""A job in a queue that may run on several slices: which one it asks Kueue for, and when it asks for another."""

from datetime import timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.planner import kubelet, kueue
from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import look, one_pass
from tests.planner.story import (
    all_are_ready,
    all_finish,
    described,
    given_a_job,
    later,
    ready_message,
    reason,
    some_passes,
)
from tpu_training_operator.api.conditions import ConditionType
from tpu_training_operator.api.status import State

ALTERNATIVES = [
    {"slice": {"acceleratorType": "v5litepod-8"}, "waitForPreviousSeconds": 600},
    {"slice": {"acceleratorType": "v6e-16"}, "waitForPreviousSeconds": 1200},
]
THREE = {"spec.placement": {"alternatives": ALTERNATIVES}, "spec.checkpoint": {"uri": "gs://bucket/jobs"}}
GROWING = {
    **THREE,
    "spec.placement": {"alternatives": ALTERNATIVES, "returnToPreferred": "AtCheckpoint", "minRunSeconds": 600},
}
BUSY = ("WaitingForQuota", "couldn't assign flavors to pod set main: insufficient unused quota for google.com/tpu")


def given_a_queued_job(changes: dict[str, Any]) -> ModelCluster:
    cluster = given_a_job(changes)
    kueue.put_in_queue(cluster)
    one_pass(cluster)
    kueue.pend(cluster, *BUSY)
    one_pass(cluster)
    return cluster


def given_a_gang_on(number: int, changes: dict[str, Any]) -> ModelCluster:
    """After waits in the queue for the slices before."""
    cluster = given_a_queued_job(changes)
    while where(cluster) != number:
        waits(cluster, 30)
    kueue.admit(cluster, number)
    goes_on(cluster)
    assert cluster.status.state is State.RUNNING
    return cluster


def goes_on(cluster: ModelCluster, times: int = 6, free: tuple[int, ...] = ()) -> None:
    for _ in range(times):
        one_pass(cluster)
        kubelet.sweep(cluster)
        all_are_ready(cluster)
        kueue.works(cluster, free=free)


def waits(cluster: ModelCluster, minutes: float) -> None:
    cluster.now += timedelta(minutes=minutes)
    goes_on(cluster, 4)


def where(cluster: ModelCluster) -> int:
    placement = cluster.status.placement
    return placement.option_index if placement else 0


def asked(cluster: ModelCluster) -> list[tuple[int, int]]:
    """The Workloads: which slice, and for how many hosts."""
    return [
        (number, kueue.seen(cluster, number).raw["spec"]["podSets"][0]["count"]) for number in kueue.numbers(cluster)
    ]


def test_a_job_asks_for_the_slice_that_it_wishes_and_then_for_the_next_one(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_queued_job(THREE)
    assert asked(cluster) == [(0, 4)]
    later(cluster, minutes=10, seconds=-1)
    assert (asked(cluster), where(cluster)) == ([(0, 4)], 0)
    assert "T12:10:00Z" in ready_message(cluster)
    assert ready_message(cluster) == snapshot
    later(cluster, seconds=1)
    assert (cluster.status.attempt, where(cluster), cluster.status.state) == (1, 1, State.QUEUED)
    assert reason(cluster.status, ConditionType.ADMITTED) == ("False", "Queued")
    assert "600 s" in ready_message(cluster)
    assert ready_message(cluster) == snapshot
    one_pass(cluster)
    assert asked(cluster) == []
    one_pass(cluster)
    assert asked(cluster) == [(1, 2)]
    assert kueue.seen(cluster).raw["spec"]["queueName"] == "research"
    assert cluster.pods == {}


def test_the_gang_runs_on_the_slice_that_kueue_admits() -> None:
    cluster = given_a_gang_on(1, THREE)
    assert sorted(cluster.pods) == ["digits-2-0-0", "digits-2-0-1"]
    assert (asked(cluster), cluster.status.restarts.total) == ([(1, 2)], 0)
    placement, goodput = cluster.status.placement, cluster.status.goodput
    assert [(one.from_, one.to, one.reason) for one in placement.moves] == [(0, 1, "NoCapacity")]
    assert goodput.queue == 30 * 60


NO_FLAVOR = "flavor v6e doesn't match node affinity"
NO_QUOTA = (
    "insufficient quota for google.com/tpu in flavor v5e, previously considered podsets requests (0) + current podset"
    " request (16) > maximum capacity (8)"
)
FITS_NEVER = [
    ("ExceedsMaxQuota", NO_QUOTA),
    ("NoMatchingFlavor", NO_FLAVOR),
    ("Pending", f"couldn't assign flavors to pod set main: {NO_FLAVOR}, {NO_QUOTA}"),
    ("Pending", "couldn't assign flavors to pod set main: resource google.com/tpu unavailable in ClusterQueue"),
]
FITS_LATER = [
    BUSY,
    kueue.BUSY,
    ("Pending", "flavor v6e doesn't match node affinity, insufficient unused quota for google.com/tpu in flavor v5e"),
    ("WaitingForPreemptedWorkloads", "Pending the preemption of 1 workload(s)"),
]


@pytest.mark.parametrize("said", [*FITS_NEVER, *FITS_LATER])
def test_what_kueue_will_never_admit_is_not_waited_for(said: tuple[str, str]) -> None:
    cluster = given_a_queued_job(THREE)
    kueue.pend(cluster, *said)
    one_pass(cluster)
    assert where(cluster) == (1 if said in FITS_NEVER else 0)
    if said in FITS_NEVER:
        placement = cluster.status.placement
        assert placement.moves[-1].reason == "NotAdmitted"
        assert f"quota for v5litepod-16: {said[0]}" in ready_message(cluster)


@pytest.mark.parametrize("why", ["Misconfigured", "Inadmissible", "Suspended", "deactivated", "kept out"])
def test_a_job_whose_queue_does_not_work_asks_for_no_other_slice(why: str) -> None:
    cluster = given_a_queued_job(THREE)
    if why == "deactivated":
        kueue.workload(cluster)["spec"]["active"] = False
    elif why == "kept out":
        kueue.pend(cluster, "Pending", "Workload namespace doesn't match ClusterQueue selector")
    else:
        kueue.pend(cluster, why, "LocalQueue research does not exist")
    waits(cluster, 600) if why == "deactivated" else None
    later(cluster, hours=10)
    assert (where(cluster), asked(cluster)) == (0, [(0, 4)])


def test_a_job_about_which_kueue_says_nothing_waits_no_longer_than_any_other(snapshot: SnapshotAssertion) -> None:
    """Kueue 0.18 and later does not look at a new Workload that is like one for which it has just found no room."""
    cluster = given_a_job(THREE)
    kueue.put_in_queue(cluster)
    one_pass(cluster)
    later(cluster, minutes=10, seconds=-1)
    assert where(cluster) == 0
    assert ready_message(cluster) == snapshot
    cluster.now += timedelta(seconds=1)
    for _ in range(3):
        one_pass(cluster)
    assert (where(cluster), asked(cluster)) == (1, [(1, 2)])


GIVEN_UP = ["DeactivatedDueToAdmissionCheck", "DeactivatedDueToRequeuingLimitExceeded"]


@pytest.mark.parametrize(
    ("why", "expected"), [*((why, 1) for why in GIVEN_UP), ("DeactivatedDueToMaximumExecutionTimeExceeded", 0)]
)
def test_a_slice_that_kueue_itself_gives_up_is_left_and_asked_for_again_later(why: str, expected: int) -> None:
    cluster = given_a_queued_job(THREE)
    kueue.reserve(cluster, admissionChecks=[{"name": "dws", "state": "Rejected"}])
    kueue.workload(cluster)["spec"]["active"] = False
    kueue.evict(cluster, why)
    goes_on(cluster)
    assert (where(cluster), asked(cluster)) == (expected, [(expected, [4, 2][expected])])
    if expected:
        placement = cluster.status.placement
        assert f"v5litepod-16: evicted by Kueue, {why}" in placement.moves[-1].why
        waits(cluster, 25)
        waits(cluster, 25)
        assert (asked(cluster), kueue.seen(cluster, 0).is_active) == ([(0, 4)], True)
    else:
        assert cluster.status.state is State.BLOCKED


def test_a_better_slice_that_kueue_gives_up_is_asked_for_again_in_another_turn() -> None:
    cluster = given_a_proof({**GROWING, "spec.placement.alternatives": ALTERNATIVES[:1]})
    kueue.reserve(cluster, 0, admissionChecks=[{"name": "dws", "state": "Rejected"}])
    kueue.workload(cluster, 0)["spec"]["active"] = False
    kueue.evict(cluster, GIVEN_UP[0], 0)
    waits(cluster, 9)
    assert (asked(cluster), kueue.seen(cluster, 0).is_active) == ([(0, 4), (1, 2)], False)
    waits(cluster, 2)
    assert (asked(cluster), kueue.seen(cluster, 0).is_active) == ([(0, 4), (1, 2)], True)
    assert (cluster.status.state, where(cluster)) == (State.RUNNING, 1)


def test_reserved_quota_is_waited_for_while_a_check_brings_its_nodes() -> None:
    cluster = given_a_queued_job(THREE)
    cluster.now += timedelta(minutes=9)
    kueue.reserve(cluster, admissionChecks=[{"name": "dws", "state": "Pending"}])
    later(cluster, minutes=9)
    assert where(cluster) == 0
    later(cluster, hours=2)
    assert where(cluster) == 1


def test_when_no_slice_is_admitted_it_goes_round() -> None:
    cluster = given_a_queued_job(THREE)
    seen = []
    for _ in range(30):
        waits(cluster, 5)
        assert len(asked(cluster)) == 1
        if where(cluster) not in seen[-1:]:
            seen.append(where(cluster))
    assert seen[:5] == [0, 1, 2, 0, 1]


def test_an_evicted_gang_waits_for_its_slice_and_then_takes_the_next_one() -> None:
    cluster = given_a_gang_on(0, THREE)
    waits(cluster, 60)
    kueue.evict(cluster)
    goes_on(cluster)
    assert (cluster.status.state, cluster.pods, asked(cluster)) == (State.QUEUED, {}, [(0, 4)])
    assert not kueue.seen(cluster).holds_quota
    waits(cluster, 9)
    assert where(cluster) == 0
    waits(cluster, 2)
    assert (where(cluster), asked(cluster)) == (1, [(1, 2)])
    goes_on(cluster, free=(1,))
    assert (cluster.status.state, cluster.status.restarts.by_class) == (State.RUNNING, {})
    placement = cluster.status.placement
    assert (placement.moves[-1].reason, len(cluster.pods)) == ("Lost", 2)


def test_an_evicted_gang_that_may_not_leave_its_slice_waits_for_it() -> None:
    cluster = given_a_gang_on(0, {**THREE, "spec.placement": {"alternatives": ALTERNATIVES, "onLoss": "Wait"}})
    kueue.evict(cluster)
    waits(cluster, 60 * 24)
    goes_on(cluster, free=(0,))
    assert (where(cluster), cluster.status.state) == (0, State.RUNNING)


@pytest.mark.parametrize(("on_loss", "then"), [("Wait", 0), ("Move", 1)])
def test_quota_that_comes_back_without_its_nodes_is_waited_for_from_then_on(on_loss: str, then: int) -> None:
    cluster = given_a_gang_on(0, {**THREE, "spec.placement": {"alternatives": ALTERNATIVES, "onLoss": on_loss}})
    kueue.evict(cluster)
    waits(cluster, 9)
    kueue.admit(cluster)
    some_passes(cluster, 5)
    assert (cluster.status.state, len(cluster.pods)) == (State.STARTING, 4)
    later(cluster, minutes=9)
    assert where(cluster) == 0
    later(cluster, minutes=2)
    assert where(cluster) == then


def test_a_job_that_was_suspended_for_days_waits_for_its_own_slice_first() -> None:
    cluster = given_a_gang_on(0, THREE)
    cluster.edit_run_policy(suspend=True)
    waits(cluster, 60 * 24)
    waits(cluster, 60 * 24)
    cluster.edit_run_policy(suspend=False)
    goes_on(cluster)
    assert where(cluster) == 0
    waits(cluster, 11)
    assert where(cluster) == 1


def test_quota_without_nodes_is_left_like_a_full_cluster() -> None:
    cluster = given_a_queued_job(THREE)
    kueue.admit(cluster)
    for _ in range(3):
        one_pass(cluster)
    assert len(cluster.pods) == 4
    later(cluster, minutes=11)
    assert (where(cluster), cluster.status.state) == (1, State.QUEUED)
    assert kueue.seen(cluster, 0).holds_quota, "its workers may still get nodes"
    goes_on(cluster)
    assert (asked(cluster), cluster.pods) == ([(1, 2)], {})


# Growing.


def given_a_proof(changes: dict[str, Any] = GROWING) -> ModelCluster:
    """A gang on the second slice that has asked for the first one."""
    cluster = given_a_gang_on(1, changes)
    assert asked(cluster) == [(1, 2)]
    cluster.now += timedelta(minutes=10)
    goes_on(cluster, 2)
    assert asked(cluster) == [(0, 4), (1, 2)]
    return cluster


def test_a_better_slice_is_asked_for_by_a_second_workload_while_the_gang_trains() -> None:
    cluster = given_a_proof()
    waits(cluster, 24 * 60)
    assert (asked(cluster), cluster.status.state, where(cluster)) == ([(0, 4), (1, 2)], State.RUNNING, 1)
    assert [name for name in cluster.pods if "hold" in name] == []


def test_the_gang_moves_when_kueue_has_admitted_it_and_the_old_quota_goes_with_its_last_worker() -> None:
    cluster = given_a_proof()
    kueue.reserve(cluster, 0, admissionChecks=[{"name": "dws", "state": "Pending"}])
    one_pass(cluster)
    assert where(cluster) == 1, "reserved is not admitted"
    kueue.admit(cluster, 0)
    one_pass(cluster)
    assert (where(cluster), cluster.status.attempt, reason(cluster.status)[1]) == (0, 3, "Moving")
    assert reason(cluster.status, ConditionType.ADMITTED) == ("True", "Admitted")
    one_pass(cluster)
    assert [kueue.seen(cluster, number).holds_quota for number in (0, 1)] == [True, True]
    kubelet.vanish(cluster, cluster.pods["digits-2-0-0"])
    one_pass(cluster)
    assert (sorted(cluster.pods), kueue.numbers(cluster)) == (["digits-2-0-1"], [0, 1])
    kubelet.vanish(cluster, cluster.pods["digits-2-0-1"])
    assert described(look(cluster))[-1].startswith("delete Workload ")
    goes_on(cluster)
    assert (asked(cluster), cluster.status.state) == ([(0, 4)], State.RUNNING)
    assert sorted(cluster.pods) == [f"digits-3-0-{host}" for host in range(4)]
    assert cluster.status.restarts.total == 0


def test_a_better_slice_whose_flavor_contradicts_the_job_gives_its_quota_back_and_the_gang_stays() -> None:
    cluster = given_a_proof()
    update = {"name": "main", "nodeSelector": {"cloud.google.com/gke-tpu-topology": "2x2"}}
    kueue.admit(cluster, 0, admissionChecks=[{"name": "dws", "state": "Ready", "podSetUpdates": [update]}])
    goes_on(cluster)
    assert (where(cluster), cluster.status.state) == (1, State.RUNNING)
    assert not kueue.seen(cluster, 0).is_active
    assert not kueue.seen(cluster, 0).holds_quota
    waits(cluster, 60)
    assert (where(cluster), kueue.seen(cluster, 0).is_active) == (1, False)


@pytest.mark.parametrize("what", ["suspended", "evicted", "finished", "failed"])
def test_the_second_workload_goes_when_the_gang_stops(what: str) -> None:
    cluster = given_a_proof()
    match what:
        case "suspended":
            cluster.edit_run_policy(suspend=True)
        case "evicted":
            kueue.evict(cluster, number=1)
        case "finished":
            all_finish(cluster)
        case "failed":
            kubelet.end(cluster, cluster.pods["digits-2-0-0"], 1)
    goes_on(cluster)
    if what in ("finished", "failed"):
        assert all(kueue.seen(cluster, number).is_finished for number in kueue.numbers(cluster))
    else:
        assert kueue.numbers(cluster) == [1]
    goes_on(cluster, free=(0, 1))
    assert cluster.status.state is {
        "suspended": State.SUSPENDED, "evicted": State.RUNNING, "finished": State.SUCCEEDED, "failed": State.FAILED
    }[what]  # fmt: skip
    if what == "evicted":
        assert where(cluster) == 1


URGENT = {"kind": "WorkloadPriorityClass", "value": 1000, "metadata": {"name": "urgent"}}


@pytest.mark.parametrize("when", ["before it asks", "while it asks"])
def test_a_better_slice_is_asked_for_as_the_present_one_was_whatever_the_labels_say_by_now(when: str) -> None:
    """With a higher priority, Kueue would evict the gang to admit it."""
    cluster = given_a_gang_on(1, GROWING) if when == "before it asks" else given_a_proof()
    cluster.others["WorkloadPriorityClass/urgent"] = dict(URGENT)
    labels = {"kueue.x-k8s.io/priority-class": "urgent", "kueue.x-k8s.io/queue-name": "production"}
    cluster.job["metadata"]["labels"] |= labels
    waits(cluster, 11)
    assert asked(cluster) == [(0, 4), (1, 2)]
    better = kueue.seen(cluster, 0)
    assert (better.queue, better.priority_class) == ("research", "")


def test_a_better_slice_that_an_earlier_version_has_asked_for_with_another_priority_gets_that_of_the_present_one() -> (
    None
):
    cluster = given_a_proof()
    kueue.workload(cluster, 0)["spec"] |= {"priority": 1000, "priorityClassRef": {"name": "urgent"}}
    one_pass(cluster)
    assert kueue.seen(cluster, 0).priority_class == ""


def test_a_gang_that_is_evicted_when_the_better_slice_is_admitted_goes_there() -> None:
    cluster = given_a_proof()
    kueue.admit(cluster, 0)
    kueue.evict(cluster, number=1)
    goes_on(cluster)
    assert (where(cluster), cluster.status.state, asked(cluster)) == (0, State.RUNNING, [(0, 4)])


def test_of_two_better_slices_one_is_asked_for_at_a_time() -> None:
    cluster = given_a_gang_on(2, GROWING)
    seen = []
    for _ in range(40):
        waits(cluster, 5)
        others = [number for number in kueue.numbers(cluster) if number != 2]
        assert len(others) <= 1
        if others not in seen[-1:]:
            seen.append(others)
    assert [number for each in seen for number in each][:4] in ([0, 1, 0, 1], [1, 0, 1, 0])


def test_a_workload_that_somebody_deletes_and_kueue_still_keeps_is_waited_for() -> None:
    """Kueue's finalizer is on every Workload that holds quota."""
    cluster = given_a_gang_on(1, THREE)
    kueue.workload(cluster)["metadata"]["deletionTimestamp"] = "2026-01-15T13:00:00Z"
    goes_on(cluster)
    assert cluster.pods == {}
    name = kueue.seen(cluster, 1).name
    assert f"Workload {name} is being deleted" in ready_message(cluster)
    del cluster.others[f"Workload/{name}"]
    goes_on(cluster, free=(1,))
    assert (cluster.status.state, where(cluster)) == (State.RUNNING, 1)


# Labels.


def test_a_job_without_its_label_asks_for_nothing_new() -> None:
    cluster = given_a_queued_job(THREE)
    cluster.job["metadata"]["labels"].pop("kueue.x-k8s.io/queue-name")
    waits(cluster, 60)
    assert (where(cluster), asked(cluster)) == (0, [(0, 4)])


# The ladder.

STAGES = [
    {"slice": {"acceleratorType": "v5litepod-4"}, "steps": 20, "gates": {"lossFalls": False}},
    {"slice": {"acceleratorType": "v5litepod-8"}, "steps": 20, "gates": {"lossFalls": False}},
]
LADDER = {
    "spec.ladder": {"rungs": STAGES},
    "spec.recipe.tunedOn": {"acceleratorType": "v5litepod-4"},
    "spec.recipe.globalBatchSize": 32,
}
PASSED = (
    '{"outcome": "Succeeded", "step": 300, "examplesPerSecond": 100.0, "metrics": {"loss": 1.0},'
    ' "rung": {"firstLoss": 2.0, "lastLoss": 1.0,'
    ' "averaged": 5, "errorsFallen": 9.0, "recompilations": 0, "notFinite": 0, "findings": {}}}'
)


def test_each_rung_asks_for_its_own_slice_when_the_one_before_has_ended() -> None:
    cluster = given_a_queued_job(LADDER)
    for number, hosts in ((101, 1), (102, 2), (0, 4)):
        goes_on(cluster)
        assert (asked(cluster), cluster.pods if number == 101 else {}) == ([(number, hosts)], {})
        assert cluster.status.state is State.QUEUED
        kueue.admit(cluster)
        goes_on(cluster)
        assert cluster.status.state is State.RUNNING
        assert len(cluster.pods) == hosts
        for pod in cluster.pods.values():
            kubelet.end(cluster, pod, message=PASSED)
        one_pass(cluster)
    goes_on(cluster)
    assert cluster.status.state is State.SUCCEEDED
    assert [stage.verdict for stage in cluster.status.rungs] == ["Passed"] * 3
    assert kueue.seen(cluster, 0).is_finished


def test_a_rung_whose_queue_is_no_longer_named_says_so() -> None:
    cluster = given_a_queued_job(LADDER)
    kueue.admit(cluster)
    goes_on(cluster)
    cluster.job["metadata"]["labels"].pop("kueue.x-k8s.io/queue-name")
    for pod in cluster.pods.values():
        kubelet.end(cluster, pod, message=PASSED)
    goes_on(cluster)
    assert (cluster.status.state, len(kueue.numbers(cluster))) == (State.BLOCKED, 1)
    assert "name the queue again" in ready_message(cluster)
    # Its Workload alone still says that the job was queued, so it stays; its quota goes where Kueue wants it.
    kueue.evict(cluster, "Preempted", 101)
    goes_on(cluster)
    assert (len(kueue.numbers(cluster)), kueue.seen(cluster, 101).holds_quota) == (1, False)


def test_a_ladder_whose_status_is_lost_begins_again_with_the_quota_of_its_first_rung() -> None:
    cluster = given_a_queued_job(LADDER)
    kueue.admit(cluster)
    goes_on(cluster)
    for pod in cluster.pods.values():
        kubelet.end(cluster, pod, message=PASSED)
    goes_on(cluster, free=(102,))
    assert (str(cluster.status.ladder), cluster.status.state) == ("2/3", State.RUNNING)
    cluster.job["status"] = {}
    cluster.now += timedelta(minutes=10)
    goes_on(cluster)
    assert (asked(cluster), cluster.pods, str(cluster.status.ladder)) == ([(101, 1)], {}, "1/3")


# What cannot be.


@pytest.mark.parametrize(("field", "spec"), [("spec.placement", THREE), ("spec.ladder", LADDER)])
def test_multikueue_sends_a_job_under_one_workload(field: str, spec: dict[str, Any]) -> None:
    cluster = given_a_job({**spec, "spec.managedBy": "kueue.x-k8s.io/multikueue"})
    kueue.put_in_queue(cluster)
    one_pass(cluster)
    assert (cluster.status.state, cluster.others) == (State.INVALID, {})
    assert f"{field}: MultiKueue " in ready_message(cluster)
