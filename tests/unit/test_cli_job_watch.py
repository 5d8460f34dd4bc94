"""What `tpujob watch` sees of a job whose cluster has its troubles: the picture is right again, whatever breaks off."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from aiohttp.test_utils import unused_port

from tests.unit.one_job_cluster import OneJobCluster, breaks_off, credentials_for, refuses, says, served
from tests.unit.pods import pod, ready
from tests.unit.seen_jobs import progress, seen_job
from tpu_training_operator.cli import job_watch
from tpu_training_operator.cli.cluster import OPTIONS
from tpu_training_operator.cli.job_watch import Seen, watch_job
from tpu_training_operator.kube import client, informer
from tpu_training_operator.kube.client import connect
from tpu_training_operator.kube.cluster import JobKey, Object
from tpu_training_operator.kube.errors import ApiError, Forbidden, NotFound, Unavailable

KEY = JobKey("default", "digits")
# Seconds after which a test fails that would wait for ever.
PATIENCE = 30
# Longer than any test: only changes bring a new picture.
NO_TICK = 600.0

Pictures = AsyncGenerator[Seen[Object], None]


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(informer, "_FIRST_PAUSE", 0.0)
    monkeypatch.setattr(job_watch, "_SETTLE_SECONDS", 0.0)


@pytest.fixture
async def cluster() -> AsyncIterator[OneJobCluster]:
    async with served(OneJobCluster()) as started:
        started.show(seen_job(), pod(0), pod(1))
        yield started


@asynccontextmanager
async def watching(cluster: OneJobCluster) -> AsyncIterator[Pictures]:
    async with connect(credentials_for(cluster.url), OPTIONS) as reader:
        pictures = watch_job(reader, KEY, lambda body: body, NO_TICK)
        async with aclosing(pictures):
            yield pictures


async def until(pictures: Pictures, condition: Any) -> Seen[Object]:
    """The first picture that meets it."""
    async with asyncio.timeout(PATIENCE):
        async for seen in pictures:
            if condition(seen):
                return seen
    raise AssertionError("a watch has no end")


def step(number: int) -> Any:
    def condition(seen: Seen[Object]) -> bool:
        return bool(seen.job) and seen.job["status"].get("progress", {}).get("step") == number

    return condition


def at_step(number: int) -> Object:
    return seen_job(progress=progress(number))


async def watched_once(cluster: OneJobCluster, pictures: Pictures) -> Seen[Object]:
    """A picture after which both watches are open."""
    await until(pictures, lambda seen: len(seen.pods) == 2)
    cluster.show(at_step(1), ready(pod(0)))
    return await until(pictures, lambda seen: step(1)(seen) and seen.pods["digits-1-0-0"]["status"].get("conditions"))


async def test_every_change_of_the_job_and_of_its_pods_is_seen(cluster: OneJobCluster) -> None:
    async with watching(cluster) as pictures:
        seen = await watched_once(cluster, pictures)
        assert set(seen.pods) == {"digits-1-0-0", "digits-1-0-1"}
        cluster.remove("pods", "digits-1-0-1")
        seen = await until(pictures, lambda seen: len(seen.pods) == 1)
        assert (set(seen.pods), seen.trouble) == ({"digits-1-0-0"}, None)
        cluster.remove("tputrainingjobs", "digits")
        assert (await until(pictures, lambda seen: seen.job is None)).trouble is None


async def test_only_the_job_and_what_carries_its_name_is_asked_for(cluster: OneJobCluster) -> None:
    async with watching(cluster) as pictures:
        await watched_once(cluster, pictures)
    [jobs], [pods] = cluster.queries("list tputrainingjobs"), cluster.queries("list pods")
    assert jobs == {"fieldSelector": "metadata.name=digits", "limit": "50"}
    assert pods == {"labelSelector": "tpu-operator.dev/job-name=digits", "limit": "100"}
    [watch] = cluster.queries("watch tputrainingjobs")
    assert watch["fieldSelector"] == "metadata.name=digits"
    assert watch["allowWatchBookmarks"] == "true"


async def test_a_watch_that_ends_goes_on_where_it_was(cluster: OneJobCluster) -> None:
    async with watching(cluster) as pictures:
        await watched_once(cluster, pictures)
        version = cluster.jobs["digits"]["metadata"]["resourceVersion"]
        cluster.tell("tputrainingjobs", None)
        cluster.show(at_step(2))
        seen = await until(pictures, step(2))
    assert seen.trouble is None
    assert len(cluster.queries("list tputrainingjobs")) == 1
    assert cluster.queries("watch tputrainingjobs")[1]["resourceVersion"] == version


async def test_a_bookmark_moves_the_place_to_go_on_from(cluster: OneJobCluster) -> None:
    async with watching(cluster) as pictures:
        await watched_once(cluster, pictures)
        bookmark = {"kind": "TPUTrainingJob", "metadata": {"resourceVersion": "7777"}}
        cluster.tell("tputrainingjobs", {"type": "BOOKMARK", "object": bookmark})
        cluster.tell("tputrainingjobs", None)
        cluster.version = 7777
        cluster.show(at_step(2))
        await until(pictures, step(2))
    assert cluster.queries("watch tputrainingjobs")[1]["resourceVersion"] == "7777"


@pytest.mark.parametrize(
    "fault",
    [refuses(500, "InternalError", "etcd"), refuses(403, "Forbidden", "not yet"), refuses(401), breaks_off()],
    ids=["500", "403", "401", "reset"],
)
async def test_trouble_is_told_and_is_over_when_the_watch_speaks_again(cluster: OneJobCluster, fault: Any) -> None:
    async with watching(cluster) as pictures:
        await watched_once(cluster, pictures)
        cluster.faults["watch tputrainingjobs"] += [fault] * 2
        cluster.tell("tputrainingjobs", None)
        assert (await until(pictures, lambda seen: seen.trouble)).job is not None
        cluster.show(at_step(2))
        assert (await until(pictures, step(2))).trouble is None
    assert len(cluster.queries("list tputrainingjobs")) == 1


async def test_a_watch_that_is_cut_in_an_event_sees_that_event_once_it_goes_on(cluster: OneJobCluster) -> None:
    async with watching(cluster) as pictures:
        await watched_once(cluster, pictures)
        half = json.dumps({"type": "MODIFIED", "object": at_step(2)}).encode()[:200]
        cluster.faults["watch tputrainingjobs"] = [breaks_off(half), says(half)]
        cluster.tell("tputrainingjobs", None)
        cluster.show(at_step(2))
        await until(pictures, step(2))
    assert len(cluster.queries("watch tputrainingjobs")) == 4


@pytest.mark.parametrize("told", ["as an answer", "as an event"])
async def test_a_watch_that_has_expired_begins_with_a_list_and_forgets_what_is_gone(
    cluster: OneJobCluster, told: str
) -> None:
    event = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}}
    expired = {"as an answer": refuses(410, "Expired"), "as an event": says(json.dumps(event).encode() + b"\n")}[told]
    async with watching(cluster) as pictures:
        await watched_once(cluster, pictures)
        cluster.faults["watch pods"] = [expired]
        # Deleted while nobody watches: no event will ever say so.
        del cluster.pods["digits-1-0-1"]
        cluster.tell("pods", None)
        seen = await until(pictures, lambda seen: len(seen.pods) == 1)
    assert seen.trouble is None
    assert len(cluster.queries("list pods")) == 2


async def test_an_event_longer_than_any_object_is_not_read_to_its_end(
    cluster: OneJobCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_LONGEST_BODY", 100_000)
    async with watching(cluster) as pictures:
        await watched_once(cluster, pictures)
        cluster.faults["watch tputrainingjobs"] = [says(b"x" * 300_000)]
        cluster.tell("tputrainingjobs", None)
        seen = await until(pictures, lambda seen: seen.trouble)
    assert seen.trouble == "the watch sent an event of more than 100000 bytes"


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
async def test_what_cannot_be_read_to_begin_with_is_an_error(
    cluster: OneJobCluster, what: str, fault: Any, kind: type[ApiError]
) -> None:
    cluster.faults[what] = [fault]
    async with watching(cluster) as pictures:
        with pytest.raises(kind):
            await until(pictures, lambda seen: False)


async def test_a_server_that_is_down_is_an_error_to_begin_with() -> None:
    async with watching(OneJobCluster(url=f"http://127.0.0.1:{unused_port()}")) as pictures:
        with pytest.raises(Unavailable) as raised:
            await until(pictures, lambda seen: True)
    assert raised.value.status == 0


async def test_overload_is_waited_out_as_the_server_asks(cluster: OneJobCluster) -> None:
    cluster.faults["list pods"] = [refuses(429, "TooManyRequests", **{"Retry-After": "0"})] * 3
    async with watching(cluster) as pictures:
        await watched_once(cluster, pictures)
    assert len(cluster.queries("list pods")) == 4
