"""A job that goes up a ladder: its rungs, the gates between them, and what is left when one fails."""

import json
from typing import Any

import pytest

from tests.planner import kubelet
from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import one_pass
from tests.planner.story import (
    all_passes,
    fails,
    gang,
    given_a_job,
    is_seen_to_fail,
    ready_message,
    reason,
    some_passes,
)
from tpu_training_operator.api.conditions import ConditionType, is_true
from tpu_training_operator.api.status import RungVerdict, State

SMALL, MIDDLE = {"acceleratorType": "v5litepod-4"}, {"acceleratorType": "v5litepod-8"}
RUNGS = [{"slice": SMALL, "steps": 20}, {"slice": MIDDLE, "steps": 20}]
TUNED = {"spec.recipe.tunedOn": {"acceleratorType": "v5litepod-4"}, "spec.recipe.globalBatchSize": 32}
GANGS = [["digits-1-0-0"], ["digits-2-0-0", "digits-2-0-1"], [f"digits-3-0-{host}" for host in range(4)]]


def given_a_ladder(*gates: dict[str, Any], **changes: Any) -> ModelCluster:
    """`gates`: of the first rungs."""
    rungs = [rung | {"gates": given} for rung, given in zip(RUNGS, (*gates, {}, {}), strict=False)]
    return given_a_job(TUNED | {"spec.ladder": {"rungs": rungs, **changes}})


def starts(cluster: ModelCluster) -> list[str]:
    """The pods of the attempt, once its gang runs."""
    all_passes(cluster, 4)
    assert cluster.status.state == State.RUNNING
    return gang(cluster)


def trained(rate: float = 100.0, step: int = 20, **changes: Any) -> str:
    rung = {
        "firstLoss": 2.0,
        "lastLoss": 1.0,
        "averaged": 5,
        "errorsFallen": 9.0,
        "recompilations": 0,
        "notFinite": 0,
        "findings": {},
    }
    rung |= {"evaluated": ["accuracy"]}
    message = {"outcome": "Succeeded", "message": "trained", "step": step, "metrics": {"loss": 1.0, "accuracy": 0.9}}
    return json.dumps(message | {"examplesPerSecond": rate, "rung": rung | changes})


def ends(cluster: ModelCluster, message: str) -> None:
    for name in gang(cluster):
        kubelet.end(cluster, cluster.pods[name], message=message)
    one_pass(cluster)


def verdicts(cluster: ModelCluster) -> list[RungVerdict]:
    return [rung.verdict for rung in cluster.status.rungs]


def test_a_job_goes_up_its_rungs_and_then_trains() -> None:
    cluster = given_a_ladder()
    for number, (pods, rate) in enumerate(zip(GANGS, (400.0, 720.0, 1440.0), strict=True), 1):
        assert starts(cluster) == pods
        assert str(cluster.status.ladder) == f"{number}/3"
        assert f"rung {number} of 3: attempt {number}" in ready_message(cluster)
        ends(cluster, trained(rate))
    status = cluster.status
    assert status.state == State.SUCCEEDED
    assert verdicts(cluster) == [RungVerdict.PASSED] * 3
    assert [rung.slice for rung in status.rungs] == ["v5litepod-4", "v5litepod-8", "v5litepod-16"]
    assert [rung.global_batch_size for rung in status.rungs] == [32, 64, 128]
    assert [rung.learning_rate for rung in status.rungs] == ["0.1", "0.2", "0.4"]
    assert [rung.efficiency for rung in status.rungs] == [None, "0.9", "1"]
    assert [rung.attempt for rung in status.rungs] == [1, 2, 3]
    assert [event["reason"] for event in cluster.events] == [
        *("AttemptStarted", "Running", "NextRung", "Running", "NextRung", "Running", "Succeeded")
    ]


def test_the_verdict_and_the_attempt_on_the_next_rung_are_one_write() -> None:
    cluster = given_a_ladder()
    starts(cluster)
    ends(cluster, trained())
    status = cluster.status
    assert (status.attempt, str(status.ladder), verdicts(cluster)) == (
        2,
        "2/3",
        [RungVerdict.PASSED, RungVerdict.RUNNING],
    )
    assert (status.placement.slice, status.placement.reason) == ("v5litepod-8", "Rung")
    assert status.resolved.accelerator_type == "v5litepod-8"
    assert list(cluster.pods) == ["digits-1-0-0"]


GATES: dict[str, tuple[dict[str, Any], str, str]] = {
    "lossFalls": ({}, trained(lastLoss=2.0, errorsFallen=-0.4), "the loss did not fall from 2 to 2"),
    "finite": ({}, trained(notFinite=1), "1 step whose loss or gradients were not finite"),
    "noRecompilation": ({}, trained(recompilations=2), "2 programs compiled after the warm-up"),
    "minEfficiency": ({"minEfficiency": "0.9"}, trained(rate=100.0), "efficiency 0.5, at least 0.9 required"),
    "noFindings": ({"noFindings": ["HostSync"]}, trained(findings={"HostSync": 1}), "the doctor found HostSync (1)"),
    "evaluation": ({"evaluation": {"metric": "accuracy", "min": "0.95"}}, trained(), "at least 0.95 required"),
}


@pytest.mark.parametrize("gate", GATES)
def test_a_gate_that_fails_ends_the_job_with_its_numbers_and_leaves_nothing_running(gate: str) -> None:
    gates, message, words = GATES[gate]
    cluster = given_a_ladder({}, gates)
    starts(cluster)
    ends(cluster, trained(rate=100.0))
    starts(cluster)
    ends(cluster, message)
    assert cluster.status.state == State.FAILED
    assert reason(cluster.status, ConditionType.FAILED) == ("True", "GateFailed")
    assert ready_message(cluster).startswith(f"rung 2 of 3 on v5litepod-8: {gate} failed: ")
    assert words in ready_message(cluster)
    assert verdicts(cluster) == [RungVerdict.PASSED, RungVerdict.FAILED]
    assert any(f"{gate} failed" in str(line) for line in cluster.status.rungs[-1].gates)
    some_passes(cluster, 3)
    assert all(pod["status"]["phase"] == "Succeeded" for pod in cluster.pods.values())
    assert cluster.status.attempt == 2


LONG = [rung | {"steps": 60} for rung in RUNGS]
LINEAR, FLATTER = ["0.1", "0.2"], ["0.1", "0.171"]


@pytest.mark.parametrize(
    ("measured", "own", "rates"),
    [
        (160, None, FLATTER),
        # (1 + 160 / 32) / (1 + 160 / 64) = 1.71; with 320 examples it is 1.83.
        (160, 320, ["0.1", "0.183"]),
        *((hostile, None, LINEAR) for hostile in (None, 0, -160, 0.5, 1e300, float("nan"), "160", [160])),
    ],
)
def test_the_noise_scale_of_a_rung_sets_the_rate_of_the_next_unless_the_user_has_set_one(
    measured: Any, own: float | None, rates: list[str]
) -> None:
    cluster = given_a_job(TUNED | {"spec.ladder": {"rungs": LONG}})
    if own is not None:
        cluster.job["spec"]["recipe"]["gradientNoiseScale"] = own
    starts(cluster)
    before = cluster.status.rungs[0].learning_rate
    ends(cluster, trained(step=60, noiseScale=measured))
    status = cluster.status
    assert [before, status.rungs[1].learning_rate] == rates
    assert status.resolved.learning_rate == rates[1]
    said = [note for note in status.resolved.notes if "measured on rung 1, v5litepod-4" in note]
    assert len(said) == (rates is FLATTER)
    # Nothing but a verdict changes the rate: neither later passes nor another operator, nor a spec that is invalid for
    # a while.
    starts(cluster)
    batch = cluster.job["spec"]["recipe"]["globalBatchSize"]
    cluster.job["spec"]["recipe"]["globalBatchSize"] = 33
    some_passes(cluster, 2)
    cluster.job["spec"]["recipe"]["globalBatchSize"] = batch
    some_passes(cluster, 2)
    assert cluster.status.resolved == status.resolved
    run = json.loads(cluster.others["ConfigMap/digits-2"]["data"]["run.json"])
    assert run["optimizer"]["learningRate"] == rates[1]
    assert run["report"]["gradientNoiseScale"] is True


def test_a_rung_of_few_steps_does_not_set_the_rate() -> None:
    cluster = given_a_ladder()
    starts(cluster)
    ends(cluster, trained(noiseScale=160))
    assert cluster.status.rungs[0].noise_scale is None
    assert cluster.status.resolved.learning_rate == "0.2"


def test_a_broken_task_stops_at_the_first_rung() -> None:
    cluster = given_a_ladder()
    is_seen_to_fail(cluster, starts(cluster)[0], 1)
    assert (cluster.status.state, cluster.status.attempt) == (State.FAILED, 1)
    assert verdicts(cluster) == [RungVerdict.FAILED]


def test_a_trainer_that_measures_nothing_passes_no_gate() -> None:
    cluster = given_a_ladder()
    starts(cluster)
    ends(cluster, '{"outcome": "Succeeded", "message": ""}')
    assert reason(cluster.status, ConditionType.FAILED) == ("True", "GateFailed")


def test_a_failure_of_the_infrastructure_repeats_the_rung() -> None:
    cluster = given_a_ladder()
    starts(cluster)
    ends(cluster, trained())
    fails(cluster, starts(cluster)[0])
    assert starts(cluster) == ["digits-3-0-0", "digits-3-0-1"]
    assert (str(cluster.status.ladder), verdicts(cluster)) == ("2/3", [RungVerdict.PASSED, RungVerdict.RUNNING])
    ends(cluster, trained())
    assert cluster.status.rungs[1].attempt == 3


def test_a_suspended_job_resumes_on_its_rung() -> None:
    cluster = given_a_ladder()
    starts(cluster)
    ends(cluster, trained())
    starts(cluster)
    cluster.job["spec"].setdefault("runPolicy", {})["suspend"] = True
    some_passes(cluster, 4)
    assert (cluster.status.state, cluster.pods) == (State.SUSPENDED, {})
    cluster.job["spec"]["runPolicy"]["suspend"] = False
    assert starts(cluster) == ["digits-3-0-0", "digits-3-0-1"]
    assert str(cluster.status.ladder) == "2/3"


def test_a_rung_that_ends_while_the_job_is_suspended_has_passed() -> None:
    cluster = given_a_ladder()
    starts(cluster)
    cluster.job["spec"].setdefault("runPolicy", {})["suspend"] = True
    ends(cluster, trained())
    assert verdicts(cluster)[0] is RungVerdict.PASSED
    some_passes(cluster, 4)
    assert (cluster.status.state, cluster.pods) == (State.SUSPENDED, {})


def test_a_lost_status_starts_again_at_the_first_rung() -> None:
    cluster = given_a_ladder()
    starts(cluster)
    ends(cluster, trained())
    starts(cluster)
    del cluster.job["status"]
    cluster.now = cluster.now.replace(hour=23)
    one_pass(cluster)
    assert (cluster.status.attempt, str(cluster.status.ladder)) == (3, "1/3")
    assert starts(cluster) == ["digits-3-0-0"]


def test_a_rung_does_not_end_a_job_whose_spec_has_become_invalid() -> None:
    cluster = given_a_ladder()
    starts(cluster)
    cluster.job["spec"]["recipe"]["globalBatchSize"] = 33
    ends(cluster, trained())
    assert cluster.status.state == State.INVALID
    assert not is_true(cluster.status.conditions, ConditionType.SUCCEEDED)


def test_the_job_continues_the_last_lower_rung_if_it_is_asked_to() -> None:
    cluster = given_a_ladder(**{"from": "Checkpoint"})
    cluster.job["spec"]["checkpoint"] = {"uri": "gs://bucket/all"}
    for _ in range(2):
        starts(cluster)
        ends(cluster, trained())
    starts(cluster)
    run = json.loads(cluster.others["ConfigMap/digits-3"]["data"]["run.json"])
    assert run["checkpoint"]["uri"] == "gs://bucket/all/default/digits"
    assert run["checkpoint"]["resumeFrom"] == f"gs://bucket/all/default/digits.rungs/{cluster.uid}-2"
    assert "endAfterSteps" not in run


def test_verdicts_that_somebody_has_edited_bring_the_job_to_that_rung_with_workers_of_its_own() -> None:
    cluster = given_a_ladder()
    starts(cluster)
    (rung,) = cluster.job["status"]["ladder"]["rungs"]
    cluster.job["status"]["ladder"]["rungs"] = [rung | {"verdict": "Passed", "attempt": 1}]
    assert starts(cluster) == ["digits-2-0-0", "digits-2-0-1"]
    assert (str(cluster.status.ladder), verdicts(cluster)) == ("2/3", [RungVerdict.PASSED, RungVerdict.RUNNING])


@pytest.mark.parametrize("rungs", [None, [], [{"verdict": "Passed"}], [{"verdict": "Great", "attempt": 1}] * 9, "all"])
def test_stages_that_cannot_be_read_begin_the_ladder_again(rungs: Any) -> None:
    cluster = given_a_ladder()
    starts(cluster)
    cluster.job["status"]["ladder"]["rungs"] = rungs
    ends(cluster, trained())
    assert str(cluster.status.ladder) == "2/3"
    assert cluster.status.rungs[0].verdict is RungVerdict.PASSED
