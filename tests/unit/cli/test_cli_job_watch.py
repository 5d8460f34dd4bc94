"""`tpujob watch` in a cluster with troubles: whatever breaks off, the view is right again afterwards."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from tests.cluster.deadlines import deadline
from tests.fakes.api_server import credentials_for, refuses
from tests.fakes.watched_cluster import WatchedCluster, breaks_off, served, streams
from tests.unit.pods import pod, ready
from tests.unit.seen_jobs import progress, seen_job
from tpu_training_operator.cli.common.cluster import OPTIONS
from tpu_training_operator.cli.watch import watch
from tpu_training_operator.cli.watch.watch import WatchedJob, watch_job
from tpu_training_operator.kube import client, informer
from tpu_training_operator.kube.client import connect
from tpu_training_operator.kube.cluster import JOBS, PODS, JobKey, Object
from tpu_training_operator.kube.errors import ApiError, Forbidden, NotFound, Unavailable

KEY = JobKey("default", "digits")
# Seconds after which a test fails that would otherwise wait forever.
PATIENCE = 30
# Longer than any test, so that only changes bring a new view.
NO_TICK = 600.0

Views = AsyncGenerator[WatchedJob, None]


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(informer, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(watch, "_SETTLE_SECONDS", 0.0)


@pytest.fixture
async def cluster() -> AsyncIterator[WatchedCluster]:
    async with served(WatchedCluster()) as started:
        started.show(seen_job(), pod(0), pod(1))
        yield started


@asynccontextmanager
async def watching(cluster: WatchedCluster) -> AsyncIterator[Views]:
    async with connect(credentials_for(cluster.url), OPTIONS) as reader:
        views = watch_job(reader, KEY, NO_TICK)
        async with aclosing(views):
            yield views


async def until(views: Views, condition: Any) -> WatchedJob:
    """The first view that meets the condition."""
    async with asyncio.timeout(deadline(PATIENCE)):
        async for seen in views:
            if condition(seen):
                return seen
    raise AssertionError("a watch has no end")


def step(number: int) -> Any:
    def condition(seen: WatchedJob) -> bool:
        return bool(seen.job) and seen.job["status"].get("progress", {}).get("step") == number

    return condition


def at_step(number: int) -> Object:
    return seen_job(progress=progress(number))


async def watched_once(cluster: WatchedCluster, views: Views) -> WatchedJob:
    """A view after which both watches are open."""
    await until(views, lambda seen: len(seen.hosts) == 2)
    cluster.show(at_step(1), ready(pod(0)))
    return await until(views, lambda seen: step(1)(seen) and seen.hosts[0].why is None)


async def test_every_change_of_the_job_and_of_its_pods_is_seen(cluster: WatchedCluster) -> None:
    async with watching(cluster) as views:
        seen = await watched_once(cluster, views)
        assert {host.worker.host for host in seen.hosts} == {0, 1}
        cluster.remove(PODS, "digits-1-0-1")
        seen = await until(views, lambda seen: len(seen.hosts) == 1)
        assert ([host.worker.host for host in seen.hosts], seen.trouble) == ([0], None)
        cluster.remove(JOBS, "digits")
        assert (await until(views, lambda seen: seen.job is None)).trouble is None


async def test_only_the_job_and_its_pods_are_requested(cluster: WatchedCluster) -> None:
    async with watching(cluster) as views:
        await watched_once(cluster, views)
    [jobs], [pods] = cluster.queries("list tputrainingjobs"), cluster.queries("list pods")
    assert jobs == {"fieldSelector": "metadata.name=digits", "limit": "50"}
    assert pods == {"labelSelector": "tpu-operator.dev/job-name=digits", "limit": "100"}
    [watch] = cluster.queries("watch tputrainingjobs")
    assert watch["fieldSelector"] == "metadata.name=digits"
    assert watch["allowWatchBookmarks"] == "true"


async def test_a_watch_that_ends_continues_where_it_was(cluster: WatchedCluster) -> None:
    async with watching(cluster) as views:
        await watched_once(cluster, views)
        version = cluster.store.body(JOBS, "digits")["metadata"]["resourceVersion"]
        cluster.tell("tputrainingjobs", None)
        cluster.show(at_step(2))
        seen = await until(views, step(2))
    assert seen.trouble is None
    assert len(cluster.queries("list tputrainingjobs")) == 1
    assert cluster.queries("watch tputrainingjobs")[1]["resourceVersion"] == version


async def test_a_bookmark_moves_the_version_to_continue_from(cluster: WatchedCluster) -> None:
    async with watching(cluster) as views:
        await watched_once(cluster, views)
        later = str(cluster.store.advance())
        bookmark = {"kind": "TPUTrainingJob", "metadata": {"resourceVersion": later}}
        cluster.tell("tputrainingjobs", {"type": "BOOKMARK", "object": bookmark})
        cluster.tell("tputrainingjobs", None)
        cluster.show(at_step(2))
        await until(views, step(2))
    assert cluster.queries("watch tputrainingjobs")[1]["resourceVersion"] == later


@pytest.mark.parametrize(
    "fault",
    [refuses(500, "InternalError", "etcd"), refuses(403, "Forbidden", "not yet"), refuses(401), breaks_off()],
    ids=["500", "403", "401", "reset"],
)
async def test_trouble_is_reported_until_the_watch_recovers(cluster: WatchedCluster, fault: Any) -> None:
    async with watching(cluster) as views:
        await watched_once(cluster, views)
        cluster.faults["watch tputrainingjobs"] += [fault] * 2
        cluster.tell("tputrainingjobs", None)
        assert (await until(views, lambda seen: seen.trouble)).job is not None
        cluster.show(at_step(2))
        assert (await until(views, step(2))).trouble is None
    assert len(cluster.queries("list tputrainingjobs")) == 1


async def test_an_event_cut_off_by_a_broken_watch_is_seen_after_it(cluster: WatchedCluster) -> None:
    async with watching(cluster) as views:
        await watched_once(cluster, views)
        half = json.dumps({"type": "MODIFIED", "object": at_step(2)}).encode()[:200]
        cluster.faults["watch tputrainingjobs"] = [breaks_off(half), streams(half)]
        cluster.tell("tputrainingjobs", None)
        cluster.show(at_step(2))
        await until(views, step(2))
    assert len(cluster.queries("watch tputrainingjobs")) == 4


async def test_an_event_longer_than_any_object_is_not_read_to_the_end(
    cluster: WatchedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_LONGEST_BODY", 100_000)
    async with watching(cluster) as views:
        await watched_once(cluster, views)
        cluster.faults["watch tputrainingjobs"] = [streams(b"x" * 300_000)]
        cluster.tell("tputrainingjobs", None)
        seen = await until(views, lambda seen: seen.trouble)
    assert "more than 100000 bytes" in str(seen.trouble)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (refuses(403, "Forbidden", "no"), Forbidden),
        (refuses(404, "", "404 page not found"), NotFound),
        (refuses(503, "ServiceUnavailable", "no"), Unavailable),
    ],
    ids=["forbidden", "no CRD", "down"],
)
@pytest.mark.parametrize("what", ["list pods", "list tputrainingjobs"])
async def test_a_failed_first_list_is_an_error(
    cluster: WatchedCluster, what: str, fault: Any, kind: type[ApiError]
) -> None:
    cluster.faults[what] = [fault]
    async with watching(cluster) as views:
        with pytest.raises(kind):
            await until(views, lambda seen: False)


async def test_the_watch_pauses_when_the_server_asks(cluster: WatchedCluster) -> None:
    cluster.faults["list pods"] = [refuses(429, "TooManyRequests", **{"Retry-After": "0"})] * 3
    async with watching(cluster) as views:
        await watched_once(cluster, views)
    assert len(cluster.queries("list pods")) == 4
