"""Where the time of a job goes, second by second."""

from collections.abc import Callable

import pytest

from tests.planner import kubelet
from tests.planner.laws import life
from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import one_pass
from tests.planner.story import (
    all_are_ready,
    fails,
    finish,
    get_ready,
    given_a_job,
    given_a_running_gang,
    is_seen_to_fail,
    later,
    passes,
    resume,
    some_passes,
    suspend,
)
from tpu_contract.protocol import ReportPhase
from tpu_training_operator.api.status import Activity, Goodput
from tpu_training_operator.domain.cluster_state.observed import format_time, parse_time

# Every part of a story takes a different number of seconds, so that no sum can be mistaken for another.
QUEUE, START, TRAIN = 30, 20, 100


def given_a_gang_that_waits_for_nodes(**policy: object) -> ModelCluster:
    cluster = given_a_job({"spec.runPolicy": policy} if policy else None, listens=True)
    one_pass(cluster)
    one_pass(cluster)
    return cluster


def it_gets_nodes(cluster: ModelCluster, after: float) -> None:
    passes(cluster, after)
    for pod in cluster.pods.values():
        kubelet.place(cluster, pod)


def it_takes_its_first_step(cluster: ModelCluster, after: float, step: int = 1) -> None:
    """Long after its workers became ready."""
    get_ready(cluster)
    passes(cluster, after)
    it_reports(cluster, step)


def it_reports(cluster: ModelCluster, step: int, checkpoint: int | None = None) -> None:
    kubelet.report(cluster, step, checkpoint_step=checkpoint)
    one_pass(cluster)


def given_a_gang_that_trains(**policy: object) -> ModelCluster:
    cluster = given_a_gang_that_waits_for_nodes(**policy)
    it_gets_nodes(cluster, QUEUE)
    it_takes_its_first_step(cluster, START)
    return cluster


def restart(cluster: ModelCluster) -> None:
    """A failure whose old workers go at once and whose new workers are there at once."""
    some_passes(cluster, 3)


def accounts(cluster: ModelCluster) -> Goodput:
    goodput = cluster.status.goodput
    created = parse_time(cluster.job["metadata"]["creationTimestamp"])
    assert life(goodput) == (parse_time(goodput.since) - created).total_seconds()
    return goodput


def split(cluster: ModelCluster) -> dict[str, int]:
    """The sums that are not zero."""
    goodput = accounts(cluster)
    sums = goodput.by_account | {"unsaved": goodput.unsaved}
    return {name: seconds for name, seconds in sums.items() if seconds}


def test_a_job_that_has_just_begun_waits() -> None:
    cluster = given_a_job()
    later(cluster, seconds=3)
    assert split(cluster) == {"queue": 3}
    assert accounts(cluster).activity is Activity.QUEUE


def test_a_job_without_trouble_has_queued_started_and_trained() -> None:
    cluster = given_a_gang_that_trains()
    passes(cluster, TRAIN)
    finish(cluster)
    assert split(cluster) == {"queue": 30, "start": 20, "productive": 100, "unsaved": 100}
    assert (accounts(cluster).activity, accounts(cluster).since) == (Activity.FINISHED, format_time(cluster.now))
    assert accounts(cluster).ratio == "0.667"


def test_what_was_trained_after_the_last_checkpoint_is_wasted_by_a_failure() -> None:
    cluster = given_a_gang_that_trains()
    passes(cluster, 60)
    it_reports(cluster, 60, checkpoint=60)
    passes(cluster, 40)
    fails(cluster, "digits-1-0-2")
    restart(cluster)
    assert split(cluster) == {"queue": 30, "start": 20, "productive": 60, "wasted": 40}
    assert accounts(cluster).activity is Activity.RECOVERY


def test_recovery_lasts_from_the_failure_to_the_next_step_without_the_wait_for_nodes() -> None:
    cluster = given_a_gang_that_trains()
    passes(cluster, 60)
    it_reports(cluster, 60, checkpoint=60)
    passes(cluster, 40)
    fails(cluster, "digits-1-0-2")
    passes(cluster, 2)
    restart(cluster)
    it_gets_nodes(cluster, 7)
    it_takes_its_first_step(cluster, 11, step=61)
    assert split(cluster) == {"queue": 30 + 7, "start": 20, "productive": 60, "wasted": 40, "recovery": 2 + 11}
    assert accounts(cluster).activity is Activity.TRAIN


def test_a_failure_that_is_seen_late_ends_the_training_when_it_happened() -> None:
    cluster = given_a_gang_that_trains()
    passes(cluster, 60)
    fails(cluster, "digits-1-0-2")
    later(cluster, seconds=1000)
    assert split(cluster) == {"queue": 30, "start": 20, "wasted": 60, "recovery": 1000}


def test_a_gang_that_is_preempted_has_saved_what_it_did() -> None:
    cluster = given_a_gang_that_trains()
    cluster.job["spec"]["checkpoint"] = {"uri": "gs://bucket/digits"}
    passes(cluster, 60)
    is_seen_to_fail(cluster, "digits-1-0-2", 75)
    assert split(cluster) == {"queue": 30, "start": 20, "productive": 60}


def saves_at_step(cluster: ModelCluster, step: int) -> None:
    kubelet.report(cluster, 60, ReportPhase.CHECKPOINTING, checkpoint_step=step)


SAVES = {
    "everything": (60, {"productive": 60}),
    "a part": (45, {"productive": 45, "wasted": 15}),
    "nothing": (None, {"wasted": 60}),
}


@pytest.mark.parametrize("saves", SAVES)
@pytest.mark.parametrize("resumed", ["while its workers stop", "later"])
def test_a_suspension_keeps_what_the_worker_reported_as_saved(saves: str, resumed: str) -> None:
    """The last report comes right before the pod is deleted."""
    step, expected = SAVES[saves]
    cluster = given_a_gang_that_trains()
    cluster.job["spec"]["checkpoint"] = {"uri": "gs://bucket/digits"}
    passes(cluster, 60)
    suspend(cluster)
    one_pass(cluster)
    if step is not None:
        saves_at_step(cluster, step)
    if resumed == "later":
        kubelet.sweep(cluster)
        one_pass(cluster)
    passes(cluster, 5000)
    resume(cluster)
    assert split(cluster) == {"queue": 30, "start": 20, **expected, "suspended": 5000}
    assert accounts(cluster).activity is Activity.QUEUE
    assert accounts(cluster).unsaved == 0


@pytest.mark.parametrize(("checkpoint", "kept"), [(True, "productive"), (False, "wasted")])
def test_a_suspended_trainer_that_cannot_report_has_saved_if_checkpoints_are_on(checkpoint: bool, kept: str) -> None:
    cluster = given_a_running_gang({"spec.checkpoint": {"uri": "gs://bucket/digits"}} if checkpoint else None)
    passes(cluster, 60)
    suspend(cluster)
    one_pass(cluster)
    kubelet.sweep(cluster)
    one_pass(cluster)
    goodput = accounts(cluster)
    assert getattr(goodput, kept) >= 60
    assert goodput.productive * goodput.wasted == 0


def test_the_pause_after_releasing_the_nodes_counts_as_queue_time() -> None:
    cluster = given_a_gang_that_waits_for_nodes(startDeadlineSeconds=50)
    passes(cluster, 10)
    kubelet.place(cluster, cluster.pods["digits-1-0-0"])
    later(cluster, seconds=50)
    assert split(cluster) == {"queue": 60}
    passes(cluster, 1000)
    restart(cluster)
    it_gets_nodes(cluster, 5)
    get_ready(cluster)
    assert split(cluster) == {"queue": 60 + 1000 + 5}


def test_a_loop_that_never_reports_counts_as_training_from_ready_on() -> None:
    own = {"image": "localhost/own:1", "command": ["python", "loop.py"]}
    cluster = given_a_job({"spec.trainer": own}, listens=True)
    one_pass(cluster)
    one_pass(cluster)
    it_gets_nodes(cluster, QUEUE)
    passes(cluster, START)
    get_ready(cluster)
    passes(cluster, TRAIN)
    finish(cluster)
    assert split(cluster) == {"queue": 30, "start": 20, "productive": 100, "unsaved": 100}


def test_a_trainer_whose_reports_are_lost_counts_as_having_trained() -> None:
    cluster = given_a_gang_that_waits_for_nodes()
    it_gets_nodes(cluster, QUEUE)
    get_ready(cluster)
    passes(cluster, TRAIN)
    finish(cluster)
    assert split(cluster) == {"queue": 30, "productive": 100, "unsaved": 100}


def at_once(cluster: ModelCluster) -> None:
    pass


def at_the_next_report(cluster: ModelCluster) -> None:
    passes(cluster, 9)
    it_reports(cluster, 70)


@pytest.mark.parametrize(("then", "late"), [(at_once, 0), (at_the_next_report, 9)])
def test_a_step_reported_before_the_gang_is_ready_does_not_hide_the_wait_for_nodes(
    then: Callable[[ModelCluster], None], late: int
) -> None:
    """An operator that was down finds a gang that already trains."""
    cluster = given_a_gang_that_trains()
    passes(cluster, 60)
    it_reports(cluster, 60, checkpoint=60)
    fails(cluster, "digits-1-0-2")
    restart(cluster)
    it_gets_nodes(cluster, 700)
    all_are_ready(cluster)
    passes(cluster, 13)
    it_reports(cluster, 65)
    one_pass(cluster)
    then(cluster)
    assert split(cluster) == {"queue": 30 + 700, "start": 20, "productive": 60, "recovery": 13 + late}


def test_compiling_does_not_count_as_training() -> None:
    cluster = given_a_gang_that_waits_for_nodes()
    it_gets_nodes(cluster, QUEUE)
    get_ready(cluster)
    passes(cluster, START)
    kubelet.report(cluster, 1, ReportPhase.STARTING)
    one_pass(cluster)
    assert accounts(cluster).activity is Activity.START


def test_after_a_clock_was_set_back_the_job_ends_when_its_goodput_does() -> None:
    cluster = given_a_gang_that_trains()
    since = accounts(cluster).since
    passes(cluster, -40)
    finish(cluster)
    assert cluster.status.completion_time == accounts(cluster).since == since
