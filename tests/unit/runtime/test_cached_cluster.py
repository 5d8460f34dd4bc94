"""What passes see of a cluster through the memory: their own writes, never less than the API server has told, and the
API server itself wherever the memory cannot be trusted."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.contract.cluster_contract import ClusterContract
from tests.contract.jobs import job_body
from tests.fakes.cluster import FakeCluster
from tests.unit.pods import pod
from tpu_training_operator.domain.job.naming import gang_selector
from tpu_training_operator.kube.cluster import JOBS, PODS, Object
from tpu_training_operator.kube.encoding import decode
from tpu_training_operator.kube.errors import ApiError, Conflict, NotFound, Unavailable
from tpu_training_operator.kube.replica import Version
from tpu_training_operator.local.store import LocalStore
from tpu_training_operator.runtime.cached_cluster import CachedCluster, Served
from tpu_training_operator.runtime.records import KnownJobs, keep_job, keep_pod

SELECTOR = gang_selector("digits")


def reads(store: FakeCluster) -> list[str]:
    return [request for request in store.requests if request.startswith(("get", "list"))]


class Known(Served):
    """Nothing is told unless the test does."""

    def __init__(self) -> None:
        super().__init__(KnownJobs(), lambda: self.is_trusted, self._listed)
        self.is_trusted = True

    async def _listed(self) -> None:
        pass

    def told(self, *bodies: Object) -> None:
        for body in bodies:
            metadata = body["metadata"]
            name, number = (metadata["namespace"], metadata["name"]), int(metadata["resourceVersion"])
            if body["kind"] == "Pod":
                self.pods.apply_change(Version(name, metadata["uid"], number, keep_pod(body)))
            else:
                self.jobs.apply_change(Version(name, metadata["uid"], number, keep_job(body)))


@pytest.fixture
def store() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def known() -> Known:
    return Known()


@pytest.fixture
def cluster(store: FakeCluster, known: Known) -> CachedCluster:
    return CachedCluster(store, lambda namespace: known)


@pytest.fixture
def namespace() -> str:
    return "test"


class TestClusterContract(ClusterContract):
    """With a memory that no watch fills, so that all it knows comes from answers."""


async def the_gang(cluster: CachedCluster) -> list[str]:
    return [found["metadata"]["name"] for found in await cluster.list(PODS, "default", SELECTOR)]


async def test_a_pass_over_what_is_known_sends_no_request(cluster: CachedCluster, store: FakeCluster) -> None:
    job = await cluster.create(job_body())
    await cluster.create(pod(0))
    await cluster.create(pod(1))
    assert await cluster.get(JOBS, "default", "digits") == job
    assert await the_gang(cluster) == ["digits-1-0-0", "digits-1-0-1"]
    assert await cluster.list(JOBS, None)
    assert not reads(store)


async def test_jobs_are_listed_by_namespace_or_all(cluster: CachedCluster) -> None:
    for namespace in ("default", "team"):
        await cluster.create(job_body(namespace=namespace))
    listed = [[job["metadata"]["namespace"] for job in await cluster.list(JOBS, where)] for where in ("team", None)]
    assert listed == [["team"], ["default", "team"]]


async def test_the_status_that_was_written_is_read(cluster: CachedCluster, store: FakeCluster) -> None:
    job = await cluster.create(job_body())
    written = await cluster.update_status({**job, "status": {"state": "Starting", "attempt": 1}})
    assert await cluster.get(JOBS, "default", "digits") == written
    assert not reads(store)


@pytest.mark.parametrize(
    ("error", "is_done"),
    [
        (Conflict(409, "Conflict", "it has changed"), False),
        (Unavailable(0, "", "no answer"), True),
        (Unavailable(500, "", "no"), False),
    ],
    ids=["conflict", "lost answer", "500"],
)
async def test_after_a_failed_write_the_job_is_read_once_from_the_api_server(
    cluster: CachedCluster, store: FakeCluster, error: ApiError, is_done: bool
) -> None:
    job = await cluster.create(job_body())
    store.fail_once("update_status TPUTrainingJob", error, takes_effect=is_done)
    with pytest.raises(type(error)):
        await cluster.update_status({**job, "status": {"state": "Starting", "attempt": 1}})
    for _ in range(2):
        assert await cluster.get(JOBS, "default", "digits") == await LocalStore.get(store, JOBS, "default", "digits")
    assert reads(store) == ["get TPUTrainingJob"]


async def test_a_worker_that_was_created_without_an_answer_is_seen(cluster: CachedCluster, store: FakeCluster) -> None:
    job = await cluster.create(job_body())
    store.fail_once("create Pod", Unavailable(0, "", "no answer"), takes_effect=True)
    with pytest.raises(Unavailable):
        await cluster.create(pod(0, owner=job["metadata"]["uid"]))
    assert await the_gang(cluster) == ["digits-1-0-0"]
    assert await the_gang(cluster) == ["digits-1-0-0"]
    assert reads(store) == ["list Pod"]


async def test_a_worker_that_is_not_found_when_it_is_deleted_is_not_shown_again(
    cluster: CachedCluster, store: FakeCluster, known: Known
) -> None:
    job = await cluster.create(job_body())
    created = await cluster.create(pod(0, owner=job["metadata"]["uid"]))
    known.told(created)
    uid = created["metadata"]["uid"]
    await store.delete(PODS, "default", "digits-1-0-0", uid)
    with pytest.raises(NotFound):
        await cluster.delete(PODS, "default", "digits-1-0-0", uid)
    known.told({**created, "metadata": {**created["metadata"], "resourceVersion": "50"}})
    assert await the_gang(cluster) == []


async def test_a_deletion_that_a_webhook_denies_with_404_hides_nothing(
    cluster: CachedCluster, store: FakeCluster
) -> None:
    job = await cluster.create(job_body())
    created = await cluster.create(pod(0, owner=job["metadata"]["uid"]))
    store.fail_once("delete Pod", NotFound(404, "NotFound", "denied"))
    with pytest.raises(NotFound):
        await cluster.delete(PODS, "default", "digits-1-0-0", created["metadata"]["uid"])
    assert await the_gang(cluster) == ["digits-1-0-0"]


async def test_a_fresh_list_shows_what_is_missing_to_later_reads(cluster: CachedCluster, store: FakeCluster) -> None:
    job = await cluster.create(job_body())
    owner = job["metadata"]["uid"]
    gone = await cluster.create(pod(0, owner=owner))
    await store.create(pod(1, owner=owner))
    await store.delete(PODS, "default", "digits-1-0-0", gone["metadata"]["uid"])
    assert await the_gang(cluster) == ["digits-1-0-0"], "nobody has told it"
    await cluster.fresh.list(PODS, "default", SELECTOR)
    assert await the_gang(cluster) == ["digits-1-0-1"]


async def test_memory_that_is_not_confirmed_is_not_used(
    cluster: CachedCluster, store: FakeCluster, known: Known
) -> None:
    await cluster.create(job_body())
    known.is_trusted = False
    await store.create(job_body(name="letters"))
    assert (await cluster.get(JOBS, "default", "letters"))["metadata"]["name"] == "letters"
    assert await the_gang(cluster) == []
    assert reads(store) == ["get TPUTrainingJob", "list Pod"]


async def test_a_large_or_finished_job_is_read_from_the_api_server(cluster: CachedCluster, store: FakeCluster) -> None:
    large = job_body()
    large["metadata"]["annotations"] = {"large": "x" * 70_000}
    await cluster.create(large)
    small = await cluster.create(job_body(name="letters"))
    await cluster.update_status({**small, "status": {"state": "Failed", "completionTime": "2026-01-15T12:00:00Z"}})
    assert (await cluster.get(JOBS, "default", "digits"))["metadata"]["annotations"]
    assert (await cluster.get(JOBS, "default", "letters"))["spec"] == small["spec"]
    assert reads(store) == ["get TPUTrainingJob"] * 2
    states = {job["metadata"]["name"]: job["status"].get("state") for job in await cluster.list(JOBS, None)}
    assert states == {"digits": None, "letters": "Failed"}


def test_jobs_beyond_the_budget_are_not_kept_whole() -> None:
    bodies = [with_version(job_body(name=f"job{number}"), number + 1) for number in range(4)]
    size = len(keep_job(bodies[0]).full or b"")
    jobs = KnownJobs(budget=2 * size + 10)
    for number, body in enumerate(bodies):
        jobs.apply_change(Version(("default", f"job{number}"), str(number), number + 1, keep_job(body)))
    assert [record.full is not None for _, record in jobs.items()] == [True, True, False, False]
    jobs.apply_deletion(Version(("default", "job0"), "0", 10, None))
    jobs.apply_change(Version(("default", "job3"), "3", 11, keep_job(bodies[3])))
    assert [record.full is not None for _, record in jobs.items()] == [True, False, True]


def test_eight_thousand_pods_take_little_memory() -> None:
    record = keep_pod(with_version(a_running_pod(), 1))
    assert record is not None
    assert len(record.body) < 3000


def test_a_change_that_no_plan_can_see_is_none() -> None:
    body = with_version(a_running_pod(), 1)
    again = with_version(a_running_pod(), 2)
    again["metadata"]["annotations"] = {"seen": "yes"}
    assert keep_pod(body) == keep_pod(again)
    assert keep_job(with_version(job_body(), 1)) != keep_job(with_version(job_body(), 2))


def test_lone_surrogates_survive() -> None:
    body = with_version(job_body(), 1)
    body["metadata"]["annotations"] = {"odd": "\ud800"}
    whole = keep_job(body).full
    assert whole is not None
    assert decode(whole) == body


def a_running_pod() -> Object:
    body = pod(0)
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": "2026-01-15T12:00:00Z", "message": ""}
        for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready", "PodReadyToStartContainers")
    ]
    state = {"name": "trainer", "ready": True, "restartCount": 0, "state": {"running": {}}, "image": "x" * 200}
    return {**body, "status": {"phase": "Running", "conditions": conditions, "containerStatuses": [state]}}


def with_version(body: Mapping[str, Any], number: int) -> Object:
    return {**body, "metadata": {**body["metadata"], "resourceVersion": str(number)}}
