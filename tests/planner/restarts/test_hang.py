"""When a running gang counts as hung, and what the operator asks it first."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.planner import kubelet
from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import KEY, look, one_pass
from tests.planner.story import (
    WORKERS,
    described,
    get_ready,
    given_a_created_gang,
    given_a_running_gang,
    later,
    passes,
    resume,
    some_passes,
    suspend,
)
from tpu_contract.protocol import ReportPhase
from tpu_training_operator.api.status import State
from tpu_training_operator.domain.cluster_state.observed import format_time
from tpu_training_operator.domain.failures.hang import STACKS_WAIT
from tpu_training_operator.domain.plan.plan import Plan
from tpu_training_operator.kube.cluster import Object

MINUTE = timedelta(minutes=1)
OWN_LOOP = {"spec.trainer": {"image": "localhost/own:1", "command": ["python", "loop.py"]}}


def with_deadline(seconds: int) -> dict[str, object]:
    return {"spec.runPolicy": {"progressDeadlineSeconds": seconds}}


def given_a_gang_that_reported(
    step: int = 10, phase: ReportPhase = ReportPhase.TRAINING, changes: dict[str, object] | None = None
) -> ModelCluster:
    """The gang reported some time after it became ready."""
    cluster = given_a_running_gang(changes, listens=True)
    passes(cluster, 60)
    reports(cluster, step, phase)
    return cluster


def reports(cluster: ModelCluster, step: int, phase: ReportPhase = ReportPhase.TRAINING, **fields: object) -> None:
    kubelet.report(cluster, step, phase, **fields)
    one_pass(cluster)


def stands_still(cluster: ModelCluster, time: timedelta) -> None:
    """It keeps reporting the same step."""
    cluster.now += time
    progress = cluster.status.progress
    if progress and progress.phase:
        kubelet.report(cluster, progress.step, progress.phase)


def until_taken_for_hung(cluster: ModelCluster) -> timedelta | None:
    """How long the gang may make no progress from now on."""
    left = look(cluster).again
    if left is not None:
        stands_still(cluster, left)
        assert described(look(cluster)) in (["ask for stacks"], [])
        assert described(look(cluster)) or look(cluster).status is not None
    return left


@pytest.mark.parametrize(
    ("phase", "deadline", "limit"),
    [
        (ReportPhase.STARTING, None, 45 * MINUTE),
        (ReportPhase.TRAINING, None, 15 * MINUTE),
        (ReportPhase.EVALUATING, None, 45 * MINUTE),
        (ReportPhase.CHECKPOINTING, None, 45 * MINUTE),
        (ReportPhase.DONE, None, 45 * MINUTE),
        (ReportPhase.STARTING, 120, 45 * MINUTE),
        (ReportPhase.TRAINING, 120, 2 * MINUTE),
        (ReportPhase.EVALUATING, 120, 45 * MINUTE),
        (ReportPhase.CHECKPOINTING, 120, 45 * MINUTE),
        (ReportPhase.DONE, 120, 45 * MINUTE),
        (ReportPhase.STARTING, 7200, 120 * MINUTE),
        (ReportPhase.TRAINING, 7200, 120 * MINUTE),
        (ReportPhase.EVALUATING, 7200, 120 * MINUTE),
        (ReportPhase.CHECKPOINTING, 7200, 120 * MINUTE),
    ],
)
def test_the_hang_limit_depends_on_the_phase(phase: ReportPhase, deadline: int | None, limit: timedelta | None) -> None:
    cluster = given_a_gang_that_reported(10, phase, with_deadline(deadline) if deadline else None)
    assert until_taken_for_hung(cluster) == limit


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        # Its reports do not arrive, but it may be training.
        ({}, None),
        (with_deadline(120), 45 * MINUTE),
        # The user's own loop need not report, unless progressDeadlineSeconds says that it does.
        (OWN_LOOP, None),
        (OWN_LOOP | with_deadline(120), 2 * MINUTE),
    ],
    ids=["trainer", "trainer with a deadline", "own loop", "own loop with a deadline"],
)
def test_a_gang_that_never_reported_is_hung_only_after_a_progress_deadline(
    changes: dict[str, object], limit: timedelta | None
) -> None:
    assert until_taken_for_hung(given_a_running_gang(changes, listens=True)) == limit


def test_a_worker_that_stops_reporting_is_not_taken_for_hung() -> None:
    cluster = given_a_gang_that_reported()
    passes(cluster, 24 * 3600)
    assert (described(look(cluster)), look(cluster).status) == ([], None)


def test_a_worker_that_stops_reporting_is_hung_if_a_progress_deadline_is_set() -> None:
    cluster = given_a_gang_that_reported(changes=with_deadline(120))
    passes(cluster, 120)
    assert described(look(cluster)) == ["ask for stacks"]


def test_a_slow_step_may_take_twenty_times_its_usual_length() -> None:
    cluster = given_a_running_gang(listens=True)
    passes(cluster, 60)
    reports(cluster, 10, examples_per_second=f"{cluster.status.resolved.global_batch_size / 90:.6g}")
    assert until_taken_for_hung(cluster) == pytest.approx(30 * MINUTE, abs=timedelta(seconds=1))


@pytest.mark.parametrize(("deadline", "limit"), [(None, None), (7200, 120 * MINUTE)], ids=["default", "deadline"])
def test_steps_computed_from_a_percentage_are_judged_only_with_a_progress_deadline(
    deadline: int | None, limit: timedelta | None
) -> None:
    """In a long training, a percentage stays the same for longer than any step takes."""
    cluster = given_a_running_gang(with_deadline(deadline) if deadline else None, listens=True)
    passes(cluster, 60)
    reports(cluster, 10, exact=False)
    assert until_taken_for_hung(cluster) == limit


def test_an_operator_that_does_not_listen_takes_no_gang_for_hung() -> None:
    assert look(given_a_running_gang(with_deadline(120))) == Plan()


def test_an_operator_that_just_started_waits_for_the_whole_limit() -> None:
    cluster = given_a_gang_that_reported()
    passes(cluster, 10_000)
    cluster.inboxes = cluster.new_inboxes()
    kubelet.report(cluster, 10)
    assert until_taken_for_hung(cluster) == 15 * MINUTE


def test_a_worker_that_reports_is_judged_by_its_reports() -> None:
    """A report that failed through no fault of the worker changes nothing."""
    cluster = given_a_gang_that_reported(changes=with_deadline(120))
    assert cluster.inboxes is not None
    for _ in range(4):
        passes(cluster, 30)
        cluster.inboxes.note_loss(KEY)
        kubelet.report(cluster, 10)
    assert described(look(cluster)) == ["ask for stacks"]


def test_the_limit_starts_again_after_a_report_could_not_be_taken() -> None:
    cluster = given_a_gang_that_reported(changes=with_deadline(120))
    assert cluster.inboxes is not None
    passes(cluster, 119)
    cluster.inboxes.note_loss(KEY)
    assert until_taken_for_hung(cluster) == 2 * MINUTE


def test_reporting_the_same_step_again_is_not_progress() -> None:
    cluster = given_a_gang_that_reported()
    for _ in range(14):
        passes(cluster, 60)
        reports(cluster, 10)
    assert until_taken_for_hung(cluster) == MINUTE


def test_a_hang_is_found_although_the_clock_was_set_back() -> None:
    cluster = given_a_gang_that_reported(changes=with_deadline(120))
    cluster.now -= timedelta(days=1)
    for _ in range(60):
        kubelet.report(cluster, 10)
        one_pass(cluster)
        if cluster.status.attempt == 2:
            break
        passes(cluster, 10)
    assert cluster.status.attempt == 2


def test_every_new_step_is_progress() -> None:
    cluster = given_a_gang_that_reported()
    for step in range(11, 100):
        passes(cluster, 14 * 60)
        reports(cluster, step)
    assert (cluster.status.attempt, until_taken_for_hung(cluster)) == (1, 15 * MINUTE)


def test_steps_after_a_long_evaluation_are_not_a_hang() -> None:
    cluster = given_a_gang_that_reported(10, ReportPhase.EVALUATING)
    passes(cluster, 44 * 60)
    reports(cluster, 10, ReportPhase.TRAINING)
    assert until_taken_for_hung(cluster) == 15 * MINUTE


def test_a_resumed_gang_may_compile_again() -> None:
    cluster = given_a_gang_that_reported(changes=with_deadline(120))
    suspend(cluster)
    one_pass(cluster)
    kubelet.sweep(cluster)
    resume(cluster)
    one_pass(cluster)
    for pod in cluster.pods.values():
        kubelet.make_ready(cluster, pod)
    one_pass(cluster)
    assert until_taken_for_hung(cluster) == 45 * MINUTE


# What the worker is asked.


def given_a_gang_that_is_asked() -> ModelCluster:
    cluster = given_a_gang_that_reported()
    stands_still(cluster, 15 * MINUTE)
    assert described(one_pass(cluster)) == ["ask for stacks"]
    return cluster


def test_a_hung_worker_is_asked_for_its_stacks_before_the_restart() -> None:
    cluster = given_a_gang_that_is_asked()
    assert look(cluster) == Plan(again=STACKS_WAIT)
    assert cluster.status.attempt == 1


def test_the_stacks_are_in_the_failure(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_gang_that_is_asked()
    passes(cluster, 8)
    reports(cluster, 10, stacks="Thread 7: in all_reduce")
    failure = cluster.status.last_failure
    assert (cluster.status.attempt, failure.reason, failure.failure_class) == (2, "NoProgress", "Hang")
    assert "900 s" in failure.message
    assert "step 10 of 300" in failure.message
    assert failure.message == snapshot
    assert failure.message.endswith("Thread 7: in all_reduce")
    assert cluster.status.restarts.by_class == {"Hang": 1}


def test_a_worker_that_does_not_send_its_stacks_is_restarted_without_them() -> None:
    cluster = given_a_gang_that_is_asked()
    cluster.now += STACKS_WAIT
    assert described(one_pass(cluster)) == []
    assert (cluster.status.attempt, cluster.status.state) == (2, State.RESTARTING)


def test_a_worker_that_never_reported_is_not_asked_for_stacks() -> None:
    cluster = given_a_running_gang(OWN_LOOP | with_deadline(120), listens=True)
    passes(cluster, 120)
    assert described(one_pass(cluster)) == []
    assert cluster.status.restarts.by_class == {"Hang": 1}


def test_a_worker_that_makes_progress_after_all_has_not_failed() -> None:
    cluster = given_a_gang_that_is_asked()
    passes(cluster, 8)
    reports(cluster, 11, stacks="Thread 7: in all_reduce")
    cluster.now += STACKS_WAIT
    assert look(cluster).status is None
    assert until_taken_for_hung(cluster) == 15 * MINUTE - STACKS_WAIT


def test_a_worker_that_hangs_again_is_asked_for_its_stacks_again() -> None:
    cluster = given_a_gang_that_is_asked()
    passes(cluster, 8)
    reports(cluster, 11, stacks="Thread 7: in all_reduce")
    stands_still(cluster, 15 * MINUTE)
    assert described(look(cluster)) == ["ask for stacks"]


def test_the_next_attempt_is_asked_for_its_own_stacks() -> None:
    cluster = given_a_gang_that_is_asked()
    cluster.now += STACKS_WAIT
    some_passes(cluster, 3)
    for pod in cluster.pods.values():
        kubelet.make_ready(cluster, pod)
    one_pass(cluster)
    reports(cluster, 10)
    stands_still(cluster, 15 * MINUTE)
    assert described(look(cluster)) == ["ask for stacks"]


# A worker that runs on after its peers.


@pytest.mark.parametrize("listens", [True, False])
@pytest.mark.parametrize(("deadline", "limit"), [({}, 2700), ({"progressDeadlineSeconds": 5000}, 5000)])
def test_a_straggler_is_found_and_named(listens: bool, deadline: dict[str, int], limit: int) -> None:
    cluster = given_a_running_gang({"spec.runPolicy": deadline}, listens=listens)
    for name in WORKERS[:3]:
        passes(cluster, 60)
        kubelet.end(cluster, cluster.pods[name])
    passes(cluster, limit - 1)
    assert look(cluster).again == timedelta(seconds=1)
    later(cluster, seconds=1)
    failure = cluster.status.last_failure
    assert (failure.failure_class, failure.reason, failure.pod) == ("Hang", "Straggler", WORKERS[3])
    assert failure.message.startswith("3 of 4 workers succeeded, ")
    assert f"digits-1-0-3 has not ended within {limit} s" in failure.message
    assert "progressDeadlineSeconds" in failure.message


def with_unknown_end(pod: Object) -> None:
    pod["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"] = None


def without_container_statuses(pod: Object) -> None:
    del pod["status"]["containerStatuses"]


def with_clock_set_back(pod: Object) -> None:
    pod["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"] = "2020-01-01T00:00:00Z"


UNKNOWN_ENDS = pytest.mark.parametrize(
    "forget", [with_unknown_end, without_container_statuses, with_clock_set_back], ids=lambda how: how.__name__
)


def given_a_long_training_of_which_one_worker_runs_on() -> ModelCluster:
    cluster = given_a_running_gang()
    passes(cluster, 10_000)
    for name in WORKERS[:3]:
        kubelet.end(cluster, cluster.pods[name])
    return cluster


@UNKNOWN_ENDS
def test_there_is_no_straggler_unless_the_end_of_every_peer_is_known(forget: Callable[[Object], None]) -> None:
    cluster = given_a_long_training_of_which_one_worker_runs_on()
    forget(cluster.pods[WORKERS[0]])
    seen = look(cluster)
    # A status, perhaps: the chips of a worker without an end are given back.
    assert (seen.batches, seen.events, seen.again) == ((), (), None)


@UNKNOWN_ENDS
def test_a_peer_without_an_end_time_had_ended_when_it_became_not_ready(forget: Callable[[Object], None]) -> None:
    cluster = given_a_long_training_of_which_one_worker_runs_on()
    forget(cluster.pods[WORKERS[0]])
    not_ready = {"type": "Ready", "status": "False", "lastTransitionTime": format_time(cluster.now + 5 * MINUTE)}
    cluster.pods[WORKERS[0]]["status"]["conditions"].append(not_ready)
    assert look(cluster).again == 50 * MINUTE


def test_a_straggler_has_the_whole_limit_after_the_gang_became_ready() -> None:
    """The clock of a peer's node was set back after the pod was created."""
    cluster = given_a_created_gang()
    passes(cluster, 10_000)
    get_ready(cluster)
    kubelet.end(cluster, cluster.pods[WORKERS[0]])
    ended = cluster.pods[WORKERS[0]]["status"]["containerStatuses"][0]["state"]["terminated"]
    ended["finishedAt"] = format_time(cluster.now - 120 * MINUTE)
    assert look(cluster).again == 45 * MINUTE


def test_a_reporter_that_makes_progress_after_its_peers_is_not_a_straggler() -> None:
    cluster = given_a_running_gang(listens=True)
    for name in WORKERS[1:]:
        kubelet.end(cluster, cluster.pods[name])
    for step in range(10):
        passes(cluster, 600)
        kubelet.report(cluster, step + 1, ReportPhase.EVALUATING)
        one_pass(cluster)
    assert cluster.status.attempt == 1
