"""The order of a pass, and how it ends when the cluster says no. The rest of the reconciler is tested on clusters."""

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.unit.jobs import job_body
from tests.unit.kstatus import kstatus
from tests.unit.pods import NOON, pod
from tpu_training_operator.api.conditions import ConditionType, find, is_true
from tpu_training_operator.api.status import ReportPhase, State, Status
from tpu_training_operator.domain.report import Report
from tpu_training_operator.local.store import Store
from tpu_training_operator.runtime.cluster import (
    JOBS,
    PODS,
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    Object,
    Unavailable,
)
from tpu_training_operator.runtime.inbox import Inboxes
from tpu_training_operator.runtime.keys import JobKey
from tpu_training_operator.runtime.reconciler import Reconciler

KEY = JobKey("default", "digits")


class Recorded(Store):
    """A store that writes down what it is asked, and fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.refuses: dict[str, ApiError] = {}
        self.hides_pods = False
        self.while_listing: Callable[[], Awaitable[None]] | None = None
        self.while_creating: Callable[[Object], Awaitable[None]] | None = None

    async def get(self, *arguments: Any) -> Object:
        self.asked.append(f"get {arguments[0].kind}")
        return await super().get(*arguments)

    async def list(self, *arguments: Any) -> list[Object]:
        self.asked.append(f"list {arguments[0].kind}")
        if self.while_listing:
            await self.while_listing()
        return [] if self.hides_pods else await super().list(*arguments)

    async def create(self, body: Object) -> Object:
        self.asked.append(f"create {body['kind']}")
        if self.while_creating:
            await self.while_creating(body)
        if refusal := self.refuses.get(body["kind"]):
            raise refusal
        return await super().create(body)

    async def update_status(self, body: Object) -> Object:
        self.asked.append("write status")
        return await super().update_status(body)


@pytest.fixture
async def store() -> Recorded:
    store = Recorded()
    await store.create(job_body())
    store.asked.clear()
    return store


class Clock:
    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reconciler(store: Recorded, clock: Clock) -> Reconciler:
    return Reconciler(store, clock)


async def reconcile_until_believed(reconciler: Reconciler, clock: Clock) -> timedelta | None:
    """A refusal is believed when it is met again after a while."""
    wait = await reconciler.reconcile(KEY)
    clock.now += wait or timedelta(0)
    return await reconciler.reconcile(KEY)


async def status_of(store: Recorded) -> Status:
    return Status.model_validate((await store.get(JOBS, "default", "digits")).get("status"))


async def test_the_job_is_read_before_its_pods(store: Recorded, reconciler: Reconciler) -> None:
    """Pods read first could lack the workers of an attempt that the job, read later, has left behind."""
    await reconciler.reconcile(KEY)
    assert store.asked[:2] == ["get TPUTrainingJob", "list Pod"]


async def test_an_attempt_is_begun_in_a_pass_of_its_own(store: Recorded, reconciler: Reconciler) -> None:
    await reconciler.reconcile(KEY)
    assert store.asked[2:] == ["write status", "create Event"]


async def test_what_workers_share_is_created_before_them(store: Recorded, reconciler: Reconciler) -> None:
    await reconciler.reconcile(KEY)
    store.asked.clear()
    await reconciler.reconcile(KEY)
    created = [asked for asked in store.asked if asked.startswith("create")]
    assert sorted(created[:2]) == ["create ConfigMap", "create Service"]
    assert created[2:] == ["create Pod"] * 4


async def test_a_pass_that_changes_nothing_writes_nothing(store: Recorded, reconciler: Reconciler) -> None:
    await reconciler.reconcile(KEY)
    await reconciler.reconcile(KEY)
    store.asked.clear()
    await reconciler.reconcile(KEY)
    assert store.asked == ["get TPUTrainingJob", "list Pod"]


@pytest.fixture
async def listening(store: Recorded) -> tuple[Reconciler, Inboxes]:
    """A reconciler with an inbox for each job, and a gang that is created."""
    inboxes = Inboxes(lambda: NOON)
    reconciler = Reconciler(store, lambda: NOON, inboxes=inboxes)
    await reconciler.reconcile(KEY)
    await reconciler.reconcile(KEY)
    return reconciler, inboxes


async def test_a_report_of_a_worker_stands_in_the_status(
    store: Recorded, listening: tuple[Reconciler, Inboxes]
) -> None:
    reconciler, inboxes = listening
    pod = await store.get(PODS, "default", "digits-1-0-0")
    inboxes.put(KEY, Report(1, pod["metadata"]["uid"], NOON, ReportPhase.TRAINING, 7))
    await reconciler.reconcile(KEY)
    progress = (await status_of(store)).progress
    assert progress is not None
    assert progress.step == 7


async def test_what_a_namesakes_worker_said_is_forgotten(
    store: Recorded, listening: tuple[Reconciler, Inboxes]
) -> None:
    reconciler, inboxes = listening
    inboxes.put(KEY, Report(3, "of-the-job-before", NOON, ReportPhase.TRAINING, 7))
    await reconciler.reconcile(KEY)
    assert ((await status_of(store)).progress, inboxes.of(KEY).report) == (None, None)


async def test_a_job_that_is_gone_needs_nothing(store: Recorded, reconciler: Reconciler) -> None:
    assert await reconciler.reconcile(JobKey("default", "another")) is None


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (Forbidden(403, "Forbidden", "exceeded quota: tpu"), "Forbidden"),
        (Invalid(422, "Invalid", "spec.containers[0].image: Required value " + "x" * 10_000), "Rejected"),
    ],
)
async def test_what_the_cluster_will_not_have_is_told_in_its_own_words(
    store: Recorded, reconciler: Reconciler, clock: Clock, refusal: ApiError, reason: str
) -> None:
    store.refuses = {"Pod": refusal}
    await reconciler.reconcile(KEY)
    again = await reconcile_until_believed(reconciler, clock)
    status = await status_of(store)
    stalled = find(status.conditions, ConditionType.STALLED)
    assert stalled is not None
    assert again is not None
    assert (status.state, stalled.reason) == (State.BLOCKED, reason)
    assert str(refusal)[:60] in stalled.message


async def test_a_403_of_a_moment_is_no_reason_to_stall(store: Recorded, reconciler: Reconciler, clock: Clock) -> None:
    await reconciler.reconcile(KEY)
    before = await status_of(store)
    store.refuses = {"Pod": Forbidden(403, "Forbidden", "not yet known to this API server")}
    for seconds in (0, 4, 9):
        clock.now = NOON + timedelta(seconds=seconds)
        assert await reconciler.reconcile(KEY) == timedelta(seconds=10 - seconds)
    assert await status_of(store) == before
    store.refuses = {}
    await reconciler.reconcile(KEY)
    # A later one is another one.
    store.refuses = {"Pod": Forbidden(403, "Forbidden", "no")}
    await store.delete(
        PODS, "default", "digits-1-0-0", (await store.get(PODS, "default", "digits-1-0-0"))["metadata"]["uid"]
    )
    clock.now += timedelta(hours=1)
    assert await reconciler.reconcile(KEY) == timedelta(seconds=10)
    assert (await status_of(store)).state == State.STARTING


async def test_a_refusal_that_was_told_is_not_told_again(store: Recorded, reconciler: Reconciler, clock: Clock) -> None:
    store.refuses = {"Pod": Forbidden(403, "Forbidden", "exceeded quota: tpu")}
    await reconciler.reconcile(KEY)
    await reconcile_until_believed(reconciler, clock)
    store.asked.clear()
    await reconciler.reconcile(KEY)
    assert "write status" not in store.asked
    assert "create Event" not in store.asked


async def test_an_event_that_cannot_be_sent_stops_nothing(store: Recorded, reconciler: Reconciler) -> None:
    store.refuses = {"Event": Forbidden(403, "Forbidden", "no events")}
    await reconciler.reconcile(KEY)
    assert (await status_of(store)).attempt == 1


async def test_a_cluster_that_does_not_answer_is_the_queues_business(store: Recorded, reconciler: Reconciler) -> None:
    await reconciler.reconcile(KEY)
    store.refuses = {"Pod": Unavailable(503, "", "overloaded")}
    before = await status_of(store)
    with pytest.raises(Unavailable):
        await reconciler.reconcile(KEY)
    assert await status_of(store) == before


@pytest.mark.parametrize(("refused", "unanswered"), [("Service", "ConfigMap"), ("ConfigMap", "Service")])
async def test_a_refusal_is_told_even_where_other_requests_went_unanswered(
    store: Recorded, reconciler: Reconciler, clock: Clock, refused: str, unanswered: str
) -> None:
    await reconciler.reconcile(KEY)
    store.refuses = {
        refused: Forbidden(403, "Forbidden", "exceeded quota"),
        unanswered: Unavailable(503, "", "overloaded"),
    }
    await reconcile_until_believed(reconciler, clock)
    assert (await status_of(store)).state == State.BLOCKED


async def test_a_worker_that_an_earlier_pass_has_created_is_no_conflict(
    store: Recorded, reconciler: Reconciler
) -> None:
    for _ in range(2):
        await reconciler.reconcile(KEY)
    store.hides_pods = True
    await reconciler.reconcile(KEY)
    assert (await status_of(store)).state == State.STARTING


async def test_a_pod_of_somebody_else_under_a_workers_name_is_one(store: Recorded, reconciler: Reconciler) -> None:
    stranger = pod(2)
    del stranger["metadata"]["ownerReferences"]
    await store.create(stranger)
    for _ in range(2):
        await reconciler.reconcile(KEY)
    stalled = find((await status_of(store)).conditions, ConditionType.STALLED)
    assert stalled is not None
    assert stalled.reason == "NameConflict"
    assert "Pod digits-1-0-2 exists and belongs to somebody else" in stalled.message


async def test_a_job_that_changes_between_reading_and_writing_is_a_conflict(
    store: Recorded, reconciler: Reconciler
) -> None:
    async def change() -> None:
        job = await store.get(JOBS, "default", "digits")
        await store.update_status({**job, "status": {"state": "Suspended"}})

    store.while_listing = change
    with pytest.raises(Conflict):
        await reconciler.reconcile(KEY)


async def test_what_is_refused_once_is_not_asked_for_two_thousand_times(store: Recorded) -> None:
    reconciler = Reconciler(store, lambda: NOON, side_by_side=1)
    await reconciler.reconcile(KEY)
    store.refuses["Pod"] = Forbidden(403, "Forbidden", "exceeded quota")
    store.asked.clear()
    await reconciler.reconcile(KEY)
    assert store.asked.count("create Pod") == 1


async def test_it_knows_its_own_last_write(store: Recorded, reconciler: Reconciler) -> None:
    await reconciler.reconcile(KEY)
    version = (await store.get(JOBS, "default", "digits"))["metadata"]["resourceVersion"]
    assert reconciler.wrote(KEY, version)
    assert not reconciler.wrote(KEY, "0")


LARGE = {
    "spec.slice": {"generation": "tpu8t", "topology": "200x1", "chipsPerHost": 1},
    "spec.recipe.globalBatchSize": 200,
}


@pytest.fixture
async def large() -> Recorded:
    """A store with a job of 200 hosts, whose attempt has begun."""
    store = Recorded()
    await store.create(job_body(LARGE))
    await Reconciler(store, lambda: NOON).reconcile(KEY)
    store.asked.clear()
    return store


async def change_the_spec(store: Recorded) -> None:
    job = store._find(JOBS, "default", "digits")
    job["spec"]["runPolicy"] = {"suspend": True}
    job["metadata"]["generation"] += 1


async def delete_the_job(store: Recorded) -> None:
    job = await store.get(JOBS, "default", "digits")
    await store.delete(JOBS, "default", "digits", job["metadata"]["uid"])


async def apply_it_again(store: Recorded) -> None:
    await delete_the_job(store)
    await store.create(job_body(LARGE))


async def mark_it_for_deletion(store: Recorded) -> None:
    store._find(JOBS, "default", "digits")["metadata"]["deletionTimestamp"] = "2026-01-15T12:00:00Z"


@pytest.mark.parametrize("change", [change_the_spec, delete_the_job, apply_it_again, mark_it_for_deletion])
async def test_a_gang_that_is_not_wanted_any_more_is_not_made_to_the_end(
    large: Recorded, change: Callable[[Recorded], Awaitable[None]]
) -> None:
    async def at_the_tenth_pod(body: Object) -> None:
        if body["kind"] == "Pod" and large.asked.count("create Pod") == 10:
            await change(large)

    large.while_creating = at_the_tenth_pod
    again = await Reconciler(large, lambda: NOON).reconcile(KEY)
    assert large.asked.count("create Pod") == 64
    assert "write status" not in large.asked
    assert again == timedelta(0)


async def test_a_cluster_that_fails_is_not_asked_for_the_rest_of_the_gang(large: Recorded) -> None:
    large.refuses = {"Pod": Unavailable(500, "InternalError", "failed calling webhook")}
    with pytest.raises(Unavailable):
        await Reconciler(large, lambda: NOON, side_by_side=1).reconcile(KEY)
    assert large.asked.count("create Pod") == 3


async def test_single_failures_do_not_stop_a_stage(large: Recorded) -> None:
    async def every_other(body: Object) -> None:
        if body["kind"] == "Pod" and large.asked.count("create Pod") % 2:
            raise Unavailable(500, "InternalError", "no")

    large.while_creating = every_other
    with pytest.raises(Unavailable):
        await Reconciler(large, lambda: NOON, side_by_side=1).reconcile(KEY)
    # The page is made to its end; the rest is for the next pass.
    assert large.asked.count("create Pod") == 64


FAILING = {
    "500": (
        Unavailable(500, "InternalError", "failed calling webhook"),
        "the API server answers 500: failed calling w",
    ),
    "no answer": (Unavailable(0, "NoAnswer", "connection refused"), "the API server cannot be reached: connection ref"),
    "a bug": (KeyError("metadata"), "the operator fails: KeyError: 'metadata'; its log says more; retrying"),
}


@pytest.mark.parametrize(("error", "words"), FAILING.values(), ids=FAILING.keys())
async def test_a_pass_that_goes_on_failing_is_told_in_the_status(
    store: Recorded, reconciler: Reconciler, error: Exception, words: str
) -> None:
    async def fail(body: Object) -> None:
        if body["kind"] != "Event":
            raise error

    await reconciler.reconcile(KEY)
    before = await status_of(store)
    store.while_creating = fail
    for _ in range(2):
        with pytest.raises(type(error)):
            await reconciler.reconcile(KEY)
        assert await status_of(store) == before
    with pytest.raises(type(error)):
        await reconciler.reconcile(KEY)

    told = await status_of(store)
    reconciling = find(told.conditions, ConditionType.RECONCILING)
    assert reconciling is not None
    assert reconciling.reason == "ProgressingWithRetry"
    assert reconciling.message.startswith(words)
    assert (told.state, find(told.conditions, ConditionType.STALLED)) == (State.STARTING, None)
    assert kstatus(await store.get(JOBS, "default", "digits")) == "InProgress"

    store.asked.clear()
    with pytest.raises(type(error)):
        await reconciler.reconcile(KEY)
    assert "write status" not in store.asked
    # Any operator can tell that it is over.
    store.while_creating = None
    await Reconciler(store, lambda: NOON).reconcile(KEY)
    assert await status_of(store) == before


async def test_a_running_job_stays_one_while_passes_fail(store: Recorded, reconciler: Reconciler) -> None:
    for _ in range(2):
        await reconciler.reconcile(KEY)
    for host in range(4):
        body = await store.get(PODS, "default", f"digits-1-0-{host}")
        conditions = [{"type": "Ready", "status": "True"}]
        store.set_pod_status(
            "default", body["metadata"]["name"], body["metadata"]["uid"], {"phase": "Running", "conditions": conditions}
        )
    await reconciler.reconcile(KEY)
    running = await status_of(store)

    async def fail() -> None:
        raise Forbidden(403, "Forbidden", "pods is forbidden")

    store.while_listing = fail
    for _ in range(3):
        with pytest.raises(Forbidden):
            await reconciler.reconcile(KEY)
    told = await status_of(store)
    assert (told.state, is_true(told.conditions, ConditionType.READY)) == (State.RUNNING, True)
    assert kstatus(await store.get(JOBS, "default", "digits")) == "InProgress"
    store.while_listing = None
    await reconciler.reconcile(KEY)
    assert await status_of(store) == running


async def test_a_deletion_that_is_refused_is_told_too(store: Recorded, reconciler: Reconciler) -> None:
    for _ in range(2):
        await reconciler.reconcile(KEY)
    job = store._find(JOBS, "default", "digits")
    job["spec"]["runPolicy"] = {"suspend": True}
    await reconciler.reconcile(KEY)

    async def refuse(*_: Any, **__: Any) -> None:
        raise Forbidden(403, "Forbidden", "pods may not be deleted")

    store.delete = refuse  # type: ignore[method-assign]
    for _ in range(3):
        with pytest.raises(Forbidden):
            await reconciler.reconcile(KEY)
    reconciling = find((await status_of(store)).conditions, ConditionType.RECONCILING)
    assert reconciling is not None
    assert reconciling.message == "the API server answers 403: pods may not be deleted; retrying"


async def test_a_job_of_more_hosts_than_this_operator_takes_is_invalid(store: Recorded) -> None:
    small = Reconciler(store, lambda: NOON, max_hosts=3)
    await small.reconcile(KEY)
    status = await status_of(store)
    stalled = find(status.conditions, ConditionType.STALLED)
    assert stalled is not None
    assert (status.state, status.attempt) == (State.INVALID, 0)
    assert "4 hosts are too many: this operator takes jobs of at most 3" in stalled.message
    # One that takes more goes on.
    await Reconciler(store, lambda: NOON, max_hosts=4).reconcile(KEY)
    assert (await status_of(store)).state == State.STARTING
    # And a job that has begun is not given up.
    await small.reconcile(KEY)
    assert (await status_of(store)).state == State.STARTING
