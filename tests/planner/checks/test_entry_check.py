"""The entry check: one pod without TPUs tries a job's code before its first attempt begins."""

import json
import re
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.planner import kubelet, kueue
from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import one_pass
from tests.planner.story import (
    described,
    given_a_job,
    later,
    passes,
    ready_message,
    reason,
    resume,
    some_passes,
    suspend,
    until_running,
)
from tests.unit.jobs import job_body, resolved
from tpu_contract.protocol import ProgramMatch
from tpu_training_operator.api.conditions import ConditionType, find
from tpu_training_operator.api.status import State
from tpu_training_operator.api.validation import parse_job
from tpu_training_operator.domain.job.naming import WorkerId
from tpu_training_operator.domain.job.options import options_of
from tpu_training_operator.domain.objects.entry_check_pod import entry_check_config_map, entry_check_pod
from tpu_training_operator.domain.objects.worker_pod import worker_pod
from tpu_training_operator.domain.plan.plan import Freshness, Turn
from tpu_training_operator.kube.cluster import Object
from tpu_training_operator.kube.errors import Forbidden

POD = "digits-entry-check"
AUTO, REQUIRE = {"spec.entryCheck.mode": "Auto"}, {"spec.entryCheck.mode": "Require"}
ON_CPU = {"spec.slice.hardware": "CPU"}
OWN_LOOP = {"spec.trainer": {"image": "localhost/own:1", "command": ["python", "loop.py"]}}
TRACEBACK = (
    'Traceback (most recent call last):\n  File "/app/examples/digits.py", line 12, in task\n'
    "NameError: name 'lern' is not defined"
)
TYPO = json.dumps({"outcome": "UserError", "message": TRACEBACK})
PASSED = json.dumps({"outcome": "Succeeded", "message": "examples.digits:task made 2 steps in 3 s, loss 2.3"})


def given_a_check(changes: dict[str, Any] = AUTO, *, listens: bool = False) -> ModelCluster:
    """Its pod exists."""
    cluster = given_a_job(changes, listens=listens)
    one_pass(cluster)
    one_pass(cluster)
    return cluster


def check_ends(cluster: ModelCluster, code: int = 0, *, message: str = PASSED, **how: str) -> None:
    kubelet.start(cluster, cluster.pods[POD])
    kubelet.end(cluster, cluster.pods[POD], code, message=message, **how)


def checked(cluster: ModelCluster) -> tuple[str, str]:
    return reason(cluster.status, ConditionType.ENTRY_CHECK_PASSED)


def test_it_is_in_the_status_before_its_pod_exists() -> None:
    cluster = given_a_job(AUTO)
    one_pass(cluster)
    assert checked(cluster) == ("Unknown", "CheckingEntry")
    assert (cluster.status.attempt, cluster.pods, cluster.others) == (0, {}, {})
    one_pass(cluster)
    assert (list(cluster.pods), list(cluster.others)) == ([POD], ["ConfigMap/digits-0"])


def test_the_first_attempt_begins_when_it_has_passed() -> None:
    cluster = given_a_check()
    one_pass(cluster)
    assert cluster.status.attempt == 0
    check_ends(cluster)
    one_pass(cluster)
    assert checked(cluster) == ("True", "EntryPassed")
    assert "made 2 steps in 3 s, loss 2.3" in ready_message(cluster)
    assert cluster.status.attempt == 0
    one_pass(cluster)
    assert cluster.status.attempt == 1
    assert "delete ConfigMap digits-0" in described(one_pass(cluster))
    # Its log is kept.
    assert POD in cluster.pods


def test_a_typo_fails_the_job_with_file_and_line_and_no_worker(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_check()
    check_ends(cluster, 1, message=TYPO)
    decided = one_pass(cluster)
    assert (decided.turn, decided.freshness) == (Turn.END, Freshness.FRESH_PODS)
    status = cluster.status
    assert status.state is State.FAILED
    assert reason(status, ConditionType.FAILED) == ("True", "EntryFailed")
    message = ready_message(cluster)
    assert f"{POD} on node-of-{POD}" in message
    assert "UserError (exit code 1)" in message
    assert "(digits.py:12)" in message
    assert message == snapshot
    assert (status.last_failure.attempt, status.last_failure.failure_class) == (0, "UserError")
    assert 'digits.py", line 12' in status.last_failure.message
    assert (status.attempt, status.restarts.total, list(cluster.pods)) == (0, 0, [POD])
    assert described(one_pass(cluster)) == []


EVICTED = {"phase": "Failed", "reason": "Evicted", "message": "low on memory"}
NOTHING_ABOUT_THE_JOB = {
    "out of memory": lambda c: check_ends(c, 137, message="", reason="OOMKilled"),
    "evicted": lambda c: c.pods[POD].update(status=EVICTED),
    "without the check": lambda c: check_ends(c, 1, message="/usr/bin/python: No module named tpu_trainer"),
    "too slow": lambda c: (kubelet.start(c, c.pods[POD]), passes(c, 961)),
    "without a node": lambda c: passes(c, 301),
}


@pytest.mark.parametrize("what", NOTHING_ABOUT_THE_JOB)
def test_what_says_nothing_about_the_job_is_a_warning_and_the_job_goes_on(what: str) -> None:
    cluster = given_a_check()
    NOTHING_ABOUT_THE_JOB[what](cluster)
    one_pass(cluster)
    assert checked(cluster) == ("False", "EntryNotChecked")
    one_pass(cluster)
    assert (cluster.status.attempt, cluster.status.last_failure) == (1, None)
    until_running(cluster)


@pytest.mark.parametrize("what", NOTHING_ABOUT_THE_JOB)
def test_with_require_it_fails_the_job(what: str, snapshot: SnapshotAssertion) -> None:
    cluster = given_a_check(REQUIRE)
    NOTHING_ABOUT_THE_JOB[what](cluster)
    one_pass(cluster)
    assert reason(cluster.status, ConditionType.FAILED) == ("True", "EntryFailed")
    assert "spec.entryCheck.mode" in ready_message(cluster)
    assert ready_message(cluster) == snapshot


def test_a_container_that_has_ended_counts_once_its_pod_has_so_that_the_log_stays() -> None:
    cluster = given_a_check()
    check_ends(cluster)
    cluster.pods[POD]["status"]["phase"] = "Running"
    assert one_pass(cluster).again == timedelta(seconds=10)
    assert checked(cluster)[0] == "Unknown"
    # A sidecar keeps the pod running.
    later(cluster, seconds=11)
    assert checked(cluster) == ("True", "EntryPassed")


def test_a_pod_that_is_no_longer_needed_is_deleted_before_there_are_workers() -> None:
    cluster = given_a_check()
    kubelet.start(cluster, cluster.pods[POD])
    later(cluster, seconds=961)
    one_pass(cluster)
    assert described(one_pass(cluster)) == [f"delete Pod {POD}"]
    kubelet.sweep(cluster)
    assert "create Pod digits-1-0-0" in described(one_pass(cluster))


def test_the_pod_of_a_job_that_has_failed_is_deleted() -> None:
    cluster = given_a_check(REQUIRE)
    kubelet.start(cluster, cluster.pods[POD])
    later(cluster, seconds=961)
    assert described(one_pass(cluster)) == [f"delete Pod {POD}"]


def test_a_pod_that_is_gone_is_created_again() -> None:
    cluster = given_a_check()
    kubelet.vanish(cluster, cluster.pods[POD])
    assert described(one_pass(cluster)) == ["create ConfigMap digits-0", f"create Pod {POD}"]


def test_a_pod_that_is_being_deleted_is_awaited() -> None:
    cluster = given_a_check()
    kubelet.start(cluster, cluster.pods[POD])
    kubelet.delete_by_hand(cluster, cluster.pods[POD])
    assert described(one_pass(cluster)) == []
    assert checked(cluster)[0] == "Unknown"


def test_restarts_and_resumptions_do_not_repeat_it() -> None:
    cluster = given_a_check()
    check_ends(cluster)
    until_running(cluster)
    kubelet.end(cluster, cluster.pods["digits-1-0-2"], 137)
    until_running(cluster)
    cluster.edit_run_policy(suspend=True)
    some_passes(cluster, 3)
    cluster.edit_run_policy(suspend=False)
    until_running(cluster)
    assert cluster.status.attempt == 3
    assert checked(cluster) == ("True", "EntryPassed")


def test_a_suspension_stops_it_and_a_resumption_begins_it_anew() -> None:
    cluster = given_a_check()
    kubelet.start(cluster, cluster.pods[POD])
    suspend(cluster)
    assert checked(cluster) == ("", "")
    assert described(one_pass(cluster)) == [f"delete Pod {POD}"]
    kubelet.sweep(cluster)
    one_pass(cluster)
    assert cluster.status.state is State.SUSPENDED
    resume(cluster)
    assert checked(cluster)[0] == "Unknown"
    assert reason(cluster.status, ConditionType.SUSPENDED) == ("False", "Resumed")
    one_pass(cluster)
    check_ends(cluster)
    until_running(cluster)


def test_it_can_be_switched_off_while_it_waits() -> None:
    cluster = given_a_check()
    cluster.job["spec"]["entryCheck"] = {"mode": "Skip"}
    cluster.edit_run_policy()
    one_pass(cluster)
    assert checked(cluster) == ("False", "EntryNotChecked")
    until_running(cluster)


def test_a_pod_that_the_cluster_refuses_keeps_no_job_from_its_start() -> None:
    cluster = given_a_job(AUTO)
    one_pass(cluster)
    refused = Forbidden(403, "Forbidden", "exceeded quota: pods=10")
    create = cluster.create
    cluster.create = lambda body: _refuse(refused) if body["kind"] == "Pod" else create(body)  # type: ignore[method-assign]
    for _ in range(2):
        one_pass(cluster)
        passes(cluster, 11)
    assert cluster.status.state is State.BLOCKED
    one_pass(cluster)
    assert checked(cluster) == ("False", "EntryNotChecked")
    assert "exceeded quota" in ready_message(cluster)


def _refuse(error: Exception) -> Object:
    raise error


@pytest.mark.parametrize("changes", [{"spec.entryCheck.mode": "Skip"}, AUTO | ON_CPU, AUTO | OWN_LOOP])
def test_a_job_without_it_begins_at_once(changes: dict[str, Any]) -> None:
    cluster = given_a_job(changes)
    one_pass(cluster)
    assert cluster.status.attempt == 1


def test_a_job_with_a_command_says_that_nothing_was_checked() -> None:
    cluster = given_a_job(AUTO | OWN_LOOP)
    one_pass(cluster)
    assert checked(cluster) == ("False", "EntryNotChecked")


def test_require_checks_on_any_hardware() -> None:
    cluster = given_a_check(REQUIRE | ON_CPU)
    assert list(cluster.pods) == [POD]


def test_a_gang_of_an_operator_without_the_check_is_left_alone() -> None:
    cluster = given_a_job({"spec.entryCheck.mode": "Skip"})
    until_running(cluster)
    cluster.job["spec"]["entryCheck"] = {"mode": "Auto"}
    cluster.edit_run_policy()
    one_pass(cluster)
    kubelet.end(cluster, cluster.pods["digits-1-0-0"], 137)
    until_running(cluster)
    assert checked(cluster) == ("", "")
    assert POD not in cluster.pods


def test_a_job_in_a_queue_has_no_workload_until_it_has_passed() -> None:
    cluster = given_a_job(AUTO)
    kueue.put_in_queue(cluster)
    for _ in range(3):
        one_pass(cluster)
    assert kueue.workload(cluster) is None
    check_ends(cluster)
    for _ in range(2):
        one_pass(cluster)
    assert kueue.workload(cluster) is not None


def test_a_job_that_waits_in_a_queue_already_is_not_checked() -> None:
    cluster = given_a_job({"spec.entryCheck.mode": "Skip"})
    kueue.put_in_queue(cluster)
    one_pass(cluster)
    one_pass(cluster)
    cluster.job["spec"]["entryCheck"] = {"mode": "Auto"}
    cluster.edit_run_policy()
    one_pass(cluster)
    assert checked(cluster) == ("", "")


# The pod.


def pod_of(changes: dict[str, Any] | None = None) -> Object:
    return entry_check_pod(*resolved(AUTO | (changes or {})))


def test_it_asks_for_no_chips_and_no_tpu_node() -> None:
    job_changes = {
        "spec.trainer.nodeSelector": {"team": "vision", "topology.kubernetes.io/zone": "us-east5-b"},
        "spec.slice.provisioning": {"type": "Spot"},
        "spec.trainer.podLabels": {"kueue.x-k8s.io/pod-group-name": "group", "team": "vision"},
    }
    pod = pod_of(job_changes)
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    assert container["resources"] == {"requests": {"cpu": "500m", "memory": "2Gi"}, "limits": {"memory": "16Gi"}}
    assert spec["nodeSelector"] == {"topology.kubernetes.io/zone": "us-east5-b"}
    assert "DoesNotExist" in json.dumps(spec["affinity"])
    assert "google.com/tpu" not in json.dumps(spec)
    assert "kueue.x-k8s.io/pod-group-name" not in pod["metadata"]["labels"]
    assert (pod["metadata"]["labels"]["team"], pod["metadata"]["labels"]["tpu-operator.dev/role"]) == (
        "vision",
        "entry-check",
    )
    assert spec["activeDeadlineSeconds"] == 900


def test_it_knows_nothing_of_a_slice_that_gke_forms_and_has_no_privilege() -> None:
    formed = {"acceleratorType": "tpu7x-32", "formation": "DynamicSlice"}
    privileged = {"runAsUser": 0, "privileged": True}
    pod = pod_of({"spec.slice": formed, "spec.trainer.securityContext": privileged})
    (container,) = pod["spec"]["containers"]
    assert [variable["name"] for variable in container["env"] if "TOPOLOGY" in variable["name"]] == []
    assert [name for name in pod["metadata"]["annotations"] if "slice-topology" in name] == []
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert pod["spec"]["securityContext"]["runAsUser"] == 0


def test_it_is_a_worker_in_all_that_its_code_may_need() -> None:
    changes = {
        "spec.trainer.serviceAccountName": "trainer",
        "spec.trainer.runtimeClassName": "gvisor",
        "spec.trainer.env": [{"name": "MODEL", "value": "large"}],
        "spec.recipe.parameters": {"price": "$5"},
        "spec.trainer.volumes": [{"name": "data", "emptyDir": {}}],
        "spec.trainer.volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "spec.trainer.imagePullSecrets": [{"name": "registry"}],
    }
    pod, worker = pod_of(changes), worker_pod(*resolved(AUTO | changes), WorkerId(1, 0, 0))
    same = ("serviceAccountName", "imagePullSecrets", "securityContext", "priorityClassName", "restartPolicy")
    for name in (*same, "runtimeClassName"):
        assert pod["spec"].get(name) == worker["spec"].get(name)
    (ours,), (theirs,) = pod["spec"]["containers"], worker["spec"]["containers"]
    for name in ("image", "volumeMounts", "securityContext", "terminationMessagePath"):
        assert ours[name] == theirs[name]
    env = {variable["name"]: variable["value"] for variable in ours["env"]}
    assert (env["MODEL"], env["PJRT_DEVICE"], env["TPUJOB_ENTRY_CHECK"]) == ("large", "CPU", "true")
    assert env["TPUJOB_GLOBAL_BATCH_SIZE"] == "128"
    # Its variables are in the pod itself, where the kubelet takes $$ for a dollar.
    assert (env["TPUJOB_PARAMETER_PRICE"], "envFrom" in ours) == ("$$5", False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"limits": {"memory": "1Gi"}}, {"requests": {"cpu": "500m"}, "limits": {"memory": "1Gi"}}),
        ({"requests": {"memory": "64Gi"}}, {"requests": {"cpu": "500m", "memory": "64Gi"}, "limits": {}}),
        ({"limits": {"cpu": "4"}}, {"requests": {"memory": "2Gi"}, "limits": {"memory": "16Gi", "cpu": "4"}}),
    ],
)
def test_no_default_request_is_above_a_given_limit(given: Object, expected: Object) -> None:
    (container,) = pod_of({"spec.entryCheck.resources": given})["spec"]["containers"]
    assert container["resources"] == expected


def test_its_config_map_has_the_run_spec_of_the_slice_and_no_hosts() -> None:
    data = entry_check_config_map(options_of(parse_job(job_body(AUTO)))[0])["data"]
    assert list(data) == ["run.json"]
    document = json.loads(data["run.json"])
    assert (document["job"]["attempt"], document["slice"]["hosts"]) == (0, 4)


# Where the data is.

WITH_DATA = AUTO | {"spec.data": {"uri": "gs://data/train"}}
MUST_BE_NEAR = {"spec.entryCheck.dataInRegion": "Require"}


def has_passed(cluster: ModelCluster, places: Any) -> None:
    check_ends(cluster, message=json.dumps({"outcome": "Succeeded", "message": "made 2 steps", "places": places}))
    one_pass(cluster)


def near(cluster: ModelCluster) -> tuple[str, str]:
    return reason(cluster.status, ConditionType.DATA_IN_REGION)


def places(location: str, zone: str = "us-central1-b") -> Object:
    return {"buckets": [{"name": "data", "location": location}], "zone": zone}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (places("us"), ("True", "BucketsInRegion")),
        (places("eu"), ("False", "BucketOutsideRegion")),
        (places("us", zone=""), ("Unknown", "BucketRegionUnknown")),
        (
            {"buckets": [{"name": "data", "trouble": "denied"}], "zone": "us-central1-b"},
            ("Unknown", "BucketRegionUnknown"),
        ),
        (None, ("", "")),
        ({"buckets": "all of them"}, ("", "")),
        (
            {"buckets": [7, {"name": 7, "location": ["us"], "regions": [{}, "a"]}], "zone": {}},
            ("Unknown", "BucketRegionUnknown"),
        ),
    ],
)
def test_where_the_data_is_stands_in_a_condition_and_the_job_begins(said: Any, expected: tuple[str, str]) -> None:
    cluster = given_a_check(WITH_DATA)
    has_passed(cluster, said)
    assert near(cluster) == expected
    one_pass(cluster)
    assert cluster.status.attempt == 1


def test_the_jobs_own_word_for_its_zone_counts_before_the_checks_node() -> None:
    cluster = given_a_check(
        WITH_DATA | {"spec.trainer.nodeSelector": {"topology.kubernetes.io/zone": "europe-west4-a"}}
    )
    has_passed(cluster, places("us-central1"))
    assert near(cluster) == ("False", "BucketOutsideRegion")


@pytest.mark.parametrize("said", [places("eu"), places("us-central1", zone=""), None])
def test_required_data_that_is_not_near_fails_the_job(said: Any) -> None:
    cluster = given_a_check(WITH_DATA | MUST_BE_NEAR)
    has_passed(cluster, said)
    assert reason(cluster.status, ConditionType.FAILED) == ("True", "BucketOutsideRegion")
    assert cluster.status.attempt == 0


def test_required_data_that_is_near_lets_the_job_begin() -> None:
    cluster = given_a_check(WITH_DATA | MUST_BE_NEAR | ON_CPU)
    has_passed(cluster, places("us-central1"))
    one_pass(cluster)
    assert cluster.status.attempt == 1


def test_a_job_without_buckets_needs_none_near() -> None:
    cluster = given_a_check(AUTO | MUST_BE_NEAR)
    has_passed(cluster, None)
    one_pass(cluster)
    assert cluster.status.attempt == 1


def test_ignored_data_has_no_condition() -> None:
    cluster = given_a_check(WITH_DATA | {"spec.entryCheck.dataInRegion": "Ignore"})
    has_passed(cluster, places("eu"))
    assert near(cluster) == ("", "")


# The step, compiled.

LIMIT = int(15.75 * 2**30)
FITS = {
    "fits": True,
    "replicas": 16,
    "batch": {"perReplica": 8, "accumulation": 1},
    "memory": {"needed": 6 * 2**30, "limit": LIMIT},
    "step": {"flops": 3.5e12, "modelFlops": 3.4e12, "traffic": 26.7e9, "exchanged": {"all-reduce": 500_000_000}},
}
TOO_LARGE = FITS | {"fits": False, "memory": {"needed": 20 * 2**30, "limit": LIMIT}, "step": None}
CRASHED = {"trouble": "Ended", "said": "compiling ended with Segmentation fault:"}
MISSING = {"trouble": "Missing", "said": "the check needs jax, which /opt/trainer/bin/python does not have"}
UNTRACED = {"trouble": "BadSpec", "said": "Lightning's own Trainer trains the module"}
UNFINISHED = {"trouble": "Unfinished"}
NONZERO = {"kind": "DynamicShape", "operation": "aten::nonzero", "where": "task.py:3"}
MUST_COMPILE = AUTO | {"spec.entryCheck.compile": "Require"}


def has_compiled(cluster: ModelCluster, compiled: Any, code: int = 0, **how: str) -> None:
    words = {"outcome": "Succeeded", "message": "made 2 steps", "compiled": compiled}
    check_ends(cluster, code, message=json.dumps(words), **how)
    one_pass(cluster)


def step(cluster: ModelCluster) -> tuple[str, str, str]:
    found = find(cluster.status.conditions, ConditionType.STEP_FITS)
    return ("", "", "") if found is None else (found.status, found.reason, found.message)


def test_a_step_that_fits_begins_with_its_memory_and_its_speed_at_best_in_the_status(
    snapshot: SnapshotAssertion,
) -> None:
    cluster = given_a_check()
    has_compiled(cluster, FITS)
    value, why, message = step(cluster)
    assert (value, why) == ("True", "StepFits")
    assert re.findall(r"[\d.]+ (?:GiB|ms)|\d+%", message) == [
        "6.00 GiB",
        "15.75 GiB",
        "9.75 GiB",
        "32.6 ms",
        "56.6 ms",
        "53%",
    ]
    assert message == snapshot
    one_pass(cluster)
    assert cluster.status.attempt == 1


@pytest.mark.parametrize(
    ("found", "fact"),
    [
        ({}, "4.25 GiB too much; compiled"),
        ({"largestBatch": {"fits": 6, "refused": 7}}, "largest batch per replica that fits: 6 (7 does not fit)"),
        ({"largestBatch": {"fits": 0, "refused": 1}}, "not even one example per replica fits"),
        ({"memory": {"limit": LIMIT}}, "8 examples per replica need more than a core's 15.75 GiB"),
    ],
)
@pytest.mark.parametrize("changes", [AUTO, MUST_COMPILE])
def test_a_step_that_does_not_fit_fails_the_job_before_there_is_a_worker(
    found: Object, fact: str, changes: dict[str, Any]
) -> None:
    cluster = given_a_check(changes)
    has_compiled(cluster, TOO_LARGE | found)
    assert reason(cluster.status, ConditionType.FAILED) == ("True", "StepTooLarge")
    assert step(cluster)[:2] == ("False", "StepTooLarge")
    assert fact in ready_message(cluster)
    assert ready_message(cluster).endswith("; no worker was created")
    assert (cluster.status.attempt, list(cluster.pods)) == (0, [POD])
    assert described(one_pass(cluster)) == []


NO_ANSWER: dict[str, tuple[Any, dict[str, Any], str]] = {
    "the image cannot": (MISSING, {}, "needs jax"),
    "the compiler crashed": (CRASHED, {}, "Segmentation fault"),
    "it cannot be traced": (UNTRACED, {}, "it cannot be traced: Lightning's own Trainer trains"),
    "too slow": ({"trouble": "TooSlow"}, {}, "not compiled in time"),
    "no fixed program": ({"fits": None, "found": [NONZERO]}, {}, "task.py:3: aten::nonzero has a result whose size"),
    "out of memory": (UNFINISHED, {"code": 137, "reason": "OOMKilled"}, "out of memory; spec.entryCheck.resources"),
    "killed": (UNFINISHED, {"code": 137}, "exit code 137"),
    "the pod's deadline": (UNFINISHED, {}, "not done within 900 s (spec.entryCheck.deadlineSeconds)"),
    "words of no form": ([1, 2], {}, "cannot be read"),
    "words of another form": ({"fits": "yes", "needed": "much"}, {}, "cannot be one program"),
}


@pytest.mark.parametrize("what", NO_ANSWER)
def test_what_keeps_the_compiler_from_an_answer_keeps_no_job_from_its_start(what: str) -> None:
    words, how, said = NO_ANSWER[what]
    cluster = given_a_check()
    has_compiled(cluster, words, **how)
    assert checked(cluster) == ("True", "EntryPassed")
    assert step(cluster)[:2] == ("Unknown", "StepNotCompiled")
    assert said in step(cluster)[2]
    one_pass(cluster)
    assert (cluster.status.attempt, cluster.status.last_failure) == (1, None)


@pytest.mark.parametrize("what", NO_ANSWER)
def test_required_it_fails_the_job(what: str, snapshot: SnapshotAssertion) -> None:
    words, how, said = NO_ANSWER[what]
    cluster = given_a_check(MUST_COMPILE)
    has_compiled(cluster, words, **how)
    assert reason(cluster.status, ConditionType.FAILED) == ("True", "StepNotCompiled")
    assert said in ready_message(cluster)
    assert "spec.entryCheck.compile" in ready_message(cluster)
    assert ready_message(cluster) == snapshot


def test_an_image_without_the_compile_check_is_told_apart() -> None:
    for changes, attempt in ((AUTO, 1), (MUST_COMPILE, 0)):
        cluster = given_a_check(changes)
        check_ends(cluster)
        one_pass(cluster)
        assert "older" in step(cluster)[2]
        one_pass(cluster)
        assert cluster.status.attempt == attempt


@pytest.mark.parametrize("what", NOTHING_ABOUT_THE_JOB)
def test_a_required_verdict_needs_the_check_to_come_so_far(what: str) -> None:
    cluster = given_a_check(MUST_COMPILE)
    NOTHING_ABOUT_THE_JOB[what](cluster)
    one_pass(cluster)
    assert reason(cluster.status, ConditionType.FAILED) == ("True", "StepNotCompiled")


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        (AUTO, "300"),
        (AUTO | {"spec.entryCheck.deadlineSeconds": 60}, "60"),
        (MUST_COMPILE, "900"),
        (MUST_COMPILE | ON_CPU, "900"),
        (REQUIRE | ON_CPU, None),
        (AUTO | {"spec.entryCheck.compile": "Skip"}, None),
        (AUTO | {"spec.trainer.backend": "XLASPMD"}, None),
    ],
)
def test_the_pod_is_told_how_long_it_may_compile(changes: dict[str, Any], seconds: str | None) -> None:
    (container,) = entry_check_pod(*resolved(changes))["spec"]["containers"]
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    assert env.get("TPUJOB_COMPILE_SECONDS") == seconds


def test_a_pod_that_must_compile_has_room_for_it_and_no_chips() -> None:
    pod = pod_of(MUST_COMPILE)
    (container,) = pod["spec"]["containers"]
    assert container["resources"] == {"requests": {"cpu": "2", "memory": "8Gi"}, "limits": {"memory": "16Gi"}}
    assert "google.com/tpu" not in json.dumps(pod["spec"])


def test_alternatives_are_not_compiled() -> None:
    others = [{"slice": {"acceleratorType": "v6e-16"}, "waitForPreviousSeconds": 60}]
    cluster = given_a_check(AUTO | {"spec.placement": {"alternatives": others}})
    assert list(cluster.others["ConfigMap/digits-0"]["data"]) == ["run.json"]


# The program that was compiled, and the one that runs.

DIGEST = {"digest": "c2cfcf58928689a3-6500fdedda2249a9"}


def expected_program(cluster: ModelCluster) -> str | None:
    """The digest that the workers of this attempt get."""
    run = json.loads(cluster.others[f"ConfigMap/digits-{cluster.status.attempt}"]["data"]["run.json"])
    return None if "checkedProgram" not in run else str(run["checkedProgram"])


def test_the_status_has_the_digest_of_what_was_compiled_and_the_workers_say_whether_they_run_it() -> None:
    cluster = given_a_check(listens=True)
    has_compiled(cluster, FITS | DIGEST)
    until_running(cluster)
    assert expected_program(cluster) == DIGEST["digest"]
    program = cluster.status.checked_program
    assert program is not None
    assert (program.digest, program.slice, program.run) == (DIGEST["digest"], "v5litepod-16", None)
    for match in ProgramMatch:
        passes(cluster, 10)
        kubelet.report(cluster, 5, program=match)
        one_pass(cluster)
        assert cluster.status.checked_program == replace(program, run=match)
    # A report without it, of a restarted worker that has not come to its second step, changes nothing.
    passes(cluster, 10)
    kubelet.report(cluster, 6)
    one_pass(cluster)
    assert cluster.status.progress is not None
    assert cluster.status.progress.step == 6
    assert cluster.status.checked_program == replace(program, run=ProgramMatch.OTHER)


def test_an_image_that_tells_no_digest_gets_none() -> None:
    """An image of that age would refuse a run spec with the field."""
    cluster = given_a_check()
    has_compiled(cluster, FITS)
    until_running(cluster)
    assert cluster.status.checked_program is None
    assert expected_program(cluster) is None


def test_a_rehearsal_on_cpus_which_runs_another_program_than_the_tpus_gets_no_digest() -> None:
    cluster = given_a_check(MUST_COMPILE | ON_CPU)
    has_compiled(cluster, FITS | DIGEST)
    until_running(cluster)
    assert cluster.status.checked_program is not None
    assert expected_program(cluster) is None


def test_workers_on_another_slice_get_no_digest() -> None:
    others = [{"slice": {"acceleratorType": "v6e-16"}, "waitForPreviousSeconds": 60}]
    cluster = given_a_check(AUTO | {"spec.placement": {"alternatives": others}})
    has_compiled(cluster, FITS | DIGEST)
    some_passes(cluster, 4, seconds=100)
    one_pass(cluster)
    assert cluster.status.placement is not None
    assert cluster.status.placement.slice == "v6e-16"
    assert expected_program(cluster) is None


def test_the_first_rung_of_a_ladder_gets_the_digest_of_its_own_program() -> None:
    ladder = {"spec.ladder": {"rungs": [{"slice": {"acceleratorType": "v5litepod-16"}, "steps": 10}]}}
    cluster = given_a_check(AUTO | ladder | {"spec.slice.acceleratorType": "v5litepod-32"})
    has_compiled(cluster, FITS | DIGEST)
    until_running(cluster)
    assert expected_program(cluster) == DIGEST["digest"]
