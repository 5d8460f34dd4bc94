"""What passes see of a cluster through the memory: their own writes, never less than the API server has told, and the
API server itself wherever the memory cannot be trusted."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.contract.jobs import job_body
from tests.fakes.cluster import FakeCluster
from tests.fakes.cluster_contract import ClusterContract
from tests.unit.pods import NOON, pod
from tpu_training_operator.domain.job.naming import gang_selector
from tpu_training_operator.kube.cluster import JOBS, PODS, JobKey, Object
from tpu_training_operator.kube.errors import ApiError, Conflict, NotFound, Unavailable
from tpu_training_operator.kube.replica import Version
from tpu_training_operator.runtime.cached_cluster import CachedCluster, Served
from tpu_training_operator.runtime.reconciler import Reconciler
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

    def told_of_creation(self, job: Object) -> None:
        metadata, record = job["metadata"], replace(keep_job(job), is_as_created=True)
        name, number = (metadata["namespace"], metadata["name"]), int(metadata["resourceVersion"])
        self.jobs.apply_change(Version(name, metadata["uid"], number, record))


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


async def worker(cluster: CachedCluster) -> Object:
    """The pod of a new job's first worker, which is not created yet."""
    job = await cluster.create(job_body())
    return pod(0, owner=job["metadata"]["uid"])


async def test_a_pass_over_what_it_wrote_sends_no_request(cluster: CachedCluster, store: FakeCluster) -> None:
    created = await cluster.create(job_body())
    job = await cluster.update_status({**created, "status": {"state": "Starting", "attempt": 1}})
    await cluster.create(pod(0))
    await cluster.create(pod(1))
    assert await cluster.get(JOBS, "default", "digits") == job
    assert await the_gang(cluster) == ["digits-1-0-0", "digits-1-0-1"]
    assert [len(await cluster.list(JOBS, namespace)) for namespace in (None, "default", "team")] == [1, 1, 0]
    assert not reads(store)


# What is read from the API server


@pytest.mark.parametrize(
    ("error", "is_done"),
    [
        (Conflict(409, "Conflict", "it has changed"), False),
        (Unavailable(0, "", "no answer"), True),
        (Unavailable(500, "", "no"), False),
    ],
    ids=["conflict", "lost answer", "500"],
)
async def test_after_a_failed_write_the_job_is_read_once(
    cluster: CachedCluster, store: FakeCluster, error: ApiError, is_done: bool
) -> None:
    job = await cluster.create(job_body())
    store.fail_once("update_status TPUTrainingJob", error, takes_effect=is_done)
    with pytest.raises(type(error)):
        await cluster.update_status({**job, "status": {"state": "Starting", "attempt": 1}})
    for _ in range(2):
        assert await cluster.get(JOBS, "default", "digits") == store.body(JOBS, "digits")
    assert reads(store) == ["get TPUTrainingJob"]


async def test_a_worker_that_was_created_without_an_answer_is_seen(cluster: CachedCluster, store: FakeCluster) -> None:
    body = await worker(cluster)
    store.fail_once("create Pod", Unavailable(0, "", "no answer"), takes_effect=True)
    with pytest.raises(Unavailable):
        await cluster.create(body)
    for _ in range(2):
        assert await the_gang(cluster) == ["digits-1-0-0"]
    assert reads(store) == ["list Pod"]


async def test_a_worker_that_is_not_found_when_it_is_deleted_is_not_shown_again(
    cluster: CachedCluster, store: FakeCluster, known: Known
) -> None:
    created = await cluster.create(await worker(cluster))
    known.told(created)
    store.drop(PODS, "digits-1-0-0")
    with pytest.raises(NotFound):
        await cluster.delete(PODS, "default", "digits-1-0-0", created["metadata"]["uid"])
    known.told(with_version(created, 50))
    assert await the_gang(cluster) == []


async def test_a_deletion_that_a_webhook_denies_with_404_hides_nothing(
    cluster: CachedCluster, store: FakeCluster
) -> None:
    created = await cluster.create(await worker(cluster))
    store.fail_once("delete Pod", NotFound(404, "NotFound", "denied"))
    with pytest.raises(NotFound):
        await cluster.delete(PODS, "default", "digits-1-0-0", created["metadata"]["uid"])
    assert await the_gang(cluster) == ["digits-1-0-0"]


async def test_a_fresh_list_shows_what_is_missing_to_later_reads(cluster: CachedCluster, store: FakeCluster) -> None:
    await cluster.create(await worker(cluster))
    store.drop(PODS, "digits-1-0-0")
    store.put(pod(1))
    assert await the_gang(cluster) == ["digits-1-0-0"], "the memory has not heard of it"
    await cluster.fresh.list(PODS, "default", SELECTOR)
    assert await the_gang(cluster) == ["digits-1-0-1"]


async def test_memory_that_is_not_confirmed_is_not_used(
    cluster: CachedCluster, store: FakeCluster, known: Known
) -> None:
    known.is_trusted = False
    await store.create(job_body())
    assert (await cluster.get(JOBS, "default", "digits"))["metadata"]["name"] == "digits"
    assert await the_gang(cluster) == []
    assert reads(store) == ["get TPUTrainingJob", "list Pod"]


# What is kept


async def test_of_a_large_or_finished_job_only_its_line_in_the_resync_is_kept(
    cluster: CachedCluster, store: FakeCluster
) -> None:
    large = job_body()
    large["metadata"]["annotations"] = {"large": "x" * 70_000}
    await cluster.create(large)
    small = await cluster.create(job_body(name="letters"))
    await cluster.update_status({**small, "status": {"state": "Failed", "completionTime": "2026-01-15T12:00:00Z"}})
    for name in ("digits", "letters"):
        assert await cluster.get(JOBS, "default", name) == store.body(JOBS, name)
    assert reads(store) == ["get TPUTrainingJob"] * 2
    states = {job["metadata"]["name"]: job["status"].get("state") for job in await cluster.list(JOBS, None)}
    assert states == {"digits": None, "letters": "Failed"}


def test_jobs_beyond_the_budget_are_not_kept_whole() -> None:
    versions = [
        Version(("default", f"job{number}"), str(number), number, keep_job(with_version(job_body(), number)))
        for number in range(1, 5)
    ]
    jobs = KnownJobs(room=2 * len(versions[0].record.full or b"") + 10)
    for version in versions:
        jobs.apply_change(version)
    assert [record.full is not None for _, record in jobs.items()] == [True, True, False, False]
    jobs.apply_deletion(Version(versions[0].name, "1", 10, None))
    jobs.apply_change(replace(versions[3], number=11))
    assert [record.full is not None for _, record in jobs.items()] == [True, False, True]


def test_a_change_of_a_worker_that_no_plan_can_see_is_none() -> None:
    changed = with_version(pod(0), 2)
    changed["metadata"]["annotations"] = {"seen": "yes"}
    assert keep_pod(with_version(pod(0), 1)) == keep_pod(changed)
    assert keep_job(with_version(job_body(), 1)) != keep_job(with_version(job_body(), 2))


def with_version(body: Mapping[str, Any], number: int) -> Object:
    return {**body, "metadata": {**body["metadata"], "resourceVersion": str(number)}}


# What the start of a job reads.


def reconciler_of(cluster: CachedCluster) -> Reconciler:
    return Reconciler(cluster, lambda: NOON, fresh=cluster.fresh)


UNCHECKED = {"entryCheck.mode": "Skip"}
KEY_PARTS = ("default", "digits")
KEY = JobKey(*KEY_PARTS)


async def test_a_job_that_nobody_has_written_since_its_creation_begins_and_gets_workers_without_a_read(
    store: FakeCluster, known: Known, cluster: CachedCluster
) -> None:
    known.told_of_creation(await store.create(job_body(UNCHECKED)))
    reconciler = reconciler_of(cluster)
    await reconciler.reconcile(KEY)
    await reconciler.reconcile(KEY, follows=True)
    assert reads(store) == []
    assert len([request for request in store.requests if request == "create Pod"]) == 4


async def test_its_workers_wait_for_a_read_of_the_job_if_other_passes_came_between(
    store: FakeCluster, known: Known, cluster: CachedCluster
) -> None:
    known.told_of_creation(await store.create(job_body(UNCHECKED)))
    reconciler = reconciler_of(cluster)
    await reconciler.reconcile(KEY)
    suspended = await store.get(JOBS, *KEY_PARTS)
    suspended["spec"]["runPolicy"] = {"suspend": True}
    store.put(suspended)
    store.requests.clear()
    await reconciler.reconcile(KEY)
    assert reads(store)[0] == "get TPUTrainingJob"
    assert "create Pod" not in store.requests


@pytest.mark.parametrize("is_written", [False, True])
async def test_any_other_job_has_its_pods_read_before_an_attempt_begins(
    store: FakeCluster, known: Known, cluster: CachedCluster, is_written: bool
) -> None:
    """It was only listed; or it was written since: its status may have been lost."""
    job = await store.create(job_body(UNCHECKED))
    if is_written:
        known.told_of_creation(job)
        store.put(job)
        job = await store.get(JOBS, *KEY_PARTS)
        store.requests.clear()
    known.told(job)
    await reconciler_of(cluster).reconcile(KEY)
    assert reads(store) == ["list Pod"]
