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
from tpu_contract.slice_check import ENV_EXPECTED_CHIPS
from tpu_training_operator.api.conditions import ConditionType, is_true
from tpu_training_operator.api.constants import FAST_SLICE_CHECK_COMMAND
from tpu_training_operator.api.status import RungVerdict, State
from tpu_training_operator.api.validation import parse_job
from tpu_training_operator.domain.job.options import options_of
from tpu_training_operator.domain.job.rungs import lower_rungs_of, with_judged_steps
from tpu_training_operator.domain.job.trainer_report import ReportedRung
from tpu_training_operator.kube.cluster import Object

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
        *("Running", "NextRung", "Running", "NextRung", "Running", "Succeeded")
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


def on_top(*, listens: bool = True, **changes: Any) -> ModelCluster:
    """A job whose lower rungs have passed, and whose gang runs. `changes`: of spec.ladder."""
    cluster = given_a_job(TUNED | {"spec.ladder": {"rungs": RUNGS, **changes}}, listens=listens)
    for rate in (400.0, 720.0):
        starts(cluster)
        ends(cluster, trained(rate))
    starts(cluster)
    return cluster


def says(cluster: ModelCluster, step: int = 30, rate: float = 1440.0, **changes: Any) -> None:
    """Worker 0 reports what the first 20 steps have shown."""
    rung = json.loads(trained())["rung"] | {"steps": 20, "examplesPerSecond": rate} | changes
    kubelet.report(cluster, step, rung=ReportedRung.model_validate(rung))
    one_pass(cluster)


def test_the_first_steps_of_the_job_are_judged_while_it_goes_on() -> None:
    cluster = on_top()
    run = json.loads(cluster.others["ConfigMap/digits-3"]["data"]["run.json"])
    assert (run["judgeAfterSteps"], "endAfterSteps" in run) == (20, False)
    kubelet.report(cluster, 10)
    one_pass(cluster)
    assert verdicts(cluster)[-1] is RungVerdict.RUNNING
    says(cluster)
    top = cluster.status.rungs[-1]
    assert (top.verdict, top.efficiency, top.attempt, len(top.gates)) == (RungVerdict.PASSED, "1", 3, 4)
    assert cluster.events[-1]["reason"] == "RungPassed"
    assert (cluster.status.state, gang(cluster)) == (State.RUNNING, GANGS[2])
    # Nothing that comes later is judged again.
    says(cluster, step=40, errorsFallen=-3.0)
    assert cluster.status.rungs[-1] == top
    ends(cluster, trained(10.0))
    assert (cluster.status.state, cluster.status.rungs[-1]) == (State.SUCCEEDED, top)


@pytest.mark.parametrize("listens", [True, False])
@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ({"errorsFallen": -0.4}, "lossFalls failed: the loss did not fall"),
        ({"rate": 100.0}, "minEfficiency failed: efficiency 0.0694, at least 0.5 required"),
    ],
)
def test_a_job_whose_first_steps_fail_a_gate_ends_also_if_only_its_last_words_tell(
    listens: bool, measured: dict[str, Any], words: str
) -> None:
    cluster = on_top(listens=listens)
    if listens:
        says(cluster, **measured)
    else:
        rung = {"steps": 20, "examplesPerSecond": 1440.0, **measured}
        rung["examplesPerSecond"] = rung.pop("rate", 1440.0)
        ends(cluster, trained(1440.0, step=75, **rung))
    assert cluster.status.state == State.FAILED
    assert reason(cluster.status, ConditionType.FAILED) == ("True", "GateFailed")
    assert ready_message(cluster).startswith("rung 3 of 3 on v5litepod-16, the job's 20 steps after step 0: ")
    assert words in ready_message(cluster)
    assert verdicts(cluster)[-1] is RungVerdict.FAILED
    some_passes(cluster, 4)
    assert all(pod["status"]["phase"] == "Succeeded" for pod in cluster.pods.values())
    assert cluster.status.attempt == 3


def test_a_verdict_on_the_job_outlives_its_attempts() -> None:
    cluster = on_top()
    says(cluster)
    top = cluster.status.rungs[-1]
    fails(cluster, gang(cluster)[0])
    starts(cluster)
    assert (cluster.status.attempt, cluster.status.rungs[-1]) == (4, top)
    says(cluster, begins=15, rate=1.0)
    assert (cluster.status.state, cluster.status.rungs[-1]) == (State.RUNNING, top)


def test_an_attempt_that_continues_before_the_verdict_is_judged_by_what_it_can_show() -> None:
    cluster = on_top()
    fails(cluster, gang(cluster)[0])
    starts(cluster)
    assert verdicts(cluster)[-1] is RungVerdict.RUNNING
    says(cluster, begins=15, errorsFallen=0.1, rate=1440.0)
    gates = {gate.name: gate for gate in cluster.status.rungs[-1].gates}
    assert gates["lossFalls"].message.startswith("not judged: this attempt continues at step 15")
    assert verdicts(cluster)[-1] is RungVerdict.PASSED


def test_what_is_told_while_the_job_is_being_suspended_waits() -> None:
    cluster = on_top()
    cluster.edit_run_policy(suspend=True)
    some_passes(cluster, 2)
    says(cluster, errorsFallen=-3.0)
    some_passes(cluster, 4)
    assert (cluster.status.state, verdicts(cluster)[-1]) == (State.SUSPENDED, RungVerdict.RUNNING)
    cluster.edit_run_policy(suspend=False)
    starts(cluster)
    says(cluster)
    assert verdicts(cluster)[-1] is RungVerdict.PASSED


def test_a_job_without_gates_is_not_judged() -> None:
    off = {"lossFalls": False, "finite": False, "noRecompilation": False, "minEfficiency": "0"}
    cluster = on_top(top={"gates": off})
    assert "judgeAfterSteps" not in json.loads(cluster.others["ConfigMap/digits-3"]["data"]["run.json"])
    says(cluster, errorsFallen=-3.0)
    assert cluster.status.state == State.RUNNING


@pytest.mark.parametrize("rung", [{}, {"steps": 0, "begins": 75, "examplesPerSecond": None, "errorsFallen": None}])
def test_the_last_words_of_a_job_that_trained_nothing_more_judge_nothing(rung: dict[str, Any]) -> None:
    cluster = on_top()
    message = {"outcome": "Succeeded", "message": "nothing left to train", "step": 75}
    ends(cluster, json.dumps(message | ({"rung": rung} if rung else {})))
    assert (cluster.status.state, verdicts(cluster)[-1]) == (State.SUCCEEDED, RungVerdict.PASSED)


@pytest.mark.parametrize(("begins", "passes"), [(72, True), (0, False)])
def test_the_speed_of_an_attempt_that_makes_only_the_last_steps_is_not_judged(begins: int, passes: bool) -> None:
    cluster = on_top(listens=False)
    ends(cluster, trained(step=75, begins=begins, steps=3, examplesPerSecond=None))
    gates = {gate.name: gate for gate in cluster.status.rungs[-1].gates}
    assert gates["minEfficiency"].passed is passes
    assert gates["minEfficiency"].message.startswith("not judged: this attempt makes 3 steps") is passes
    one_pass(cluster)
    assert cluster.status.state == (State.SUCCEEDED if passes else State.FAILED)


def test_the_row_of_a_job_that_fails_as_the_top_rung_has_the_steps_that_were_judged() -> None:
    cluster = on_top()
    planned = cluster.status.rungs[-1].steps
    says(cluster, errorsFallen=-3.0)
    assert (planned, cluster.status.rungs[-1].steps) == (75, 20)


def test_what_the_job_itself_measures_of_the_noise_scale_does_not_change_its_rate_in_the_middle() -> None:
    """With report.gradientNoiseScale the top rung measures it, too."""
    cluster = on_top(top={"steps": 60})
    rate = cluster.status.resolved.learning_rate
    says(cluster, steps=60, noiseScale=40.0)
    assert (verdicts(cluster)[-1], cluster.status.rungs[-1].noise_scale) == (RungVerdict.PASSED, None)
    fails(cluster, gang(cluster)[0])
    starts(cluster)
    run = json.loads(cluster.others["ConfigMap/digits-4"]["data"]["run.json"])
    assert (cluster.status.resolved.learning_rate, str(run["optimizer"]["learningRate"])) == (rate, rate)


def test_every_rung_checks_its_own_slice_and_an_unfit_host_is_avoided_on_the_same_rung() -> None:
    cluster = given_a_job(TUNED | {"spec.ladder": {"rungs": RUNGS}, "spec.runPolicy": {"sliceCheck": "Check"}})
    starts(cluster)
    ends(cluster, trained(400.0))
    _, unfit = (cluster.pods[name] for name in starts(cluster))
    for pod in (cluster.pods[name] for name in gang(cluster)):
        assert pod["spec"]["containers"][0]["command"] == FAST_SLICE_CHECK_COMMAND
        assert expected_type(cluster, pod) == "v5litepod-8"
    node = unfit["spec"]["nodeName"]
    kubelet.find_host_unfit(cluster, unfit)
    some_passes(cluster, 3, seconds=30)
    assert (cluster.status.attempt, str(cluster.status.ladder), cluster.status.avoided_nodes) == (3, "2/3", [node])


def expected_type(cluster: ModelCluster, pod: Object) -> str:
    """The slice that a worker expects to find itself on."""
    (source,) = pod["spec"]["containers"][0]["envFrom"]
    env = cluster.others[f"ConfigMap/{source['configMapRef']['name']}"]["data"]
    return str(json.loads(env[ENV_EXPECTED_CHIPS])["accelerator_type"])


def test_an_alternative_of_other_chips_is_not_judged_by_the_speed_of_a_chip() -> None:
    gates = {"minEfficiency": 0.5, "minExamplesPerSecondPerChip": 900, "minUtilisation": 0.3}
    changes = {
        "spec.ladder": {"rungs": RUNGS, "top": {"gates": gates}},
        "spec.placement": {"alternatives": [{"slice": {"acceleratorType": "v6e-16"}}]},
    }
    own, other = options_of(parse_job(given_a_job(TUNED | changes).job))
    judged = [with_judged_steps(option, lower_rungs_of(own.job)[-1], own).resolution.judged for option in (own, other)]
    speeds = [
        (one.gates.min_efficiency, one.gates.min_examples_per_second_per_chip, one.gates.min_utilisation)
        for one in judged
        if one is not None
    ]
    assert speeds == [("0.5", "900", "0.3"), (None, None, "0.3")]
