"""A job that may run on several slices: when it moves, what a move keeps, and what it never does."""

from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.planner import kubelet
from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import Trouble, look, one_pass
from tests.planner.story import (
    all_are_ready,
    all_passes,
    described,
    get_ready,
    given_a_begun_attempt,
    given_a_created_gang,
    given_a_job,
    given_a_running_gang,
    later,
    passes,
    ready_message,
    reason,
    some_passes,
    suspend,
)
from tpu_contract.protocol import ReportPhase
from tpu_training_operator.api.conditions import Reason
from tpu_training_operator.api.constants import LABEL_ALTERNATIVE
from tpu_training_operator.api.status import State
from tpu_training_operator.domain.cluster_state.observed import Observed, format_time, parse_time
from tpu_training_operator.domain.cluster_state.obstacles import Obstacle
from tpu_training_operator.domain.plan.blocked import show_obstacle
from tpu_training_operator.kube.errors import Forbidden

SMALLER = {"slice": {"acceleratorType": "v5litepod-8"}, "waitForPreviousSeconds": 600}
OTHER = {"slice": {"acceleratorType": "v6e-16"}, "waitForPreviousSeconds": 1200}
TWO = {"spec.placement.alternatives": [SMALLER]}
THREE = {"spec.placement.alternatives": [SMALLER, OTHER]}


def waits(cluster: ModelCluster, minutes: float) -> None:
    """The gang is created and finds no nodes for so long."""
    for _ in range(4):
        kubelet.sweep(cluster)
        one_pass(cluster)
    later(cluster, minutes=minutes)


def where(cluster: ModelCluster) -> tuple[int, int, str]:
    status = cluster.status
    return status.attempt, status.placement.option_index, status.placement.slice


def test_the_choice_is_written_with_the_attempt_and_the_status_shows_its_numbers() -> None:
    cluster = given_a_begun_attempt(TWO)
    assert where(cluster) == (1, 0, "v5litepod-16")
    waits(cluster, 10)
    assert where(cluster) == (2, 1, "v5litepod-8")
    resolved = cluster.status.resolved
    assert (resolved.accelerator_type, resolved.hosts) == ("v5litepod-8", 2)


def test_no_nodes_for_the_time_of_the_next_one_and_not_a_second_sooner(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_created_gang(TWO)
    waits(cluster, 10 - 1 / 60)
    assert where(cluster)[1] == 0
    later(cluster, seconds=1)
    assert where(cluster)[1] == 1
    assert reason(cluster.status) == ("False", Reason.MOVING)
    assert "600 s" in ready_message(cluster)
    assert ready_message(cluster) == snapshot
    assert cluster.status.restarts.total == 0


def test_a_move_keeps_batch_steps_and_rate_and_divides_the_batch_anew() -> None:
    cluster = given_a_begun_attempt(TWO)
    before = cluster.status.resolved
    waits(cluster, 10)
    after = cluster.status.resolved
    assert (after.global_batch_size, after.train_steps, after.learning_rate) == (128, 300, before.learning_rate)
    assert (after.replicas, after.per_replica_batch_size, after.accumulation_steps) == (8, 8, 2)


def test_a_scaled_move_takes_the_recipe_of_the_other_slice() -> None:
    cluster = given_a_begun_attempt(TWO | {"spec.placement.batch": "Scaled"})
    waits(cluster, 10)
    after = cluster.status.resolved
    assert (after.global_batch_size, after.train_steps, after.accumulation_steps) == (64, 600, 1)


def test_all_workers_of_the_larger_slice_are_gone_before_one_of_the_smaller_is_created() -> None:
    cluster = given_a_created_gang(TWO)
    waits(cluster, 10)
    assert described(look(cluster)) == [f"delete Pod digits-1-0-{host}" for host in range(4)]
    for name in ("digits-1-0-0", "digits-1-0-1", "digits-1-0-2"):
        kubelet.vanish(cluster, cluster.pods[name])
    assert described(look(cluster)) == ["delete Pod digits-1-0-3"]
    kubelet.vanish(cluster, cluster.pods["digits-1-0-3"])
    one_pass(cluster)
    assert sorted(cluster.pods) == ["digits-2-0-0", "digits-2-0-1"]
    assert {pod["metadata"]["labels"][LABEL_ALTERNATIVE] for pod in cluster.pods.values()} == {"1"}


def test_after_the_last_slice_it_goes_round_again_and_waits_twice_as_long() -> None:
    cluster = given_a_created_gang(THREE)
    waited: list[tuple[int, int]] = []
    for _ in range(60):
        before = where(cluster)[1]
        waits(cluster, 5)
        if where(cluster)[1] != before:
            assert cluster.status.placement is not None
            waited.append((before, where(cluster)[1]))
    assert waited[:5] == [(0, 1), (1, 2), (2, 0), (0, 1), (1, 2)]
    placement = cluster.status.placement
    times = [parse_time(move.at) for move in placement.moves]
    lengths = [round((after - before).total_seconds() / 60) for before, after in pairwise(times)]
    assert lengths[:4] == [20, 20, 20, 40]


def test_a_gang_whose_nodes_come_up_one_by_one_stays() -> None:
    cluster = given_a_created_gang(TWO)
    for host in range(3):
        passes(cluster, 9 * 60)
        kubelet.place(cluster, cluster.pods[f"digits-1-0-{host}"])
        one_pass(cluster)
    assert where(cluster) == (1, 0, "v5litepod-16")


def test_hosts_that_a_lost_one_has_left_behind_are_no_reason_to_wait_longer() -> None:
    cluster = given_a_running_gang(TWO | {"spec.runPolicy.startDeadlineSeconds": 1800})
    passes(cluster, 60)
    kubelet.lose_node_for_good(cluster, cluster.pods["digits-1-0-0"])
    some_passes(cluster, 4)
    for host in range(1, 4):
        kubelet.place(cluster, cluster.pods[f"digits-2-0-{host}"])
    later(cluster, seconds=9 * 60)
    assert where(cluster)[:2] == (2, 0)
    later(cluster, seconds=60)
    assert where(cluster)[:2] == (3, 1)


def test_a_gang_whose_backoff_is_longer_than_its_wait_may_still_use_nodes_that_are_there() -> None:
    impatient = {"spec.placement.alternatives": [SMALLER | {"waitForPreviousSeconds": 5}]}
    cluster = given_a_running_gang(impatient)
    passes(cluster, 60)
    kubelet.end(cluster, cluster.pods["digits-1-0-0"], 137)
    one_pass(cluster)
    passes(cluster, 600)
    some_passes(cluster, 4)
    assert where(cluster)[:2] == (2, 0)
    for pod in cluster.pods.values():
        kubelet.place(cluster, pod)
    get_ready(cluster)
    assert (where(cluster)[:2], cluster.status.state) == ((2, 0), State.RUNNING)


def test_a_lost_slice_is_waited_for_and_then_left() -> None:
    cluster = given_a_running_gang(TWO | {"spec.recipe.trainSteps": 1000}, listens=True)
    kubelet.report(cluster, 120)
    later(cluster, seconds=60)
    for pod in list(cluster.pods.values()):
        kubelet.lose_node_for_good(cluster, pod)
    one_pass(cluster)
    assert where(cluster)[:2] == (2, 0)
    cluster.pods.clear()
    waits(cluster, 9)
    assert where(cluster)[:2] == (2, 0)
    waits(cluster, 1)
    assert where(cluster)[:2] == (3, 1)
    placement, goodput = cluster.status.placement, cluster.status.goodput
    assert goodput is not None
    move = placement.moves[-1]
    assert (move.reason, move.step, move.examples) == ("Lost", 120, 120 * 128)
    assert cluster.status.restarts.by_class == {"Infrastructure": 1}
    assert goodput.activity == "Moving"


def test_with_adascale_a_move_to_another_batch_keeps_the_share_of_the_training() -> None:
    """Its steps take more examples than the recipe's: 500 of 1000 steps of 128 are half of 2000 steps of the recipe's
    32 examples, which are 500 of the 64 of the smaller slice."""
    adaptive = {"recipe.scaling": {"learningRate": "AdaScale"}, "recipe.tunedOn": {"acceleratorType": "v5litepod-4"}}
    recipe = {"recipe.globalBatchSize": 32, "recipe.trainSteps": 2000, **adaptive}
    scaled = TWO | {"spec.placement.batch": "Scaled"} | {f"spec.{name}": value for name, value in recipe.items()}
    cluster = given_a_running_gang(scaled, listens=True)
    kubelet.report(cluster, 500, total_steps=1000)
    later(cluster, seconds=60)
    for pod in list(cluster.pods.values()):
        kubelet.lose_node_for_good(cluster, pod)
    one_pass(cluster)
    cluster.pods.clear()
    waits(cluster, 10)
    assert where(cluster)[1] == 1
    progress = cluster.status.progress
    assert progress is not None
    assert (progress.step, progress.total_steps) == (500, 2000)


def stopped_at(cluster: ModelCluster, step: int, words: str | None) -> None:
    """The gang has trained up to `step` of 1000 when a better slice is there, and stops."""
    kubelet.report(cluster, step)
    later(cluster, seconds=1800)
    for name in HELD:
        kubelet.make_ready(cluster, cluster.pods[name])
    one_pass(cluster)
    assert where(cluster)[:2] == (3, 0)
    assert "moves from v5litepod-8 to v5litepod-16, last reported step 120 (15360 examples):" in ready_message(cluster)
    one_pass(cluster)
    for host in range(2):
        if words is not None:
            kubelet.leave(cluster, cluster.pods[f"digits-2-0-{host}"], 75, message=words)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param('{"outcome": "Preempted", "message": "", "step": 127}', id="the stopped worker says it"),
        pytest.param('{"outcome": "Preempted", "message": "", "step": 12345678}', id="it says nonsense"),
        pytest.param("Killed", id="it says nothing"),
        pytest.param(None, id="its pod is gone at once"),
    ],
)
def test_a_move_names_the_step_that_was_reached_and_the_one_that_is_continued_from(words: str | None) -> None:
    cluster = given_a_gang_on_the_smaller_slice(GROWING | {"spec.recipe.trainSteps": 1000}, listens=True)
    stopped_at(cluster, 120, words)
    one_pass(cluster)
    runs_there(cluster)
    move = cluster.status.placement.moves[-1]
    assert (move.continued_step, move.continued_examples) == (None, None)
    kubelet.report(cluster, 0, ReportPhase.STARTING)
    later(cluster, seconds=10)
    assert cluster.status.placement.moves[-1].continued_step is None
    kubelet.report(cluster, 127, ReportPhase.STARTING, start_step=127, checkpoint_step=127)
    later(cluster, seconds=10)
    move = cluster.status.placement.moves[-1]
    said_nonsense = words is not None and "12345678" in words
    assert (move.step, move.examples) == ((1000, 128000) if said_nonsense else (127, 127 * 128))
    assert (move.continued_step, move.continued_examples) == (127, 127 * 128)


def test_a_slice_lost_before_its_gang_has_read_the_checkpoint_is_left_at_that_checkpoints_step() -> None:
    cluster = given_a_running_gang(TWO | {"spec.recipe.trainSteps": 1000}, listens=True)
    kubelet.report(cluster, 120, checkpoint_step=100)
    is_lost(cluster)
    for _ in range(2):
        later(cluster, seconds=60)
        get_ready(cluster)
    kubelet.report(cluster, 0, ReportPhase.STARTING)
    is_lost(cluster)
    assert cluster.status.progress.step == 100
    waits(cluster, 10)
    waits(cluster, 10)
    move = cluster.status.placement.moves[-1]
    assert (move.step, move.examples, move.continued_step) == (100, 12800, None)
    runs_there(cluster)
    kubelet.report(cluster, 200, start_step=100, checkpoint_step=200)
    later(cluster, seconds=10)
    assert cluster.status.placement.moves[-1].continued_step == 100
    kubelet.report(cluster, 210, start_step=90)
    later(cluster, seconds=10)
    assert cluster.status.placement.moves[-1].continued_step == 100, "it is said once"


def test_a_gang_that_is_lost_in_the_second_in_which_it_was_ready_has_run_there() -> None:
    """Kubernetes times have whole seconds."""
    cluster = given_a_running_gang(TWO)
    for pod in list(cluster.pods.values()):
        kubelet.lose_node_for_good(cluster, pod)
    one_pass(cluster)
    cluster.pods.clear()
    waits(cluster, 10)
    placement = cluster.status.placement
    assert [move.reason for move in placement.moves] == ["Lost"]


def test_a_job_with_a_long_history_does_not_go_round_faster_than_a_new_one() -> None:
    """The status remembers so many moves, and those for lack of capacity go first."""
    cluster = given_a_running_gang(TWO)
    past = {"from": 0, "to": 1, "at": "2025-12-01T00:00:00Z", "reason": "Lost", "why": "v5litepod-16 did not come back"}
    cluster.job["status"]["placement"]["moves"] = [past] * 20
    kubelet.lose_node_for_good(cluster, cluster.pods["digits-1-0-0"])
    one_pass(cluster)
    for _ in range(20):
        cluster.pods.clear()
        job, pods = cluster.read()
        refusal = Obstacle(Reason.INVALID_OBJECT, "admission webhook no-tpus.example.com denied the request")
        status = show_obstacle(Observed.of(job, pods), refusal, cluster.now).status
        cluster.write_status({**job, "status": status.as_json()})
        one_pass(cluster)
        passes(cluster, 60)
    assert where(cluster)[0] < 8


def test_the_longest_wait_and_a_search_without_end_stay_within_the_calendar() -> None:
    for_ever = {"slice": {"acceleratorType": "v5litepod-8"}, "waitForPreviousSeconds": 2**31 - 1}
    cluster = given_a_created_gang({"spec.placement.alternatives": [for_ever]})
    cluster.job["status"]["placement"]["movesForCapacity"] = 10**9
    waits(cluster, 10)
    assert where(cluster) == (1, 0, "v5litepod-16")


@pytest.mark.parametrize("policy", [{"onLoss": "Wait"}, {"maxMoves": {"count": 1, "windowSeconds": 86400}}])
def test_a_job_that_may_not_leave_its_slice_waits_for_it(policy: dict[str, Any]) -> None:
    placement = {"alternatives": [SMALLER, OTHER], **policy}
    cluster = given_a_running_gang({"spec.placement": placement})
    for _ in range(2):
        passes(cluster, 60)
        for pod in list(cluster.pods.values()):
            kubelet.lose_node_for_good(cluster, pod)
        one_pass(cluster)
        cluster.pods.clear()
        waits(cluster, 30)
        all_passes(cluster, 5)
    assert where(cluster)[1] == (0 if "onLoss" in policy else 1)


def runs_there(cluster: ModelCluster) -> None:
    """The old gang stops, and the new one finds its nodes."""
    for _ in range(3):
        kubelet.sweep(cluster)
        one_pass(cluster)
    get_ready(cluster)


def is_lost(cluster: ModelCluster) -> None:
    """The gang trains for a minute, then its slice goes."""
    later(cluster, seconds=60)
    for pod in list(cluster.pods.values()):
        kubelet.lose_node_for_good(cluster, pod)
    one_pass(cluster)
    cluster.pods.clear()


def test_a_job_without_moves_left_says_until_when_and_then_moves() -> None:
    changes = {
        "spec.placement.alternatives": [SMALLER],
        "spec.placement.maxMoves": {"count": 1, "windowSeconds": 7200},
    }
    cluster = given_a_running_gang(changes)
    is_lost(cluster)
    waits(cluster, 10)
    assert where(cluster)[:2] == (3, 1)
    next_move = cluster.now + timedelta(hours=2)
    runs_there(cluster)
    is_lost(cluster)
    waits(cluster, 45)
    waits(cluster, 45)
    assert where(cluster)[:2] == (4, 1)
    unless = f"moves to v5litepod-16 at {format_time(next_move)} unless it finds nodes first"
    assert f"{unless}; 1 of 1 move in 2 h is used" in ready_message(cluster)
    due = look(cluster).again
    assert due is not None
    assert due <= next_move - cluster.now
    passes(cluster, (next_move - cluster.now).total_seconds() - 1)
    assert where(cluster)[:2] == (4, 1)
    later(cluster, seconds=1)
    assert where(cluster)[:2] == (5, 0)


def test_a_gang_that_may_not_return_for_now_says_until_when() -> None:
    limit = {"spec.placement.maxMoves": {"count": 1, "windowSeconds": 90}}
    cluster = given_a_running_gang(GROWING | limit)
    is_lost(cluster)
    waits(cluster, 10)
    moved = parse_time(cluster.status.placement.moves[-1].at)
    runs_there(cluster)
    until = format_time(moved + timedelta(seconds=90))
    assert f"; it asks for no better slice before {until}: 1 of 1 move in 90 s is used" in ready_message(cluster)


def test_a_suspension_does_not_make_a_job_forget_the_slice_on_which_it_ran() -> None:
    cluster = given_a_running_gang({"spec.placement": {"alternatives": [SMALLER], "onLoss": "Wait"}})
    passes(cluster, 60)
    cluster.edit_run_policy(suspend=True)
    some_passes(cluster, 6)
    assert cluster.status.state is State.SUSPENDED
    cluster.edit_run_policy(suspend=False)
    waits(cluster, 60)
    assert where(cluster)[:2] == (2, 0)


@pytest.mark.parametrize(
    ("words", "minutes"),
    [
        ("exceeded quota: tpus, requested: google.com/tpu=4, used: google.com/tpu=0, limited: google.com/tpu=8", 0),
        ("admission webhook no-v5e.example.com denied the request", 0),
        ("exceeded quota: tpus, requested: google.com/tpu=4, used: google.com/tpu=96, limited: google.com/tpu=96", 10),
        ("pods is forbidden: User operator cannot create resource pods", 10),
    ],
)
def test_what_the_cluster_refuses_for_certain_needs_no_waiting(words: str, minutes: int) -> None:
    cluster = given_a_begun_attempt(TWO)
    job, pods = cluster.read()
    status = show_obstacle(Observed.of(job, pods), Obstacle(Reason.NOT_PERMITTED, words), cluster.now).status
    cluster.write_status({**job, "status": status.as_json()})
    decided = look(cluster)
    assert (decided.status is not None and decided.status.attempt == 2) == (minutes == 0)
    later(cluster, minutes=minutes)
    assert where(cluster)[:2] == (2, 1)


def test_a_job_without_alternatives_waits_for_as_long_as_it_takes() -> None:
    cluster = given_a_created_gang()
    waits(cluster, 60 * 24)
    assert where(cluster) == (1, 0, "v5litepod-16")


@pytest.mark.parametrize(
    "edit",
    [
        lambda status: status.pop("placement"),
        lambda status: status["placement"].update(optionIndex=7),
        lambda status: status["placement"].update(optionIndex=0),
        lambda status: status["placement"].update(slice="v9-1", optionIndex=1),
        lambda status: status.clear(),
    ],
    ids=["lost", "out of range", "another number", "another slice", "the whole status lost"],
)
def test_a_gang_whose_placement_was_lost_or_edited_goes_on_where_it_is(edit: Any) -> None:
    cluster = given_a_gang_on_the_smaller_slice(TWO)
    names = sorted(cluster.pods)
    edit(cluster.job["status"])
    cluster.now += timedelta(minutes=6)
    for _ in range(4):
        one_pass(cluster)
    assert sorted(cluster.pods) == names
    assert where(cluster) == (2, 1, "v5litepod-8")
    assert cluster.status.restarts.total == 0


def test_a_placement_edited_to_another_slice_begins_an_attempt_there() -> None:
    cluster = given_a_gang_on_the_smaller_slice(TWO)
    cluster.job["status"]["placement"].update(optionIndex=0, slice="v5litepod-16")
    one_pass(cluster)
    assert where(cluster) == (3, 0, "v5litepod-16")
    assert cluster.status.restarts.total == 0


def test_what_each_slice_used_adds_up_to_the_active_time() -> None:
    cluster = given_a_running_gang(TWO, listens=True)
    for step in range(1, 5):
        passes(cluster, 100)
        kubelet.report(cluster, step)
        one_pass(cluster)
    for pod in list(cluster.pods.values()):
        kubelet.lose_node_for_good(cluster, pod)
    one_pass(cluster)
    cluster.pods.clear()
    waits(cluster, 10)
    waits(cluster, 0)
    get_ready(cluster)
    passes(cluster, 300)
    kubelet.report(cluster, 2)
    one_pass(cluster)
    placement, goodput = cluster.status.placement, cluster.status.goodput
    spent = placement.chip_seconds
    assert spent["v5litepod-8"] == 8 * 300
    assert spent["v5litepod-16"] // 16 + spent["v5litepod-8"] // 8 == (
        goodput.start + goodput.productive + goodput.wasted + goodput.recovery + goodput.moving
    )


@pytest.mark.parametrize(
    "slice_",
    [
        {"acceleratorType": "v5litepod-256"},
        {"acceleratorType": "v5litepod-17"},
        {"acceleratorType": "v5litepod-16", "count": 2},
        {"acceleratorType": "v5litepod-8", "hardware": "CPU"},
        {"generation": "v5e", "topology": "4x4"},
    ],
    ids=str,
)
def test_an_alternative_that_could_not_run_is_refused_before_the_job_starts(
    slice_: Any, snapshot: SnapshotAssertion
) -> None:
    cluster = given_a_job({"spec.placement.alternatives": [{"slice": slice_}]})
    one_pass(cluster)
    assert cluster.status.state is State.INVALID
    assert ready_message(cluster).startswith("spec.placement.alternatives")
    assert ready_message(cluster) == snapshot
    assert "spec.placement.alternatives" in ready_message(cluster)
    assert not cluster.pods


def test_what_does_not_divide_comes_with_the_nearest_that_does(snapshot: SnapshotAssertion) -> None:
    alternatives = [{"slice": {"acceleratorType": "v5litepod-32"}}]
    cluster = given_a_job({"spec.placement.alternatives": alternatives, "spec.recipe.globalBatchSize": 144})
    one_pass(cluster)
    assert "144" in ready_message(cluster)
    assert ready_message(cluster) == snapshot


GROWING = {
    "spec.placement": {"alternatives": [SMALLER], "returnToPreferred": "AtCheckpoint", "minRunSeconds": 1800},
    "spec.checkpoint": {"uri": "gs://bucket/jobs"},
}
HELD = [f"digits-hold0-0-{host}" for host in range(4)]


def given_a_gang_on_the_smaller_slice(changes: dict[str, Any], *, listens: bool = False) -> ModelCluster:
    cluster = given_a_begun_attempt(changes, listens=listens)
    waits(cluster, 10)
    for _ in range(5):
        kubelet.sweep(cluster)
        one_pass(cluster)
        all_are_ready(cluster)
    one_pass(cluster)
    assert cluster.status.state is State.RUNNING
    return cluster


def held(cluster: ModelCluster) -> list[str]:
    return [name for name in sorted(cluster.pods) if "hold" in name]


def test_a_better_slice_is_asked_for_by_placeholders_after_a_while() -> None:
    cluster = given_a_gang_on_the_smaller_slice(GROWING)
    later(cluster, seconds=1799)
    assert held(cluster) == []
    later(cluster, seconds=1)
    assert held(cluster) == HELD
    pod = cluster.pods[HELD[0]]
    assert pod["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4"
    assert pod["spec"]["containers"][0]["resources"]["limits"]["google.com/tpu"] == "4"


def test_the_gang_trains_until_every_placeholder_runs_and_its_nodes_go_to_its_workers() -> None:
    cluster = given_a_gang_on_the_smaller_slice(GROWING)
    later(cluster, seconds=1800)
    for name in HELD[:3]:
        kubelet.make_ready(cluster, cluster.pods[name])
    one_pass(cluster)
    assert where(cluster)[:2] == (2, 1)
    kubelet.make_ready(cluster, cluster.pods[HELD[3]])
    one_pass(cluster)
    assert where(cluster) == (3, 0, "v5litepod-16")
    one_pass(cluster)
    assert held(cluster) == HELD
    kubelet.sweep(cluster)
    one_pass(cluster)
    assert [name for name in sorted(cluster.pods) if "hold" not in name] == [f"digits-3-0-{host}" for host in range(4)]
    assert held(cluster) == HELD
    one_pass(cluster)
    kubelet.sweep(cluster)
    assert held(cluster) == []
    assert cluster.status.restarts.total == 0
    placement = cluster.status.placement
    assert placement.moves[-1].reason == "Better"


def test_placeholders_that_find_no_nodes_rest_and_ask_again() -> None:
    cluster = given_a_gang_on_the_smaller_slice(GROWING)
    later(cluster, seconds=1800)
    seen = []
    for _ in range(8):
        kubelet.sweep(cluster)
        seen.append(len(held(cluster)))
        later(cluster, seconds=300)
    assert seen == [4, 4, 0, 0, 4, 4, 0, 0]
    assert where(cluster)[:2] == (2, 1)


def test_placeholders_that_the_cluster_refuses_are_told_once_and_the_gang_trains_on(
    snapshot: SnapshotAssertion,
) -> None:
    cluster = given_a_gang_on_the_smaller_slice(GROWING)
    passes(cluster, 1800)
    for _ in range(4):
        refused = Trouble(at=0, error=Forbidden(403, "Forbidden", "exceeded quota: tpus"))
        cluster.operator.work(trouble=refused)
        for name in held(cluster):
            del cluster.pods[name]
        passes(cluster, 15)
    (told,) = [event["note"] for event in cluster.events if event["reason"] == "PlaceholderRefused"]
    assert told == snapshot
    assert cluster.status.state is State.RUNNING


def test_a_placeholder_that_a_finalizer_keeps_is_told_once(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_gang_on_the_smaller_slice(GROWING)
    later(cluster, seconds=1800)
    deleted = {"deletionTimestamp": format_time(cluster.now), "deletionGracePeriodSeconds": 0}
    cluster.pods[HELD[0]]["metadata"] |= deleted | {"finalizers": ["example.com/audit"]}
    for _ in range(4):
        one_pass(cluster)
        passes(cluster, 15)
    (told,) = [event["note"] for event in cluster.events if event["reason"] == "PlaceholderRefused"]
    assert told == snapshot
    assert cluster.status.state is State.RUNNING


def test_a_gang_whose_first_worker_has_finished_is_not_moved_at_the_last_moment() -> None:
    cluster = given_a_gang_on_the_smaller_slice(GROWING)
    later(cluster, seconds=1800)
    kubelet.end(cluster, cluster.pods["digits-2-0-0"])
    for name in HELD:
        kubelet.make_ready(cluster, cluster.pods[name])
    one_pass(cluster)
    kubelet.end(cluster, cluster.pods["digits-2-0-1"])
    one_pass(cluster)
    kubelet.sweep(cluster)
    assert (cluster.status.state, where(cluster)[:2], held(cluster)) == (State.SUCCEEDED, (2, 1), [])


def test_a_gang_runs_on_while_a_deleted_job_of_its_name_still_has_a_placeholder() -> None:
    cluster = given_a_gang_on_the_smaller_slice(GROWING)
    old = {"apiVersion": "tpu-operator.dev/v1alpha1", "kind": "TPUTrainingJob", "name": "digits", "controller": True}
    left = kubelet.stranger(HELD[2], attempt=0)
    left["metadata"]["ownerReferences"] = [old | {"uid": "of-the-deleted-job"}]
    cluster.pods[HELD[2]] = left
    passes(cluster, 1800)
    events = len(cluster.events)
    for _ in range(5):
        one_pass(cluster)
        assert (cluster.status.state, reason(cluster.status)) == (State.RUNNING, ("True", Reason.ALL_WORKERS_READY))
        passes(cluster, 15)
    assert len(cluster.events) == events
    del cluster.pods[HELD[2]]
    one_pass(cluster)
    assert held(cluster) == HELD


@pytest.mark.parametrize("minutes", [1, 12])
def test_a_placeholder_on_a_node_that_is_lost_does_not_keep_its_name(minutes: float) -> None:
    """Whether the slice is still asked for, or the placeholders rest."""
    cluster = given_a_gang_on_the_smaller_slice(GROWING)
    later(cluster, seconds=1800)
    kubelet.place(cluster, cluster.pods[HELD[0]])
    kubelet.lose_node_for_good(cluster, cluster.pods[HELD[0]])
    later(cluster, seconds=60 * minutes)
    assert HELD[0] not in cluster.pods
    while held(cluster) != HELD:
        later(cluster, seconds=60)
        kubelet.sweep(cluster)
    assert "deletionTimestamp" not in cluster.pods[HELD[0]]["metadata"]


def test_placeholders_whose_first_host_is_preempted_give_up_the_rest_of_its_pool() -> None:
    """Another gang has this pool now, and the next placeholder of host 0 may come to another one."""
    cluster = given_a_gang_on_the_smaller_slice(GROWING)
    later(cluster, seconds=1800)
    for name in HELD[:3]:
        kubelet.make_ready(cluster, cluster.pods[name])
    del cluster.pods[HELD[0]]
    one_pass(cluster)
    kubelet.sweep(cluster)
    assert held(cluster) == [HELD[3]]
    one_pass(cluster)
    assert held(cluster) == HELD
    assert where(cluster)[:2] == (2, 1)


def test_a_placeholder_that_was_evicted_is_created_again() -> None:
    cluster = given_a_gang_on_the_smaller_slice(GROWING)
    later(cluster, seconds=1800)
    kubelet.make_ready(cluster, cluster.pods[HELD[0]])
    kubelet.make_ready(cluster, cluster.pods[HELD[1]])
    kubelet.end(cluster, cluster.pods[HELD[1]], 137)
    ended = cluster.pods[HELD[1]]["metadata"]["uid"]
    some_passes(cluster, 3)
    assert held(cluster) == HELD
    assert cluster.pods[HELD[1]]["metadata"]["uid"] != ended


@pytest.mark.parametrize("what", ["suspended", "failed", "finished", "invalid"])
def test_placeholders_go_when_the_job_stops(what: str) -> None:
    cluster = given_a_gang_on_the_smaller_slice(GROWING)
    later(cluster, seconds=1800)
    workers = [pod for name, pod in cluster.pods.items() if "hold" not in name]
    if what == "suspended":
        cluster.edit_run_policy(suspend=True)
    if what == "invalid":
        cluster.job["spec"]["recipe"]["globalBatchSize"] = 33
    for pod in workers:
        if what in ("failed", "finished"):
            kubelet.end(cluster, pod, 137 if what == "failed" else 0)
    some_passes(cluster, 3)
    assert held(cluster) == []


def test_a_job_on_its_own_slice_or_without_leave_asks_for_nothing() -> None:
    stays = {**GROWING, "spec.placement": {"alternatives": [SMALLER]}}
    for cluster in (given_a_running_gang(GROWING), given_a_gang_on_the_smaller_slice(stays)):
        later(cluster, seconds=100_000)
        assert held(cluster) == []


def test_the_chips_of_placeholders_count_on_an_account_of_their_own() -> None:
    cluster = given_a_gang_on_the_smaller_slice(GROWING)
    later(cluster, seconds=1800)
    for name in HELD[:2]:
        kubelet.make_ready(cluster, cluster.pods[name])
    passes(cluster, 50)
    suspend(cluster)
    goodput = cluster.status.goodput
    assert goodput.chip_seconds.placeholders == 2 * 4 * 50
    placement = cluster.status.placement
    assert placement.chip_seconds["placeholders"] == 2 * 4 * 50
    assert sum(placement.chip_seconds.values()) == goodput.chip_seconds.total


def test_a_job_that_is_out_of_chip_hours_grows_no_more() -> None:
    cluster = given_a_gang_on_the_smaller_slice(GROWING)
    later(cluster, seconds=1800)
    for name in HELD:
        kubelet.make_ready(cluster, cluster.pods[name])
    cluster.edit_run_policy(budget={"chipHours": 1})
    attempt = cluster.status.attempt
    some_passes(cluster, 4)
    assert (cluster.status.state, cluster.status.attempt, cluster.pods) == (State.SUSPENDED, attempt, {})


def test_a_gang_that_has_not_come_to_its_first_step_is_not_moved() -> None:
    cluster = given_a_begun_attempt(GROWING, listens=True)
    waits(cluster, 10)
    for _ in range(6):
        kubelet.sweep(cluster)
        one_pass(cluster)
        all_are_ready(cluster)
    for seconds, phase, expected in ((1800, ReportPhase.STARTING, []), (1200, ReportPhase.TRAINING, HELD)):
        passes(cluster, seconds)
        kubelet.report(cluster, 1, phase)
        one_pass(cluster)
        assert held(cluster) == expected
