"""The order of a pass, and how it ends when the cluster refuses. Other layers test the rest on clusters."""

import logging
from contextlib import suppress
from datetime import timedelta

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.fakes.clock import Clock
from tests.fakes.cluster import FakeCluster
from tests.unit.jobs import job_body
from tests.unit.kubelet_statuses import exited
from tests.unit.pods import NOON, pod
from tpu_contract.protocol import ENV_PACKAGES, ReportPhase
from tpu_training_operator.api.conditions import ConditionType, find
from tpu_training_operator.api.constants import RUN_SPEC_FILE
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.domain.cluster_state.worker_reports import WorkerReport
from tpu_training_operator.domain.job.naming import config_map_name, config_map_names
from tpu_training_operator.domain.objects.actions import Create
from tpu_training_operator.domain.objects.shared import WorkerNetworkPolicy
from tpu_training_operator.domain.plan.plan import Batch, Plan
from tpu_training_operator.kube.cluster import (
    CONFIG_MAPS,
    EVENTS,
    JOBS,
    NETWORK_POLICIES,
    PODS,
    SERVICES,
    JobKey,
    Object,
)
from tpu_training_operator.kube.errors import ApiError, Conflict, Forbidden, InvalidRequest, NotFound, Unavailable
from tpu_training_operator.runtime import execution
from tpu_training_operator.runtime.inbox import Inboxes
from tpu_training_operator.runtime.reconciler import Reconciler

KEY = JobKey("default", "digits")


@pytest.fixture
async def store() -> FakeCluster:
    store = FakeCluster()
    await store.create(job_body())
    store.requests.clear()
    return store


@pytest.fixture
def clock() -> Clock:
    return Clock(NOON)


@pytest.fixture
def reconciler(store: FakeCluster, clock: Clock) -> Reconciler:
    return Reconciler(store, clock)


async def reconcile_until_believed(reconciler: Reconciler, clock: Clock) -> timedelta | None:
    """A refusal counts when it repeats after a while."""
    wait = await reconciler.reconcile(KEY)
    clock.now += wait or timedelta(0)
    return await reconciler.reconcile(KEY)


async def status_of(store: FakeCluster) -> Status:
    return Status.read((await store.get(JOBS, "default", "digits")).get("status"))


async def test_the_job_is_read_before_its_pods(store: FakeCluster, reconciler: Reconciler) -> None:
    """Pods read first could lack workers of an attempt that the job, read later, left behind."""
    await reconciler.reconcile(KEY)
    assert store.requests[:2] == ["get TPUTrainingJob", "list Pod"]


async def test_an_attempt_is_begun_in_a_pass_of_its_own(store: FakeCluster, reconciler: Reconciler) -> None:
    await reconciler.reconcile(KEY)
    assert store.requests[2:] == ["update_status TPUTrainingJob"]


async def test_shared_objects_are_created_before_the_workers(store: FakeCluster, reconciler: Reconciler) -> None:
    await reconciler.reconcile(KEY)
    store.requests.clear()
    await reconciler.reconcile(KEY)
    created = [asked for asked in store.requests if asked.startswith("create")]
    assert sorted(created[:3]) == ["create ConfigMap", "create ConfigMap", "create Service"]
    assert created[3:] == ["create Pod"] * 4


async def test_a_pass_that_changes_nothing_writes_nothing(store: FakeCluster, reconciler: Reconciler) -> None:
    await reconciler.reconcile(KEY)
    await reconciler.reconcile(KEY)
    store.requests.clear()
    await reconciler.reconcile(KEY)
    assert store.requests == ["get TPUTrainingJob", "list Pod"]


@pytest.fixture
async def listening(store: FakeCluster) -> tuple[Reconciler, Inboxes]:
    """A reconciler with an inbox for each job, and a gang that is created."""
    inboxes = Inboxes(lambda: NOON)
    reconciler = Reconciler(store, lambda: NOON, inboxes=inboxes)
    await reconciler.reconcile(KEY)
    await reconciler.reconcile(KEY)
    return reconciler, inboxes


async def test_a_report_is_shown_in_the_status(store: FakeCluster, listening: tuple[Reconciler, Inboxes]) -> None:
    reconciler, inboxes = listening
    pod = await store.get(PODS, "default", "digits-1-0-0")
    inboxes.put(KEY, WorkerReport(1, pod["metadata"]["uid"], NOON, ReportPhase.TRAINING, 7))
    await reconciler.reconcile(KEY)
    progress = (await status_of(store)).progress
    assert progress.step == 7


async def test_reports_of_a_namesakes_worker_are_forgotten(
    store: FakeCluster, listening: tuple[Reconciler, Inboxes]
) -> None:
    reconciler, inboxes = listening
    inboxes.put(KEY, WorkerReport(3, "of-the-job-before", NOON, ReportPhase.TRAINING, 7))
    await reconciler.reconcile(KEY)
    assert ((await status_of(store)).progress, inboxes.of(KEY).report) == (None, None)


async def test_a_deleted_job_needs_nothing(store: FakeCluster, reconciler: Reconciler) -> None:
    assert await reconciler.reconcile(JobKey("default", "another")) is None


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (Forbidden(403, "Forbidden", "exceeded quota: tpu"), "NotPermitted"),
        (InvalidRequest(422, "Invalid", "spec.containers[0].image: Required value " + "x" * 10_000), "InvalidObject"),
    ],
)
async def test_a_refusal_is_told_in_the_clusters_own_words(
    store: FakeCluster, reconciler: Reconciler, clock: Clock, refusal: ApiError, reason: str
) -> None:
    store.faults = {"create Pod": refusal}
    await reconciler.reconcile(KEY)
    again = await reconcile_until_believed(reconciler, clock)
    status = await status_of(store)
    stalled = find(status.conditions, ConditionType.STALLED)
    assert again is not None
    assert (status.state, stalled.reason) == (State.BLOCKED, reason)
    assert str(refusal)[:60] in stalled.message


async def test_a_passing_403_does_not_stall_the_job(store: FakeCluster, reconciler: Reconciler, clock: Clock) -> None:
    await reconciler.reconcile(KEY)
    before = await status_of(store)
    store.faults = {"create Pod": Forbidden(403, "Forbidden", "not yet known to this API server")}
    for seconds in (0, 4, 9):
        clock.now = NOON + timedelta(seconds=seconds)
        assert await reconciler.reconcile(KEY) == timedelta(seconds=10 - seconds)
    assert await status_of(store) == before
    store.faults = {}
    await reconciler.reconcile(KEY)
    # A later refusal starts again.
    store.faults = {"create Pod": Forbidden(403, "Forbidden", "no")}
    await store.delete(
        PODS, "default", "digits-1-0-0", (await store.get(PODS, "default", "digits-1-0-0"))["metadata"]["uid"]
    )
    clock.now += timedelta(hours=1)
    assert await reconciler.reconcile(KEY) == timedelta(seconds=10)
    assert (await status_of(store)).state == State.STARTING


async def test_a_refusal_that_was_told_is_not_told_again(
    store: FakeCluster, reconciler: Reconciler, clock: Clock
) -> None:
    store.faults = {"create Pod": Forbidden(403, "Forbidden", "exceeded quota: tpu")}
    await reconciler.reconcile(KEY)
    await reconcile_until_believed(reconciler, clock)
    store.requests.clear()
    await reconciler.reconcile(KEY)
    assert "update_status TPUTrainingJob" not in store.requests
    assert "create Event" not in store.requests


async def test_an_event_that_cannot_be_sent_stops_nothing(store: FakeCluster, reconciler: Reconciler) -> None:
    store.faults = {"create Event": Forbidden(403, "Forbidden", "no events")}
    await reconciler.reconcile(KEY)
    assert (await status_of(store)).attempt == 1


async def test_an_unavailable_cluster_is_left_to_the_queue(store: FakeCluster, reconciler: Reconciler) -> None:
    await reconciler.reconcile(KEY)
    store.faults = {"create Pod": Unavailable(503, "", "overloaded")}
    before = await status_of(store)
    with pytest.raises(Unavailable):
        await reconciler.reconcile(KEY)
    assert await status_of(store) == before


@pytest.mark.parametrize(("refused", "unanswered"), [("Service", "ConfigMap"), ("ConfigMap", "Service")])
async def test_a_refusal_is_told_even_where_other_requests_went_unanswered(
    store: FakeCluster, reconciler: Reconciler, clock: Clock, refused: str, unanswered: str
) -> None:
    await reconciler.reconcile(KEY)
    store.faults = {
        f"create {refused}": Forbidden(403, "Forbidden", "exceeded quota"),
        f"create {unanswered}": Unavailable(503, "", "overloaded"),
    }
    await reconcile_until_believed(reconciler, clock)
    assert (await status_of(store)).state == State.BLOCKED


async def test_a_worker_created_by_an_earlier_pass_is_not_a_conflict(
    store: FakeCluster, reconciler: Reconciler
) -> None:
    for _ in range(2):
        await reconciler.reconcile(KEY)
    store.stale_lists["Pod"] = []
    await reconciler.reconcile(KEY)
    assert (await status_of(store)).state == State.STARTING


async def test_workers_never_get_the_run_of_an_earlier_spec(store: FakeCluster, clock: Clock) -> None:
    """Without its status, the job begins with attempt 1 again, whose ConfigMaps are those of the spec before."""
    for _ in range(2):
        await Reconciler(store, clock).reconcile(KEY)
    for worker in await store.list(PODS, "default"):
        store.drop(PODS, worker["metadata"]["name"])
    edited = {name: value for name, value in store.body(JOBS, "digits").items() if name != "status"}
    edited["spec"]["recipe"]["parameters"] = {"dropout": "0.2"}
    store.put(edited)

    for _ in range(2):
        await Reconciler(store, clock).reconcile(KEY)
    run, variables = (store.body(CONFIG_MAPS, name)["data"] for name in config_map_names("digits", 1))
    assert '"dropout": "0.2"' in run[RUN_SPEC_FILE]
    assert variables["TPUJOB_PARAMETER_DROPOUT"] == "0.2"
    assert len(await store.list(PODS, "default")) == 4


async def test_an_entry_check_that_begins_again_has_the_spec_as_it_is_now(store: FakeCluster, clock: Clock) -> None:
    """A user who sees a mistake while the check runs suspends the job, mends it and resumes it."""
    body = store.body(JOBS, "digits")
    body["spec"]["entryCheck"] = {"mode": "Require"}
    for suspend, parameters in ((False, {"dropout": "20"}), (True, {"dropout": "20"}), (False, {"dropout": "0.2"})):
        body = {**store.body(JOBS, "digits"), "spec": body["spec"]}
        body["spec"]["runPolicy"] = {"suspend": suspend}
        body["spec"]["recipe"]["parameters"] = parameters
        store.put(body)
        for _ in range(3):
            await Reconciler(store, clock).reconcile(KEY)

    assert [worker["metadata"]["name"] for worker in await store.list(PODS, "default")] == ["digits-entry-check"]
    assert '"dropout": "0.2"' in store.body(CONFIG_MAPS, config_map_name("digits", 0))["data"][RUN_SPEC_FILE]


async def test_a_blocked_job_does_not_tell_again_and_again_of_what_is_there(
    store: FakeCluster, reconciler: Reconciler, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = pod(0)
    del stranger["metadata"]["ownerReferences"]
    await store.create(stranger)
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            await reconciler.reconcile(KEY)
            clock.now += timedelta(seconds=30)
    assert (await status_of(store)).state == State.BLOCKED
    told = [record.getMessage() for record in caplog.records if "carried out" in record.getMessage()]
    [line] = told
    assert line.endswith("create Service x 1, create ConfigMap x 2")


async def test_a_foreign_pod_with_the_name_of_a_worker_is_a_conflict(
    store: FakeCluster, reconciler: Reconciler, snapshot: SnapshotAssertion
) -> None:
    stranger = pod(2)
    del stranger["metadata"]["ownerReferences"]
    await store.create(stranger)
    for _ in range(2):
        await reconciler.reconcile(KEY)
    stalled = find((await status_of(store)).conditions, ConditionType.STALLED)
    assert stalled.reason == "NameConflict"
    assert "Pod digits-1-0-2 " in stalled.message
    assert stalled.message == snapshot


async def test_a_job_that_changes_between_reading_and_writing_is_a_conflict(
    store: FakeCluster, reconciler: Reconciler
) -> None:
    async def change() -> None:
        job = await store.get(JOBS, "default", "digits")
        await store.update_status({**job, "status": {"state": "Suspended"}})

    store.hooks["list Pod"] = change
    with pytest.raises(Conflict):
        await reconciler.reconcile(KEY)


async def test_a_stage_ends_with_its_first_refusal(store: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "_SIDE_BY_SIDE", 1)
    reconciler = Reconciler(store, lambda: NOON)
    await reconciler.reconcile(KEY)
    store.faults["create Pod"] = Forbidden(403, "Forbidden", "exceeded quota")
    store.requests.clear()
    await reconciler.reconcile(KEY)
    assert store.requests.count("create Pod") == 1


async def test_the_reconciler_knows_its_own_last_write(store: FakeCluster, reconciler: Reconciler) -> None:
    await reconciler.reconcile(KEY)
    version = (await store.get(JOBS, "default", "digits"))["metadata"]["resourceVersion"]
    assert reconciler.wrote(KEY, version)
    assert not reconciler.wrote(KEY, "0")


# Passes that keep failing.


async def failing_passes(reconciler: Reconciler, count: int) -> None:
    for _ in range(count):
        with suppress(ApiError):
            await reconciler.reconcile(KEY)


async def told(store: FakeCluster) -> str:
    """The message of Reconciling if it says that passes fail. The job has begun its first attempt."""
    reconciling = find((await status_of(store)).conditions, ConditionType.RECONCILING)
    return reconciling.message if reconciling and reconciling.reason == "ProgressingWithRetry" else ""


@pytest.mark.parametrize("kind", ["Service", "ConfigMap", "Pod"])
async def test_a_409_that_never_ends_is_told(store: FakeCluster, reconciler: Reconciler, kind: str) -> None:
    """An admission webhook may deny with any code."""
    await reconciler.reconcile(KEY)
    store.faults = {f"create {kind}": Conflict(409, "Conflict", "admission webhook denied the request")}
    await failing_passes(reconciler, 5)
    assert await told(store) == "", "a stale read looks the same"
    await failing_passes(reconciler, 7)
    assert "409: admission webhook" in await told(store)
    assert len(await events(store, "Retrying")) == 1
    store.faults = {}
    await reconciler.reconcile(KEY)
    assert await told(store) == ""


@pytest.mark.parametrize(
    "refusal",
    [
        Conflict(409, "Conflict", "admission webhook denied the request"),
        NotFound(404, "NotFound", 'pods "digits-1-0-0" not found'),
    ],
)
async def test_a_worker_that_cannot_be_deleted_is_told(
    store: FakeCluster, reconciler: Reconciler, refusal: ApiError
) -> None:
    await a_restart_is_due(store, reconciler)
    store.faults = {"delete Pod": refusal}
    await failing_passes(reconciler, 12)
    assert str(refusal) in await told(store)
    assert len(await events(store, "Retrying")) == 1


async def test_a_worker_that_goes_before_it_is_deleted_is_not_an_error(
    store: FakeCluster, reconciler: Reconciler
) -> None:
    await a_restart_is_due(store, reconciler)
    store.faults = {"delete Pod": NotFound(404, "NotFound", "not found")}
    await reconciler.reconcile(KEY)
    store.faults = {}
    await reconciler.reconcile(KEY)


async def a_restart_is_due(store: FakeCluster, reconciler: Reconciler) -> None:
    for _ in range(2):
        await reconciler.reconcile(KEY)
    failed = await store.get(PODS, "default", "digits-1-0-2")
    evicted = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    store.set_pod_status(failed, evicted)
    await reconciler.reconcile(KEY)
    assert (await status_of(store)).attempt == 2


@pytest.mark.parametrize(
    "refusal",
    [
        InvalidRequest(422, "Invalid", "status.attempt: Unsupported value"),
        Conflict(409, "Conflict", "admission webhook denied the request"),
    ],
)
async def test_an_event_tells_once_that_no_status_can_be_written(
    store: FakeCluster, reconciler: Reconciler, refusal: ApiError
) -> None:
    store.faults = {"update_status TPUTrainingJob": refusal}
    await failing_passes(reconciler, 12)
    (event,) = await events(store, "Retrying")
    assert (event["type"], str(refusal) in event["note"]) == ("Warning", True)


async def test_an_event_about_failing_passes_that_was_not_sent_is_sent_later(
    store: FakeCluster, reconciler: Reconciler
) -> None:
    store.faults = {
        "update_status TPUTrainingJob": InvalidRequest(422, "Invalid", "status.attempt: Unsupported value"),
        "create Event": Unavailable(503, "", "overloaded"),
    }
    await failing_passes(reconciler, 4)
    del store.faults["create Event"]
    await failing_passes(reconciler, 4)
    assert len(await events(store, "Retrying")) == 1


# The optional object: the policy that keeps other pods out.


@pytest.fixture
def isolating(store: FakeCluster, clock: Clock) -> Reconciler:
    return Reconciler(store, clock, network_policy=WorkerNetworkPolicy())


async def test_the_network_policy_is_created_before_the_workers(store: FakeCluster, isolating: Reconciler) -> None:
    await isolating.reconcile(KEY)
    store.requests.clear()
    await isolating.reconcile(KEY)
    created = [asked for asked in store.requests if asked.startswith("create")]
    assert sorted(created[:4]) == ["create ConfigMap", "create ConfigMap", "create NetworkPolicy", "create Service"]
    assert created[4:] == ["create Pod"] * 4


@pytest.mark.parametrize("mode", ["Skip", "Require"], ids=["workers", "entry check"])
@pytest.mark.parametrize(("has_code", "package_index"), [(True, False), (True, True), (False, False)])
async def test_pods_with_code_are_told_where_packages_come_from(
    clock: Clock, mode: str, has_code: bool, package_index: bool
) -> None:
    code = {"spec.trainer.code": {"uri": "secret://digits-code", "sha256": "0a" * 32}} if has_code else {}
    store = FakeCluster()
    await store.create(job_body({"spec.entryCheck": {"mode": mode}, **code}))
    reconciler = Reconciler(store, clock, package_index=package_index)
    for _ in range(2):
        await reconciler.reconcile(KEY)
    containers = [pod["spec"]["containers"][0] for pod in await store.list(PODS, KEY.namespace)]
    told = {variable["value"] for one in containers for variable in one["env"] if variable["name"] == ENV_PACKAGES}
    assert len(containers) == (4 if mode == "Skip" else 1)
    assert told == ({"Wheelhouse"} if has_code and not package_index else set())


@pytest.mark.parametrize(
    "refusal",
    [
        Forbidden(403, "Forbidden", "no rights"),
        NotFound(404, "NotFound", "the server could not find the requested resource"),
        InvalidRequest(422, "Invalid", "spec.ingress[1]: nonsense"),
    ],
)
async def test_a_gang_trains_without_a_policy_that_the_cluster_keeps_refusing(
    store: FakeCluster, isolating: Reconciler, clock: Clock, refusal: ApiError
) -> None:
    store.faults = {"create NetworkPolicy": refusal}
    await isolating.reconcile(KEY)
    await reconcile_until_believed(isolating, clock)
    assert store.requests.count("create Pod") == 4
    assert (await status_of(store)).state == State.STARTING
    (event,) = await events(store, "NetworkPolicyMissing")
    assert (event["type"], str(refusal) in event["note"]) == ("Warning", True)


@pytest.mark.parametrize(
    "error",
    [
        Unavailable(500, "InternalError", "failed calling webhook"),
        Unavailable(0, "NoAnswer", "timeout"),
        Conflict(409, "Conflict", "denied the request"),
        Forbidden(403, "Forbidden", "not yet known to this API server"),
        NotFound(404, "NotFound", "not yet known to this API server"),
    ],
)
async def test_a_passing_error_does_not_cost_the_gang_its_policy(
    store: FakeCluster, isolating: Reconciler, error: ApiError
) -> None:
    await isolating.reconcile(KEY)
    store.faults = {"create NetworkPolicy": error}
    with suppress(Unavailable, Conflict):
        await isolating.reconcile(KEY)
    assert "create Pod" not in store.requests
    store.faults = {}
    await isolating.reconcile(KEY)
    assert await store.list(NETWORK_POLICIES, "default")
    assert store.requests.count("create Pod") == 4
    assert await events(store, "NetworkPolicyMissing") == []


async def test_a_refused_placeholder_is_told_as_what_it_was_for(
    store: FakeCluster, clock: Clock, snapshot: SnapshotAssertion
) -> None:
    meta = {"name": "digits-hold0-0-0", "namespace": "default"}
    asks = Plan((Batch((Create({"apiVersion": "v1", "kind": "Pod", "metadata": meta}, optional=True),)),))
    store.faults = {"create Pod": InvalidRequest(422, "Invalid", "spec.priorityClassName: no such class")}
    job = await store.get(JOBS, "default", "digits")
    assert await execution.PlanExecution(store, clock, None, KEY, job, execution.Memory()).carry_out(asks)
    (event,) = await events(store, "PlaceholderRefused")
    assert event["note"] == snapshot


async def test_a_refusal_of_the_policy_is_told_once_and_waited_for_once(
    store: FakeCluster, isolating: Reconciler, clock: Clock
) -> None:
    store.faults = {f"create {kind}": Forbidden(403, "Forbidden", "no rights") for kind in ("NetworkPolicy", "Pod")}
    await isolating.reconcile(KEY)
    for _ in range(4):
        await reconcile_until_believed(isolating, clock)
    assert len(await events(store, "NetworkPolicyMissing")) == 1
    del store.faults["create Pod"]
    await isolating.reconcile(KEY)
    assert len(await store.list(PODS, "default")) == 4


# What an earlier attempt has left.


async def restarted(store: FakeCluster, isolating: Reconciler, clock: Clock) -> None:
    """The first attempt exists; the second one has begun, and its workers are about to be created."""
    for _ in range(2):
        await isolating.reconcile(KEY)
    failed = await store.get(PODS, "default", "digits-1-0-2")
    await store.update_status(failed | {"status": exited(137)["status"]})
    again = await isolating.reconcile(KEY)
    assert (await status_of(store)).attempt == 2
    clock.now += timedelta(minutes=10) + (again or timedelta(0))
    for each in await store.list(PODS, "default"):
        await store.delete(PODS, "default", each["metadata"]["name"], each["metadata"]["uid"], grace_seconds=0)
    store.requests.clear()


async def test_a_restart_looks_for_what_is_there_and_replaces_what_is_of_one_attempt(
    store: FakeCluster, isolating: Reconciler, clock: Clock
) -> None:
    await restarted(store, isolating, clock)
    await isolating.reconcile(KEY)
    asked = [each for each in store.requests[2:] if "Pod" not in each]
    assert sorted(asked) == [
        *["create ConfigMap"] * 2,
        *["delete ConfigMap"] * 2,
        "get EndpointSlice",
        "get NetworkPolicy",
        "get Service",
    ]


async def test_a_restart_creates_what_somebody_has_deleted_meanwhile(
    store: FakeCluster, isolating: Reconciler, clock: Clock
) -> None:
    await restarted(store, isolating, clock)
    found = [await store.get(kind, "default", "digits") for kind in (SERVICES, NETWORK_POLICIES)]
    for kind, each in zip((SERVICES, NETWORK_POLICIES), found, strict=True):
        await store.delete(kind, "default", "digits", each["metadata"]["uid"])
    await isolating.reconcile(KEY)
    assert [await store.get(kind, "default", "digits") for kind in (SERVICES, NETWORK_POLICIES)]


async def events(store: FakeCluster, reason: str) -> list[Object]:
    return [event for event in await store.list(EVENTS, "default") if event["reason"] == reason]


# The operator's own log.


async def test_what_a_users_program_said_stays_out_of_the_operators_log(
    store: FakeCluster, reconciler: Reconciler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    for _ in range(2):
        await reconciler.reconcile(KEY)
    failed = await store.get(PODS, "default", "digits-1-0-2")
    status = exited(1, "token=hunter2")["status"]
    store.set_pod_status(failed, status)
    await reconciler.reconcile(KEY)
    found = (await status_of(store)).last_failure
    assert "hunter2" in found.message
    assert "hunter2" not in caplog.text
    assert "job is Failed" in caplog.text
    assert "digits-1-0-2 failed with User" in caplog.text
    assert "exit code 1" in caplog.text
