"""A running job that becomes Invalid is still bound: by budget, deadline, suspension and Kueue's eviction."""

from datetime import timedelta
from typing import Any

import pytest

from tests.planner import kubelet, kueue
from tests.planner.api_server import accepts
from tests.planner.model_cluster import ModelCluster, copied
from tests.planner.operators import one_pass
from tests.planner.story import (
    given_a_created_gang,
    given_a_job,
    given_a_running_gang,
    passes,
    ready_message,
    some_passes,
)
from tpu_training_operator.api.conditions import ConditionType, find
from tpu_training_operator.api.status import State

HOUR = 3600
OWN_LOOP: dict[str, Any] = {"spec.trainer": {"image": "localhost/own:1", "command": ["python", "loop.py"]}}
POLICY = {"budget": {"chipHours": 1}, "activeDeadlineSeconds": 500}


def made_invalid(cluster: ModelCluster) -> ModelCluster:
    cluster.job["spec"]["slice"] = {"acceleratorType": "v99-16"}
    one_pass(cluster)
    assert cluster.status.state is State.INVALID
    return cluster


def goes_on(cluster: ModelCluster, seconds: int) -> None:
    some_passes(cluster, seconds // 20, seconds=20)


@pytest.mark.parametrize(
    "patch",
    [
        {"mode": "Require"},
        {"mode": "Auto", "dataInRegion": "Require"},
        {"mode": "Auto", "compile": "Require"},
    ],
)
def test_the_api_server_refuses_an_update_that_breaks_a_rule(patch: dict[str, str]) -> None:
    cluster = given_a_running_gang(OWN_LOOP)
    patched = copied(cluster.job)
    patched["spec"]["entryCheck"] = patch
    assert not accepts(cluster.job, patched)
    # One that has broken it since before the rule can still be suspended.
    suspended = copied(patched)
    suspended["spec"]["runPolicy"] = {"suspend": True}
    assert accepts(patched, suspended)


def test_its_budget_stops_it() -> None:
    cluster = made_invalid(given_a_running_gang({"spec.runPolicy": {"budget": {"chipHours": 1}}}))
    # One chip-hour of 16 chips is 225 seconds.
    goes_on(cluster, 400)
    suspended = find(cluster.status.conditions, ConditionType.SUSPENDED)
    assert (suspended.status, suspended.reason, cluster.pods) == ("True", "BudgetExceeded", {})
    assert float(cluster.status.usage.chip_hours) >= 1


def test_a_budget_that_cannot_be_read_is_that_of_the_status() -> None:
    cluster = made_invalid(given_a_running_gang({"spec.runPolicy": {"budget": {"chipHours": 1}}}))
    cluster.job["spec"]["runPolicy"] = "none"
    goes_on(cluster, 400)
    assert cluster.pods == {}


def test_a_budget_that_is_to_fail_it_fails_it() -> None:
    policy = {"budget": {"chipHours": 1, "onExceeded": "Fail"}}
    cluster = made_invalid(given_a_running_gang({"spec.runPolicy": policy}))
    goes_on(cluster, 500)
    assert (cluster.status.state, cluster.pods) == (State.FAILED, {})


def test_its_deadline_fails_it() -> None:
    cluster = made_invalid(given_a_running_gang({"spec.runPolicy": {"activeDeadlineSeconds": 100}}))
    goes_on(cluster, 300)
    assert (cluster.status.state, cluster.pods) == (State.FAILED, {})


def test_it_obeys_an_eviction_and_asks_again_once_it_is_valid() -> None:
    cluster = given_a_job()
    kueue.put_in_queue(cluster)
    for _ in range(6):
        one_pass(cluster)
        kueue.works(cluster)
        for pod in cluster.pods.values():
            kubelet.make_ready(cluster, pod)
    assert cluster.status.state is State.RUNNING
    spec = copied(cluster.job["spec"])
    made_invalid(cluster)
    kueue.evict(cluster)
    goes_on(cluster, 200)
    assert (cluster.pods, cluster.workloads()) == ({}, [])
    cluster.job["spec"] = spec
    for _ in range(6):
        one_pass(cluster)
        kueue.works(cluster)
        for pod in cluster.pods.values():
            kubelet.make_ready(cluster, pod)
    assert (cluster.status.state, cluster.status.attempt) == (State.RUNNING, 2)


def test_a_gang_that_has_lost_a_worker_gives_its_chips_back_until_the_spec_is_valid() -> None:
    cluster = given_a_running_gang()
    spec = copied(cluster.job["spec"])
    made_invalid(cluster)
    kubelet.end(cluster, cluster.pods["digits-1-0-2"], 137)
    goes_on(cluster, 100)
    assert list(cluster.pods) == ["digits-1-0-2"]
    assert "its workers are stopped" in ready_message(cluster)
    cluster.job["spec"] = spec
    one_pass(cluster)
    assert (cluster.status.attempt, cluster.status.state) == (2, State.STARTING)


def loses(cluster: ModelCluster, *parts: str) -> None:
    """Somebody removes these parts of the status; without any, all of it."""
    status = cluster.job["status"]
    cluster.job["status"] = {name: value for name, value in status.items() if parts and name not in parts}
    cluster.touch(cluster.job)


@pytest.mark.parametrize("parts", [("resolved",), ("resolved", "goodput"), ()])
@pytest.mark.parametrize("policy", [{"budget": {"chipHours": 1}}, {"activeDeadlineSeconds": 500}, {}])
def test_a_gang_of_which_nobody_knows_the_size_stops_until_the_spec_is_valid(
    parts: tuple[str, ...], policy: dict[str, Any]
) -> None:
    cluster = given_a_running_gang({"spec.runPolicy": policy})
    spec = copied(cluster.job["spec"])
    made_invalid(cluster)
    loses(cluster, *parts)
    # A wiped status may be an old read for five minutes.
    goes_on(cluster, 400)
    assert cluster.pods == {}
    [note] = [event["note"] for event in cluster.events if event["reason"] == "Suspended"]
    assert "status.resolved was removed" in note
    cluster.job["spec"] = spec
    for _ in range(3):
        one_pass(cluster)
    assert (cluster.status.attempt, len(cluster.pods)) == (2, 4)


def test_a_partly_placed_gang_gives_its_nodes_back_at_its_start_deadline() -> None:
    cluster = given_a_created_gang({"spec.runPolicy": {"startDeadlineSeconds": 100}})
    for name in ("digits-1-0-0", "digits-1-0-1"):
        kubelet.place(cluster, cluster.pods[name])
    made_invalid(cluster)
    assert one_pass(cluster).again == timedelta(seconds=100)
    passes(cluster, 100)
    goes_on(cluster, 100)
    assert cluster.pods == {}
    assert "2 workers" in str(cluster.events)
    assert "100 s" in str(cluster.events)


def test_a_gang_that_does_not_start_on_its_nodes_gives_them_back_after_half_an_hour() -> None:
    cluster = given_a_created_gang()
    for pod in cluster.pods.values():
        kubelet.place(cluster, pod)
    made_invalid(cluster)
    goes_on(cluster, 1700)
    assert len(cluster.pods) == 4
    goes_on(cluster, 300)
    assert cluster.pods == {}


def test_a_job_without_a_run_policy_has_no_budget() -> None:
    cluster = made_invalid(given_a_running_gang({"spec.runPolicy": {"budget": {"chipHours": 1}}}))
    del cluster.job["spec"]["runPolicy"]
    goes_on(cluster, 400)
    assert len(cluster.pods) == 4
