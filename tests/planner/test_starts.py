"""The table of an attempt's start, from its cause to its first step."""

from typing import Any

import pytest

from tests.planner import kubelet, kueue
from tests.planner.laws import broken_laws
from tests.planner.model_cluster import ModelCluster, copied
from tests.planner.operators import one_pass
from tests.planner.story import (
    all_are_ready,
    all_finish,
    fails,
    get_ready,
    given_a_created_gang,
    given_a_job,
    is_seen_to_fail,
    later,
    passes,
    resume,
    some_passes,
    suspend,
)
from tpu_contract.protocol import WORKER_PHASES, ReportPhase, StartPhase
from tpu_training_operator.api.status import MOST_STARTS, AttemptStart

TOLD = dict(zip(WORKER_PHASES, (9.0, 3.0, 2.0, 4.0, 20.0, 1.0), strict=True))


def gets_nodes(cluster: ModelCluster, after: float) -> None:
    passes(cluster, after)
    for pod in cluster.pods.values():
        kubelet.place(cluster, pod)


def starts(cluster: ModelCluster, after: float) -> None:
    passes(cluster, after)
    get_ready(cluster)


def makes_its_first_step(cluster: ModelCluster, after: float, told: Any = TOLD) -> None:
    passes(cluster, after)
    kubelet.report(cluster, 1, start_seconds=told)
    one_pass(cluster)


def given_a_gang_that_trains() -> ModelCluster:
    cluster = given_a_created_gang(listens=True)
    get_ready(cluster)
    makes_its_first_step(cluster, sum(TOLD.values()))
    return cluster


def last(cluster: ModelCluster) -> AttemptStart:
    return cluster.status.starts[-1]


def shown(cluster: ModelCluster) -> dict[str, int]:
    return {phase: seconds for phase, seconds in last(cluster).seconds.items() if seconds}


def test_a_restart_is_told_phase_by_phase() -> None:
    cluster = given_a_gang_that_trains()
    passes(cluster, 100)
    fails(cluster, "digits-1-0-2")
    later(cluster, seconds=2)
    some_passes(cluster, 1, seconds=30)
    backoff = shown(cluster)
    one_pass(cluster)
    gets_nodes(cluster, 7)
    starts(cluster, 5)
    makes_its_first_step(cluster, 41)
    told = {"imports": 9, "meeting": 3, "task": 2, "checkpoint": 4, "compiled": 20, "firstStep": 1}
    assert backoff == {"noticed": 2}
    assert shown(cluster) == {"noticed": 2, "cleared": 30, "bound": 7, "started": 5, **told}
    assert (last(cluster).cause, last(cluster).total_seconds) == ("Infrastructure", 83)


def test_the_write_that_begins_an_attempt_keeps_what_was_known_of_the_one_before() -> None:
    """Its workers had begun to run, and one had failed, when the operator looked again."""
    cluster = given_a_created_gang()
    created, before = cluster.now, cluster.status
    gets_nodes(cluster, 3)
    passes(cluster, 4)
    all_are_ready(cluster)
    is_seen_to_fail(cluster, "digits-1-0-2")
    assert cluster.status.attempt == 2
    assert broken_laws(before, cluster.status, created) == []
    known, begun = cluster.status.starts
    assert (known.attempt, known.total_seconds) == (1, None)
    assert known.seconds == {"noticed": 0, "queued": 0, "backoff": 0, "cleared": 0, "bound": 3, "started": 4}
    assert (begun.attempt, begun.seconds) == (2, {"noticed": 0})


def test_a_first_attempt_has_no_failure() -> None:
    cluster = given_a_gang_that_trains()
    assert last(cluster).cause == "WaitingForWorkers"
    assert last(cluster).total_seconds == sum(TOLD.values())


def test_a_wait_for_a_later_host_is_not_a_meeting() -> None:
    """Worker 0 runs ten seconds before the others, and meets them after twelve: two of them are the meeting's."""
    cluster = given_a_created_gang(listens=True)
    first, *others = cluster.pods.values()
    kubelet.make_ready(cluster, first)
    gets_nodes(cluster, 6)
    passes(cluster, 4)
    for pod in others:
        kubelet.make_ready(cluster, pod)
    one_pass(cluster)
    makes_its_first_step(cluster, 10, TOLD | {StartPhase.MEETING: 12.0})
    assert (shown(cluster)["bound"], shown(cluster)["started"], shown(cluster)["meeting"]) == (6, 4, 2)
    assert last(cluster).total_seconds == 9 + 12 + 2 + 4 + 20 + 1


@pytest.mark.parametrize("ahead", [-500, -20, 20, 500])
def test_clocks_that_differ_make_no_phase_negative(ahead: int) -> None:
    """A node's clock is ahead of the others, or behind them: worker 0's own durations count."""
    cluster = given_a_created_gang(listens=True)
    passes(cluster, 5)
    passes(cluster, ahead)
    for pod in list(cluster.pods.values())[1:2]:
        kubelet.make_ready(cluster, pod)
    passes(cluster, -ahead)
    get_ready(cluster)
    makes_its_first_step(cluster, 60)
    assert min(last(cluster).seconds.values()) >= 0
    assert last(cluster).total_seconds == sum(last(cluster).seconds.values()) == 5 + sum(TOLD.values())


def test_a_start_under_way_shows_what_is_known() -> None:
    cluster = given_a_created_gang(listens=True)
    gets_nodes(cluster, 3)
    starts(cluster, 4)
    assert (shown(cluster), last(cluster).total_seconds) == ({"bound": 3, "started": 4}, None)
    passes(cluster, 10)
    kubelet.report(cluster, 0, ReportPhase.STARTING, start_seconds={"imports": 8.0, "meeting": 2.0})
    one_pass(cluster)
    assert (shown(cluster)["meeting"], last(cluster).total_seconds) == (2, None)


@pytest.mark.parametrize(
    ("phase", "step", "first", "untold"),
    [
        (ReportPhase.TRAINING, 1, None, 12),
        (ReportPhase.TRAINING, 61, 60, 12),
        (ReportPhase.TRAINING, 60, 60, None),
        (ReportPhase.STARTING, 1, None, None),
    ],
)
def test_an_old_trainer_or_an_own_loop_has_one_phase(
    phase: ReportPhase, step: int, first: int | None, untold: int | None
) -> None:
    cluster = given_a_created_gang(listens=True)
    get_ready(cluster)
    passes(cluster, 12)
    kubelet.report(cluster, step, phase, start_step=first)
    one_pass(cluster)
    assert (shown(cluster).get("untold"), last(cluster).total_seconds) == (untold, untold)


def test_a_start_that_is_over_stays() -> None:
    cluster = given_a_gang_that_trains()
    before = last(cluster)
    passes(cluster, 50)
    kubelet.report(cluster, 2, start_seconds={"imports": 1.0, "compiled": 1.0})
    one_pass(cluster)
    all_finish(cluster)
    one_pass(cluster)
    assert last(cluster) == before


def test_another_operator_continues_the_table() -> None:
    """All of it is in the status and in the pods; a new process knows nothing else."""
    cluster = given_a_created_gang(listens=True)
    gets_nodes(cluster, 3)
    all_are_ready(cluster)
    passes(cluster, 30)
    cluster.job = copied(cluster.job)
    makes_its_first_step(cluster, 10)
    assert shown(cluster)["bound"] == 3
    assert last(cluster).total_seconds == 3 + sum(TOLD.values())


def test_a_lost_status_has_no_start_of_the_attempt_that_continues() -> None:
    cluster = given_a_gang_that_trains()
    cluster.job["status"] = {}
    some_passes(cluster, 2, seconds=400)
    assert (cluster.status.attempt, cluster.status.starts) == (1, [])


def test_a_suspension_is_no_part_of_the_next_start() -> None:
    cluster = given_a_gang_that_trains()
    suspend(cluster)
    some_passes(cluster, 3, seconds=1000)
    resume(cluster)
    one_pass(cluster)
    starts(cluster, 4)
    assert (last(cluster).attempt, last(cluster).cause, shown(cluster)) == (2, "WaitingForWorkers", {"bound": 4})


def test_the_wait_for_admission_is_over_when_an_attempt_begins() -> None:
    cluster = given_a_job(listens=True)
    kueue.put_in_queue(cluster)
    some_passes(cluster, 2, seconds=600)
    kueue.admit(cluster)
    some_passes(cluster, 2)
    starts(cluster, 4)
    assert shown(cluster) == {"bound": 4}


def test_the_latest_starts_are_kept() -> None:
    cluster = given_a_job({"spec.runPolicy": {"restart": {"limits": [{"class": "Infrastructure", "max": -1}]}}})
    for attempt in range(1, MOST_STARTS + 4):
        some_passes(cluster, 3, seconds=4000)
        get_ready(cluster)
        fails(cluster, f"digits-{attempt}-0-1")
        one_pass(cluster)
    assert [start.attempt for start in cluster.status.starts] == list(range(5, MOST_STARTS + 5))
