"""The planner's branches, one by one: what it does and shows for a given job and its pods."""

import copy
from datetime import timedelta

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.planner import kubelet
from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import actions, look, one_pass
from tests.planner.story import (
    WORKERS,
    all_finish,
    described,
    fails,
    finish,
    given_a_begun_attempt,
    given_a_created_gang,
    given_a_job,
    given_a_running_gang,
    is_seen_to_fail,
    passes,
    reason,
    resume,
    suspend,
    until_running,
)
from tests.unit.kstatus import kstatus
from tpu_training_operator.api.conditions import ConditionType, find, is_true
from tpu_training_operator.api.constants import LABEL_QUEUE
from tpu_training_operator.api.status import State
from tpu_training_operator.domain.cluster_state.observed import Object, Observed, format_time, parse_time
from tpu_training_operator.domain.objects.actions import Event
from tpu_training_operator.domain.plan.plan import Plan
from tpu_training_operator.domain.plan.planner import plan

# The beginning.


def test_a_new_job_gets_its_first_attempt_and_nothing_else() -> None:
    cluster = given_a_job()
    decided = one_pass(cluster)
    assert actions(decided) == []
    assert (cluster.status.attempt, cluster.status.state) == (1, State.STARTING)
    assert decided.again == timedelta(0)
    assert cluster.status.start_time == format_time(cluster.now)
    assert reason(cluster.status) == ("False", "WaitingForWorkers")
    assert kstatus(cluster.job) == "InProgress"


def test_the_first_attempt_resolves_the_spec() -> None:
    resolved = given_a_begun_attempt().status.resolved
    assert (resolved.accelerator_type, resolved.hosts, resolved.replicas) == ("v5litepod-16", 4, 16)
    assert (resolved.global_batch_size, resolved.per_replica_batch_size, resolved.learning_rate) == (128, 8, "0.1")
    assert resolved.notes != []


def test_an_attempt_gets_its_shared_objects_first_and_then_its_workers() -> None:
    decided = look(given_a_begun_attempt())
    shared, workers = (described(Plan((batch,))) for batch in decided.batches)
    assert shared == ["create Service digits", "create ConfigMap digits-1", "create ConfigMap digits-1-env"]
    assert workers == [f"create Pod {name}" for name in WORKERS]
    assert decided.status is None


def test_only_missing_workers_are_created() -> None:
    cluster = given_a_created_gang()
    del cluster.pods["digits-1-0-2"]
    assert described(look(cluster))[-1] == "create Pod digits-1-0-2"
    assert len(look(cluster).batches[1].actions) == 1


def test_a_created_gang_is_waited_for() -> None:
    assert look(given_a_created_gang()) == Plan()


def test_a_gang_is_ready_when_all_its_workers_are() -> None:
    cluster = given_a_created_gang()
    kubelet.start(cluster, cluster.pods[WORKERS[0]])
    for name in WORKERS[1:]:
        kubelet.make_ready(cluster, cluster.pods[name])
    one_pass(cluster)
    assert cluster.status.state == State.STARTING
    kubelet.make_ready(cluster, cluster.pods[WORKERS[0]])
    one_pass(cluster)
    assert cluster.status.state == State.RUNNING
    assert reason(cluster.status, ConditionType.GANG_READY) == ("True", "AllWorkersReady")
    assert kstatus(cluster.job) == "Current"


def test_a_running_gang_is_left_alone() -> None:
    assert look(given_a_running_gang()) == Plan()


# The end.


def test_a_gang_succeeds_when_all_its_workers_have_finished() -> None:
    cluster = given_a_running_gang()
    cluster.now += timedelta(hours=1)
    for pod in cluster.pods.values():
        kubelet.end(cluster, pod)
    decided = one_pass(cluster)
    assert (cluster.status.state, actions(decided)) == (State.SUCCEEDED, [])
    assert decided.events == (Event("Succeeded", "all 4 workers have finished"),)
    assert cluster.status.completion_time == format_time(cluster.now)
    assert reason(cluster.status, ConditionType.GANG_READY)[0] == "False"
    assert kstatus(cluster.job) == "Current"


def test_a_gang_that_finished_while_the_operator_was_down_succeeds() -> None:
    cluster = given_a_created_gang()
    for pod in cluster.pods.values():
        kubelet.start(cluster, pod)
        kubelet.end(cluster, pod)
    assert one_pass(cluster).status is not None
    assert cluster.status.state == State.SUCCEEDED


def test_some_workers_may_finish_before_others() -> None:
    cluster = given_a_running_gang()
    passes(cluster, 60)
    kubelet.end(cluster, cluster.pods[WORKERS[0]])
    decided = look(cluster)
    assert (decided.batches, decided.status) == ((), None)


@pytest.mark.parametrize("silent", [WORKERS[:1], WORKERS])
def test_a_trainer_that_ends_without_last_words_has_not_finished(silent: list[str]) -> None:
    cluster = given_a_running_gang()
    for name in silent:
        kubelet.end(cluster, cluster.pods[name], message="")
    one_pass(cluster)
    assert cluster.status.state == State.FAILED
    assert (cluster.status.last_failure.reason, cluster.status.last_failure.pod) == ("ExitedEarly", WORKERS[0])


def test_the_users_own_loop_may_finish_without_last_words() -> None:
    cluster = given_a_running_gang({"spec.trainer": {"image": "digits:1", "command": ["python", "train.py"]}})
    for pod in cluster.pods.values():
        kubelet.end(cluster, pod, message="")
    one_pass(cluster)
    assert cluster.status.state == State.SUCCEEDED


def test_success_shows_the_last_words_of_worker_0() -> None:
    cluster = given_a_running_gang()
    for name, pod in cluster.pods.items():
        said = '{"step": 300, "metrics": {"loss": 0.01, "accuracy": 0.98}, "examplesPerSecond": 900.5}'
        kubelet.end(cluster, pod, message=said if name == WORKERS[0] else '{"step": 1}')
    one_pass(cluster)
    progress = cluster.status.progress
    assert (progress.step, progress.total_steps, progress.loss) == (300, 300, "0.01")
    assert (progress.metrics, progress.examples_per_second) == ({"loss": "0.01", "accuracy": "0.98"}, "900.5")


@pytest.mark.parametrize("code", [0, 1])
def test_a_finished_job_keeps_its_ended_pods_for_their_logs(code: int) -> None:
    cluster = given_a_running_gang()
    for pod in cluster.pods.values():
        kubelet.end(cluster, pod, code)
    one_pass(cluster)
    assert is_true(cluster.status.conditions, ConditionType.FAILED if code else ConditionType.SUCCEEDED)
    assert actions(look(cluster)) == []


def test_a_job_with_a_completion_time_has_finished_whatever_its_conditions_are() -> None:
    cluster = given_a_running_gang()
    for pod in cluster.pods.values():
        kubelet.end(cluster, pod)
    one_pass(cluster)
    cluster.job["status"]["conditions"] = []
    cluster.pods.clear()
    decided = look(cluster)
    assert (decided.batches, decided.status) == ((), None)


def test_a_failed_job_stops_the_workers_that_still_run() -> None:
    cluster = given_a_running_gang()
    is_seen_to_fail(cluster, WORKERS[2], 1)
    assert described(look(cluster)) == [f"delete Pod {name}" for name in WORKERS if name != WORKERS[2]]


@pytest.mark.parametrize("suspend", [True, False])
def test_a_finished_job_stays_finished_whatever_is_edited(suspend: bool) -> None:
    cluster = given_a_running_gang()
    for pod in cluster.pods.values():
        kubelet.end(cluster, pod)
    one_pass(cluster)
    cluster.edit_run_policy(suspend=suspend)
    decided = one_pass(cluster)
    assert (actions(decided), cluster.status.state) == ([], State.SUCCEEDED)
    assert kstatus(cluster.job) == "Current"


# Suspension.


@pytest.mark.parametrize("resumes", [True, False])
def test_training_that_completed_before_it_was_stopped_has_succeeded(resumes: bool) -> None:
    cluster = given_a_running_gang()
    suspend(cluster)
    all_finish(cluster)
    if resumes:
        cluster.edit_run_policy(suspend=False)
    one_pass(cluster)
    assert (cluster.status.state, cluster.status.attempt) == (State.SUCCEEDED, 1)
    assert not is_true(cluster.status.conditions, ConditionType.SUSPENDED)
    assert sorted(cluster.pods) == WORKERS
    assert kstatus(cluster.job) == "Current"


def test_training_that_is_partly_complete_is_suspended() -> None:
    cluster = given_a_running_gang()
    suspend(cluster)
    for name in WORKERS[:3]:
        kubelet.end(cluster, cluster.pods[name])
    one_pass(cluster)
    kubelet.sweep(cluster)
    one_pass(cluster)
    assert (cluster.status.state, cluster.pods) == (State.SUSPENDED, {})


def test_events_tell_what_users_wait_for(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_running_gang({"spec.slice.acceleratorType": "v5litepod-4"})
    for is_wanted in (True, False):
        cluster.edit_run_policy(suspend=is_wanted)
        one_pass(cluster)
    told = [(event["reason"], event["note"]) for event in cluster.events]
    assert [reason for reason, _ in told] == ["Running", "Suspended", "Resumed"]
    assert told == snapshot


def test_a_job_created_suspended_starts_nothing() -> None:
    cluster = given_a_job({"spec.runPolicy": {"suspend": True}})
    decided = one_pass(cluster)
    assert (actions(decided), cluster.status.attempt, cluster.status.state) == ([], 0, State.SUSPENDED)
    assert look(cluster).status == cluster.status
    assert kstatus(cluster.job) == "Current"


def test_suspending_stops_the_gang() -> None:
    cluster = given_a_running_gang()
    cluster.edit_run_policy(suspend=True)
    assert described(one_pass(cluster)) == [], "a worker is stopped before the status says so"
    assert described(one_pass(cluster)) == [f"delete Pod {name}" for name in WORKERS]
    assert kstatus(cluster.job) == "InProgress"
    kubelet.sweep(cluster)
    one_pass(cluster)
    assert reason(cluster.status) == ("True", "Suspended")
    assert kstatus(cluster.job) == "Current"


def test_resuming_starts_a_new_attempt_and_charges_nothing() -> None:
    cluster = given_a_running_gang()
    suspend(cluster)
    kubelet.sweep(cluster)
    one_pass(cluster)
    resume(cluster)
    assert (cluster.status.attempt, cluster.status.restarts.total) == (2, 0)
    assert reason(cluster.status, ConditionType.SUSPENDED) == ("False", "Resumed")
    assert [name for name in until_running(cluster) if not name.startswith("digits-2-")] == []


def test_a_resumed_job_has_the_workers_that_its_spec_describes_now() -> None:
    cluster = given_a_running_gang()
    suspend(cluster)
    kubelet.sweep(cluster)
    one_pass(cluster)
    toleration = {"key": "team", "operator": "Exists"}
    secrets, image = [{"name": "key"}], "registry.example/other:2"
    cluster.edit_trainer(tolerations=[toleration], priorityClassName="high", imagePullSecrets=secrets, image=image)
    assert actions(one_pass(cluster)) == [], "nothing begins before it is resumed"
    cluster.edit_run_policy(suspend=False)
    until_running(cluster)
    for pod in cluster.pods.values():
        spec = pod["spec"]
        assert toleration in spec["tolerations"]
        assert (spec["priorityClassName"], spec["imagePullSecrets"]) == ("high", secrets)
        assert {container["image"] for container in spec["containers"]} == {image}


def test_resuming_waits_for_workers_that_are_still_stopping() -> None:
    cluster = given_a_running_gang()
    suspend(cluster)
    one_pass(cluster)
    resume(cluster)
    assert described(one_pass(cluster)) == []
    kubelet.sweep(cluster)
    assert "create Pod digits-2-0-0" in described(one_pass(cluster))


def test_workers_stopped_by_a_suspension_have_not_failed() -> None:
    cluster = given_a_running_gang()
    suspend(cluster)
    for pod in cluster.pods.values():
        kubelet.end(cluster, pod, 75)
    one_pass(cluster)
    assert (cluster.status.last_failure, cluster.status.restarts.total) == (None, 0)


OWN_LOOP = {"spec.trainer": {"image": "localhost/own:1", "command": ["python", "loop.py"]}}


@pytest.mark.parametrize("seconds", [0, 20])
def test_a_users_own_loop_that_stops_cleanly_for_a_suspension_has_not_succeeded(seconds: int) -> None:
    cluster = given_a_running_gang(OWN_LOOP)
    suspend(cluster)
    one_pass(cluster)
    passes(cluster, seconds)
    finish(cluster)
    assert (cluster.status.state, cluster.status.last_failure) == (State.SUSPENDED, None)
    kubelet.sweep(cluster)
    resume(cluster)
    assert (cluster.status.state, cluster.status.attempt) == (State.STARTING, 2)


def test_a_users_own_loop_that_stops_cleanly_on_a_drained_node_is_started_again() -> None:
    cluster = given_a_running_gang(OWN_LOOP)
    for pod in cluster.pods.values():
        kubelet.taint_node(cluster, pod)
    passes(cluster, 5)
    finish(cluster)
    assert (cluster.status.state, cluster.status.restarts.by_class) == (State.RESTARTING, {"Infrastructure": 1})


def test_a_users_own_loop_that_has_ended_before_it_is_suspended_has_succeeded() -> None:
    cluster = given_a_running_gang(OWN_LOOP)
    all_finish(cluster)
    suspend(cluster)
    assert cluster.status.state == State.SUCCEEDED


# Trouble.


def test_an_invalid_job_is_stalled_with_the_reason(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_job({"spec.recipe.globalBatchSize": 100})
    decided = one_pass(cluster)
    assert (actions(decided), cluster.status.state) == ([], State.INVALID)
    assert reason(cluster.status, ConditionType.STALLED) == ("True", "InvalidSpec")
    ready = find(cluster.status.conditions, ConditionType.READY)
    assert "spec.recipe.globalBatchSize" in ready.message
    assert "100" in ready.message
    assert "16 replicas" in ready.message
    assert ready.message == snapshot
    assert kstatus(cluster.job) == "Failed"


def test_a_running_gang_whose_spec_was_invalid_for_a_while_is_running_again() -> None:
    cluster = given_a_running_gang()
    cluster.job["spec"]["surprise"] = "of a newer operator"
    one_pass(cluster)
    assert (cluster.status.state, len(cluster.pods)) == (State.INVALID, 4)
    del cluster.job["spec"]["surprise"]
    one_pass(cluster)
    assert cluster.status.state == State.RUNNING
    assert kstatus(cluster.job) == "Current"


def given_a_running_gang_that_became_invalid() -> ModelCluster:
    """An operator that does not know one of the fields has taken over."""
    cluster = given_a_running_gang()
    cluster.job["spec"]["surprise"] = "of a newer operator"
    one_pass(cluster)
    return cluster


def test_a_gang_whose_job_became_invalid_is_watched_and_an_event_says_so_once(snapshot: SnapshotAssertion) -> None:
    cluster = given_a_running_gang_that_became_invalid()
    fails(cluster, WORKERS[0])
    assert actions(one_pass(cluster)) == []
    told = [event for event in cluster.events if event["reason"] == "InvalidSpec"]
    assert [event["type"] for event in told] == ["Warning"]
    assert "attempt 1" in told[0]["note"]
    assert told[0]["note"] == snapshot
    assert (cluster.status.state, cluster.status.attempt) == (State.INVALID, 1)


def test_an_invalid_job_succeeds_when_all_its_workers_have() -> None:
    cluster = given_a_running_gang_that_became_invalid()
    for name in WORKERS:
        assert cluster.status.state == State.INVALID
        kubelet.end(cluster, cluster.pods[name])
        one_pass(cluster)
    assert (cluster.status.state, reason(cluster.status)) == (State.SUCCEEDED, ("True", "AllWorkersSucceeded"))
    assert cluster.status.completion_time == format_time(cluster.now)
    assert kstatus(cluster.job) == "Current"


def test_an_invalid_job_that_lacks_a_worker_has_not_succeeded() -> None:
    cluster = given_a_running_gang_that_became_invalid()
    all_finish(cluster)
    kubelet.vanish(cluster, cluster.pods[WORKERS[3]])
    one_pass(cluster)
    assert cluster.status.state == State.INVALID


def test_an_invalid_job_can_be_suspended_and_continues_once_it_is_valid() -> None:
    cluster = given_a_running_gang_that_became_invalid()
    cluster.edit_run_policy(suspend=True)
    assert described(one_pass(cluster)) == []
    assert described(one_pass(cluster)) == [f"delete Pod {name}" for name in WORKERS]
    kubelet.sweep(cluster)
    one_pass(cluster)
    assert (cluster.pods, cluster.status.state) == ({}, State.INVALID)
    del cluster.job["spec"]["surprise"]
    one_pass(cluster)
    assert cluster.status.state == State.SUSPENDED
    resume(cluster)
    assert (cluster.status.attempt, cluster.status.restarts.total) == (2, 0)


@pytest.mark.parametrize(
    ("labels", "change", "field"),
    [
        ({LABEL_QUEUE: "research"}, {"trainer": {"podLabels": {LABEL_QUEUE: "other"}}}, "spec.trainer.podLabels"),
        ({}, {"slice": {"provisioning": {"type": "Queued"}}}, "spec.slice.provisioning.type"),
    ],
    ids=["a queue for each worker", "queued capacity without a queue"],
)
def test_a_change_while_suspended_is_held_to_the_rules_of_a_start(labels: Object, change: Object, field: str) -> None:
    """What would keep a new job from starting keeps this one from its next attempt, before it has a single pod."""
    cluster = given_a_running_gang()
    cluster.edit_run_policy(suspend=True)
    for _ in range(2):
        one_pass(cluster)
    kubelet.sweep(cluster)
    one_pass(cluster)
    cluster.job["metadata"].setdefault("labels", {}).update(labels)
    before = copy.deepcopy(cluster.job["spec"])
    for part, fields in change.items():
        cluster.job["spec"][part] = cluster.job["spec"][part] | fields
    resume(cluster)
    assert (cluster.status.state, cluster.pods, cluster.status.attempt) == (State.INVALID, {}, 1)
    stalled = find(cluster.status.conditions, ConditionType.STALLED)
    assert field in stalled.message
    cluster.job["spec"] = before
    cluster.job["metadata"]["labels"] = {}
    cluster.edit_run_policy(suspend=False)
    for _ in range(2):
        one_pass(cluster)
    assert cluster.status.attempt == 2


def test_a_dead_node_does_not_hold_up_the_deletion_of_a_job() -> None:
    """Foreground deletion: the job is deleted when its pods are gone."""
    cluster = given_a_running_gang()
    cluster.job["metadata"]["deletionTimestamp"] = format_time(cluster.now)
    kubelet.lose_node(cluster, cluster.pods[WORKERS[1]])
    for pod in cluster.pods.values():
        kubelet.delete_by_hand(cluster, pod)
    kubelet.sweep(cluster)
    waits = one_pass(cluster).again
    assert waits == timedelta(seconds=60)
    cluster.now += waits
    assert described(one_pass(cluster)) == [f"delete Pod {WORKERS[1]} by force"]
    assert cluster.pods == {}


def test_nothing_is_done_about_a_stale_read_of_the_job() -> None:
    cluster = given_a_running_gang()
    long_ago, _ = cluster.read()
    is_seen_to_fail(cluster, WORKERS[1])
    until_running(cluster)
    _, pods = cluster.read()
    just_created = max(parse_time(pod["metadata"]["creationTimestamp"]) for pod in pods) + timedelta(seconds=10)
    assert plan(Observed.of(long_ago, pods), just_created) == Plan(again=timedelta(seconds=1))


def test_a_gang_whose_status_was_lost_continues() -> None:
    cluster = given_a_running_gang()
    is_seen_to_fail(cluster, WORKERS[1])
    until_running(cluster)
    workers = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}
    del cluster.job["status"]
    one_pass(cluster)
    assert (cluster.status.attempt, cluster.status.state) == (2, State.STARTING)
    until_running(cluster)
    del workers[WORKERS[1]]
    assert {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()} == workers


def test_pods_of_other_owners_are_ignored() -> None:
    cluster = given_a_begun_attempt()
    cluster.pods["digits-1-0-0"] = kubelet.stranger("digits-1-0-0", attempt=1)
    assert len(Observed.of(*cluster.read()).pods) == 0


def test_a_name_that_another_object_holds_blocks_the_job_until_it_is_free() -> None:
    cluster = given_a_begun_attempt()
    cluster.pods["digits-1-0-1"] = kubelet.stranger("digits-1-0-1", attempt=1)
    decided = one_pass(cluster)
    assert (cluster.status.state, decided.again) == (State.BLOCKED, timedelta(seconds=30))
    assert reason(cluster.status, ConditionType.STALLED) == ("True", "NameConflict")
    del cluster.pods["digits-1-0-1"]
    one_pass(cluster)
    one_pass(cluster)
    assert cluster.status.state == State.STARTING
    assert kstatus(cluster.job) == "InProgress"


def test_an_edit_that_needs_no_action_is_observed() -> None:
    cluster = given_a_running_gang()
    cluster.edit_run_policy(startDeadlineSeconds=60)
    assert kstatus(cluster.job) == "InProgress"
    assert actions(one_pass(cluster)) == []
    assert kstatus(cluster.job) == "Current"


def test_a_gang_whose_creation_an_earlier_version_began_is_completed() -> None:
    """It put all variables into the pods, and none into a ConfigMap."""
    cluster = given_a_created_gang()
    old = {name: cluster.pods[name] for name in WORKERS[:3]}
    del cluster.others["ConfigMap/digits-1-env"], cluster.pods[WORKERS[3]]
    assert described(one_pass(cluster))[-2:] == ["create ConfigMap digits-1-env", f"create Pod {WORKERS[3]}"]
    assert {name: cluster.pods[name] for name in WORKERS[:3]} == old
    until_running(cluster)
    assert (cluster.status.attempt, cluster.status.state) == (1, State.RUNNING)


def test_parameters_too_large_for_a_config_map_are_refused_before_anything_starts(snapshot: SnapshotAssertion) -> None:
    # Each of these characters takes two bytes.
    large = {f"p{number}": "\u00e9" * 4096 for number in range(128)}
    cluster = given_a_begun_attempt({"spec.recipe.parameters": large})
    assert (cluster.status.state, cluster.status.attempt) == (State.INVALID, 0)
    condition = find(cluster.status.conditions, ConditionType.STALLED)
    assert "spec.recipe.parameters" in condition.message
    assert "4 hosts" in condition.message
    assert condition.message == snapshot


def test_the_host_names_of_the_largest_gang_fit_into_one() -> None:
    """With the longest name that such a gang may have, and many parameters."""
    largest = {
        "metadata.name": "a" * 14,
        "spec.slice": {"generation": "tpu8t", "topology": "5000x1x1", "chipsPerHost": 1},
        "spec.recipe.globalBatchSize": 5000,
        "spec.recipe.parameters": {f"p{number}": "x" * 1024 for number in range(128)},
    }
    cluster = given_a_job(largest)
    assert look(cluster).status is not None
    one_pass(cluster)
    assert cluster.status.state == State.STARTING
