"""A budget of chip-hours: what counts, what happens when it is used up, and how the job goes on."""

import math
import os
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from tests.planner import kubelet
from tests.planner.model_cluster import GRACE, ModelCluster
from tests.planner.operators import look, one_pass
from tests.planner.story import (
    WORKERS,
    described,
    finish,
    get_ready,
    given_a_created_gang,
    given_a_job,
    given_a_running_gang,
    is_seen_to_fail,
    later,
    passes,
    ready_message,
    reason,
    suspend,
    until_running,
)
from tests.unit.jobs import restart_limits
from tests.unit.kstatus import kstatus
from tpu_training_operator.api.conditions import ConditionType, find, is_true
from tpu_training_operator.api.status import ChipSeconds, State
from tpu_training_operator.domain.cluster_state.observed import parse_time
from tpu_training_operator.domain.plan.plan import Plan
from tpu_training_operator.local.run import is_over

# v5litepod-16 has 4 hosts with 4 chips each: one chip-hour lasts 225 s.
CHIPS, HOUR = 16, 225
TICK = 3
SOAK = os.environ.get("SOAK") == "1"
ENDED = ("Succeeded", "Failed")


def budget(chip_hours: int, then: str = "Suspend") -> dict[str, Any]:
    return {"spec.runPolicy": {"budget": {"chipHours": chip_hours, "onExceeded": then}}}


def spent(cluster: ModelCluster) -> ChipSeconds:
    goodput = cluster.status.goodput
    assert goodput.chip_seconds is not None
    return goodput.chip_seconds


def split(cluster: ModelCluster) -> dict[str, int]:
    known = spent(cluster)
    accounts = ("queue", "start", "productive", "wasted", "recovery", "stopping")
    return {account: getattr(known, account) for account in accounts if getattr(known, account)}


def reconciled(cluster: ModelCluster) -> ModelCluster:
    for _ in range(4):
        one_pass(cluster)
    return cluster


def stopped(cluster: ModelCluster, after: float) -> ModelCluster:
    """The workers take `after` seconds to stop."""
    one_pass(cluster)
    one_pass(cluster)
    passes(cluster, after)
    kubelet.sweep(cluster)
    return reconciled(cluster)


def used_up(chip_hours: int = 1, then: str = "Suspend", *, listens: bool = False) -> ModelCluster:
    """10 s after the gang got its nodes, it ran."""
    cluster = given_a_running_gang(budget(chip_hours, then), listens=listens)
    passes(cluster, chip_hours * HOUR)
    return cluster


# What counts.


def test_a_chip_counts_from_when_its_worker_gets_a_node_until_it_has_stopped() -> None:
    cluster = given_a_created_gang()
    passes(cluster, 1000)
    kubelet.place(cluster, cluster.pods[WORKERS[0]])
    passes(cluster, 10)
    for name in WORKERS[1:]:
        kubelet.place(cluster, cluster.pods[name])
    passes(cluster, 5)
    get_ready(cluster)
    assert split(cluster) == {"queue": 4 * 10, "start": CHIPS * 5}
    suspend(cluster)
    one_pass(cluster)
    passes(cluster, 7)
    kubelet.sweep(cluster)
    one_pass(cluster)
    later(cluster, seconds=10**6)
    assert split(cluster)["stopping"] == CHIPS * 7
    assert (spent(cluster).held, cluster.status.usage and cluster.status.usage.chip_hours) == (0, "0.06")


def test_the_wait_between_two_attempts_costs_nothing_and_the_restart_counts_as_recovery() -> None:
    cluster = given_a_running_gang({"spec.runPolicy": {"restart": {"limits": [{"class": "Infrastructure", "max": 9}]}}})
    for wait in (0, 100):
        passes(cluster, 50)
        is_seen_to_fail(cluster, f"digits-{cluster.status.attempt}-0-1")
        one_pass(cluster)
        passes(cluster, 3)
        kubelet.sweep(cluster)
        one_pass(cluster)
        later(cluster, seconds=wait)
        get_ready(cluster)
    # Of the worker that failed, nothing is left to stop.
    assert split(cluster)["recovery"] == 2 * 12 * 3
    assert spent(cluster).total == 2 * (CHIPS * 50 + 12 * 3)


def test_the_workers_of_a_job_that_failed_count_until_they_have_stopped() -> None:
    cluster = given_a_running_gang()
    is_seen_to_fail(cluster, WORKERS[1], 1)
    one_pass(cluster)
    assert cluster.status.state is State.FAILED
    ended = cluster.status.completion_time
    passes(cluster, 20)
    kubelet.sweep(cluster)
    reconciled(cluster)
    assert split(cluster) == {"stopping": 12 * 20}
    assert (cluster.status.completion_time, look(cluster)) == (ended, Plan())


def test_a_job_whose_time_is_over_is_deleted_even_if_its_workers_have_just_stopped() -> None:
    cluster = given_a_running_gang({"spec.runPolicy": {"ttlSecondsAfterFinished": 60}})
    is_seen_to_fail(cluster, WORKERS[1], 1)
    one_pass(cluster)
    passes(cluster, 60)
    kubelet.sweep(cluster)
    assert described(one_pass(cluster)) == ["delete TPUTrainingJob digits"]
    assert cluster.job_is_gone


def test_a_job_that_began_before_its_chips_were_counted_is_reckoned_with_all_of_them() -> None:
    cluster = given_a_running_gang()
    passes(cluster, 100)
    goodput = cluster.job["status"]["goodput"]
    del goodput["chipSeconds"]
    goodput["productiveSeconds"] = 50
    is_seen_to_fail(cluster, WORKERS[1])
    assert spent(cluster).total == CHIPS * (50 + 100)


# When it is used up.


@pytest.mark.parametrize(
    ("then", "state", "shown"), [("Suspend", "Suspended", "Current"), ("Fail", "Failed", "Failed")]
)
def test_a_job_that_has_used_up_its_budget_saves_stops_and_only_then_fails(
    then: str, state: str, shown: str, snapshot: SnapshotAssertion
) -> None:
    cluster = used_up(then=then)
    decided = one_pass(cluster)
    assert is_true(cluster.status.conditions, ConditionType.SUSPENDED)
    assert not is_over(cluster.status)
    assert [event.reason for event in decided.events] == ["BudgetExceeded"]
    assert described(look(cluster)) == [f"delete Pod {name}" for name in WORKERS]
    assert cluster.status.completion_time is None
    stopped(cluster, after=18)
    assert (cluster.status.state, kstatus(cluster.job), cluster.pods) == (state, shown, {})
    assert is_over(cluster.status), "`tpujob run` would wait forever"
    assert "1.08 of 1" in ready_message(cluster)
    assert "spec.runPolicy.budget" in ready_message(cluster)
    assert ready_message(cluster) == snapshot
    assert cluster.status.restarts.total == 0
    passes(cluster, 10**6)
    later = look(cluster)
    assert (later.batches, later.status or cluster.status, later.again) == ((), cluster.status, None)


def test_a_budget_ends_a_job_whose_status_has_lost_what_it_resolved_to() -> None:
    """Chips are counted by the slice in status.resolved, which anybody may remove who may edit the status."""
    cluster = given_a_running_gang(budget(1))
    del cluster.job["status"]["resolved"]
    one_pass(cluster)
    assert cluster.status.resolved is not None
    passes(cluster, HOUR)
    reconciled(cluster)
    assert is_true(cluster.status.conditions, ConditionType.SUSPENDED)


def test_the_pass_comes_when_the_budget_ends() -> None:
    cluster = given_a_running_gang(budget(1))
    assert look(cluster) == Plan(again=timedelta(seconds=180))
    later(cluster, seconds=180)
    assert look(cluster) == Plan(again=timedelta(seconds=45))


def test_a_warning_comes_once_at_80_percent(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_running_gang(budget(1), listens=True)
    passes(cluster, 179)
    assert look(cluster).status is None
    kubelet.report(cluster, 20, total_steps=300, estimated_remaining_seconds=900)
    passes(cluster, 1)
    decided = one_pass(cluster)
    (event,) = decided.events
    assert (event.reason, event.warning) == ("BudgetLow", True)
    assert "0.80 of 1" in event.message
    assert "spec.runPolicy.budget" in event.message
    assert "45 s" in event.message
    assert event.message == snapshot
    assert reason(cluster.status, ConditionType.BUDGET_LOW) == ("True", "BudgetLow")
    passes(cluster, 20)
    assert one_pass(cluster).events == ()
    cluster.edit_run_policy(budget={"chipHours": 2})
    one_pass(cluster)
    assert find(cluster.status.conditions, ConditionType.BUDGET_LOW) is None
    passes(cluster, HOUR)
    assert [event.reason for event in one_pass(cluster).events] == ["BudgetLow"]


def test_the_status_says_what_is_used_expected_and_left() -> None:
    cluster = given_a_running_gang(budget(10), listens=True)
    passes(cluster, HOUR)
    kubelet.report(cluster, 20, total_steps=300, estimated_remaining_seconds=2 * HOUR)
    one_pass(cluster)
    assert cluster.job["status"]["usage"] == {
        "chipHours": 1,
        "forecastChipHours": 3,
        "budgetChipHours": 10,
        "budgetLeftSeconds": 9 * HOUR,
    }


def test_an_operator_that_was_down_for_an_hour_tells_the_overrun_in_numbers(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_running_gang(budget(1))
    passes(cluster, 3600)
    decided = one_pass(cluster)
    assert [event.reason for event in decided.events] == ["BudgetExceeded"]
    assert "16.00 of 1" in decided.events[0].message
    assert "spec.runPolicy.budget" in decided.events[0].message
    assert decided.events[0].message == snapshot


@pytest.mark.parametrize("then", ["Suspend", "Fail"])
def test_a_job_that_succeeds_in_the_same_pass_has_succeeded(then: str) -> None:
    cluster = used_up(then=then)
    finish(cluster)
    assert cluster.status.state is State.SUCCEEDED


def test_a_gang_that_is_finishing_has_its_grace_period_to_finish() -> None:
    cluster = given_a_running_gang(budget(1, "Fail"))
    passes(cluster, HOUR)
    kubelet.end(cluster, cluster.pods[WORKERS[0]])
    assert look(cluster).batches == ()
    passes(cluster, 10)
    finish(cluster)
    assert cluster.status.state is State.SUCCEEDED


def test_a_gang_that_finishes_forever_is_stopped() -> None:
    cluster = given_a_running_gang(budget(1, "Fail"))
    passes(cluster, HOUR)
    kubelet.end(cluster, cluster.pods[WORKERS[0]])
    passes(cluster, 3600)
    stopped(cluster, after=0)
    assert reason(cluster.status, ConditionType.FAILED) == ("True", "BudgetExceeded")


def test_a_job_that_waits_for_its_restart_is_stopped_there() -> None:
    cluster = used_up()
    is_seen_to_fail(cluster, WORKERS[1])
    assert (cluster.status.state, cluster.status.attempt) == (State.SUSPENDED, 1)
    stopped(cluster, after=0)
    assert cluster.pods == {}


@pytest.mark.parametrize("then", ["Suspend", "Fail"])
def test_a_gang_that_holds_chips_in_vain_uses_its_budget(then: str) -> None:
    cluster = given_a_created_gang(
        {"spec.runPolicy": {"startDeadlineSeconds": 10**6, "budget": {"chipHours": 1, "onExceeded": then}}}
    )
    kubelet.place(cluster, cluster.pods[WORKERS[0]])
    passes(cluster, 4 * HOUR)
    stopped(cluster, after=0)
    assert cluster.status.state == ("Suspended" if then == "Suspend" else "Failed")


def test_a_job_that_waits_for_nodes_uses_nothing() -> None:
    cluster = given_a_created_gang(budget(1))
    later(cluster, seconds=10**7)
    assert cluster.status.state is State.STARTING


# How it goes on.


def test_a_raised_budget_resumes_the_job(snapshot: SnapshotAssertion) -> None:
    cluster = stopped(used_up(), after=18)
    cluster.edit_run_policy(budget={"chipHours": 1000})
    decided = one_pass(cluster)
    assert decided.events[0].reason == "Resumed"
    assert "1.08 of 1000" in decided.events[0].message
    assert decided.events[0].message == snapshot
    assert (cluster.status.attempt, cluster.status.state) == (2, State.STARTING)
    assert find(cluster.status.conditions, ConditionType.BUDGET_LOW) is None
    until_running(cluster)
    assert cluster.status.restarts.total == 0


def test_a_budget_that_is_taken_away_resumes_the_job() -> None:
    cluster = stopped(used_up(), after=0)
    cluster.edit_run_policy(budget=None)
    del cluster.job["spec"]["runPolicy"]["budget"]
    one_pass(cluster)
    assert reason(cluster.status, ConditionType.SUSPENDED) == ("False", "Resumed")
    assert cluster.status.attempt == 2


def test_resuming_without_raising_the_budget_starts_nothing_and_says_why(snapshot: SnapshotAssertion) -> None:
    cluster = stopped(used_up(), after=0)
    cluster.edit_run_policy(suspend=True)
    reconciled(cluster)
    assert "spec.runPolicy.suspend" in ready_message(cluster)
    assert ready_message(cluster) == snapshot
    cluster.edit_run_policy(suspend=False)
    decided = one_pass(cluster)
    assert [event.reason for event in decided.events] == ["BudgetExceeded"]
    assert (cluster.status.attempt, cluster.status.state) == (1, State.SUSPENDED)
    assert "1.00 of 1" in ready_message(cluster)
    assert "spec.runPolicy.budget" in ready_message(cluster)
    assert ready_message(cluster) == snapshot


def test_a_budget_that_is_raised_while_the_workers_stop_saves_a_job_that_was_to_fail() -> None:
    cluster = used_up(then="Fail")
    one_pass(cluster)
    one_pass(cluster)
    cluster.edit_run_policy(budget={"chipHours": 1000, "onExceeded": "Fail"})
    one_pass(cluster)
    assert cluster.status.attempt == 2
    until_running(cluster)


def test_a_budget_below_what_is_used_stops_the_job_at_once() -> None:
    cluster = given_a_running_gang()
    passes(cluster, 10 * HOUR)
    cluster.edit_run_policy(budget={"chipHours": 1})
    one_pass(cluster)
    assert cluster.status.state is State.SUSPENDED


def test_a_failed_job_says_what_was_saved(snapshot: SnapshotAssertion) -> None:
    cluster = used_up(then="Fail", listens=True)
    one_pass(cluster)
    one_pass(cluster)
    kubelet.report(cluster, 70, checkpoint_step=70)
    stopped(cluster, after=0)
    assert "step 70" in ready_message(cluster)
    assert ready_message(cluster) == snapshot


@pytest.mark.parametrize("chip_hours", [1, 2**31 - 1])
def test_the_smallest_and_the_largest_budget(chip_hours: int) -> None:
    cluster = given_a_running_gang(budget(chip_hours))
    passes(cluster, 10)
    again = look(cluster).again
    assert timedelta(0) < (again or timedelta(0)) <= timedelta(days=1)


# Whatever happens.


class World:
    """Kubelets, a scheduler and an operator that is up to `late` seconds late. `metered`: the chip-seconds that the
    pods have really held."""

    def __init__(self, then: str, late: int) -> None:
        limits = {"Infrastructure": 100, "Unknown": 100}
        policy = {"budget": {"chipHours": 1, "onExceeded": then}, "restart": {"limits": restart_limits(limits)}}
        self.cluster = given_a_job({"spec.runPolicy": policy, "spec.checkpoint": {"uri": "gs://bucket/digits"}})
        self.late, self.metered = late, 0

    def goes_on(self, seconds: int) -> None:
        while seconds > 0:
            again = one_pass(self.cluster).again
            due = (again or timedelta(0)).total_seconds() if again is not None else seconds
            ticks = math.ceil(min(seconds, max(1, due) + self.late, 100) / TICK)
            for _ in range(ticks):
                self._ticks()
            seconds -= ticks * TICK

    def _ticks(self) -> None:
        pods = self.cluster.pods.values()
        held = [pod for pod in pods if "nodeName" in pod["spec"] and pod["status"]["phase"] not in ENDED]
        self.metered += 4 * len(held) * TICK
        passes(self.cluster, TICK)
        for name, pod in list(self.cluster.pods.items()):
            deadline = pod["metadata"].get("deletionTimestamp")
            if deadline and parse_time(deadline) <= self.cluster.now:
                del self.cluster.pods[name]
            elif deadline is None and self.cluster.now.second % 4 == 0:
                kubelet.make_ready(self.cluster, pod)

    def befalls(self, what: str) -> None:
        pods = [pod for pod in self.cluster.pods.values() if pod["status"]["phase"] == "Running"]
        match what:
            case "suspend" | "resume":
                self.cluster.edit_run_policy(suspend=what == "suspend")
            case "fails" if pods:
                kubelet.end(self.cluster, pods[0], 137)
            case "is deleted" if pods:
                kubelet.delete_by_hand(self.cluster, pods[-1])


@settings(max_examples=500 if SOAK else 8, deadline=None, derandomize=not SOAK, database=None)
@given(
    then=st.sampled_from(["Suspend", "Fail"]),
    late=st.integers(0, 60),
    events=st.lists(
        st.tuples(st.sampled_from(["suspend", "resume", "fails", "is deleted", "nothing"]), st.integers(1, 120)),
        max_size=6,
    ),
)
def test_chips_never_run_more_than_one_pass_and_the_grace_period_beyond_the_budget(
    then: str, late: int, events: list[tuple[str, int]]
) -> None:
    world = World(then, late)
    for what, seconds in events:
        world.befalls(what)
        world.goes_on(seconds)
    world.befalls("resume")
    world.goes_on(900)
    cluster = world.cluster
    assert cluster.status.state in (State.SUSPENDED, State.FAILED)
    # Two passes: one writes down that the gang is to stop, and one stops it.
    beyond = 2 * (late + TICK) + GRACE.seconds + TICK
    assert 3600 <= world.metered <= 3600 + CHIPS * beyond
    assert world.metered <= spent(cluster).total, "chips were held and not counted"


def test_a_job_that_has_ended_still_says_what_its_budget_was_and_on_which_slice_it_was_used() -> None:
    cluster = given_a_running_gang({**budget(20), "spec.runPolicy.activeDeadlineSeconds": 600}, listens=True)
    later(cluster, seconds=601)
    assert cluster.status.state == State.FAILED
    stopped(cluster, 30)
    usage, placement = cluster.status.usage, cluster.status.placement
    assert (usage.chip_hours, usage.budget_chip_hours) == ("2.8", 20)
    assert placement.chip_seconds == {"v5litepod-16": spent(cluster).total}
