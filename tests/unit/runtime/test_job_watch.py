"""How kopf's stream fills the memory of jobs: nothing that a watch answers ends it, and nothing that vanished stays."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.cluster.deadlines import deadline
from tests.fakes.api_server import credentials_for, refuses
from tests.fakes.watched_cluster import WatchedCluster, breaks_off, served, streams
from tests.unit.seen_jobs import progress, seen_job
from tpu_training_operator.api import constants
from tpu_training_operator.kube import informer, watch_session
from tpu_training_operator.kube.client import connect
from tpu_training_operator.kube.cluster import JOBS
from tpu_training_operator.kube.replica import Change
from tpu_training_operator.runtime import job_watch as module
from tpu_training_operator.runtime.job_watch import JobWatch
from tpu_training_operator.runtime.records import JobRecord

NAME = ("default", "digits")
WATCH, LIST = f"watch {JOBS.plural}", f"list {JOBS.plural}"
# Seconds after which a test fails that would otherwise wait forever.
PATIENCE = 60
TOO_OLD = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}}
BROKEN = {"type": "ERROR", "object": {"kind": "Status", "code": 500, "reason": "InternalError", "message": "etcd"}}


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(informer, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(watch_session, "_SECONDS_BETWEEN_WATCHES", 0.01)


@pytest.fixture
async def api() -> AsyncIterator[WatchedCluster]:
    async with served(WatchedCluster()) as started:
        yield started


class Observed:
    """A job watch, and the `changes` that it has reported."""

    def __init__(self, watch: JobWatch) -> None:
        self.watch = watch
        self.changes: asyncio.Queue[Change[JobRecord]] = asyncio.Queue()
        watch.on_change = self.changes.put_nowait

    async def change(self) -> Change[JobRecord]:
        async with asyncio.timeout(deadline(PATIENCE)):
            return await self.changes.get()

    async def until_known(self, *names: str) -> None:
        async with asyncio.timeout(deadline(PATIENCE)):
            while sorted(name for (_, name), _ in self.watch.known.items()) != sorted(names):
                await self.changes.get()


@asynccontextmanager
async def watching(api: WatchedCluster, namespace: str | None = None) -> AsyncIterator[Observed]:
    async with connect(credentials_for(api.url)) as client:
        observed = Observed(JobWatch(client, credentials_for(api.url), namespace))
        task = asyncio.create_task(observed.watch.run())
        try:
            yield observed
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def settled(api: WatchedCluster) -> None:
    """kopf watches, and what it had not seen before has been listed."""
    async with asyncio.timeout(deadline(PATIENCE)):
        while not (api._watches[JOBS.plural] and len(api.queries(LIST)) >= 3):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def called(name: str) -> dict[str, Any]:
    job = seen_job()
    job["metadata"] |= {"name": name, "uid": name}
    return job


@pytest.mark.parametrize("namespace", [None, "default"])
async def test_every_change_is_reported_and_known(api: WatchedCluster, namespace: str | None) -> None:
    api.show(called("first"))
    async with watching(api, namespace) as observed:
        await observed.until_known("first")
        await settled(api)
        api.show(called("second"))
        await observed.until_known("first", "second")
        api.show({**called("second"), "status": {"state": "Running", "progress": progress(3)}})
        assert (change := await observed.change()).after
        assert b'"Running"' in (change.after.full or b"")
        api.remove(JOBS, "first")
        await observed.until_known("second")


async def test_only_the_watch_shows_that_a_job_is_as_it_was_created(api: WatchedCluster) -> None:
    api.show(called("first"))
    async with watching(api) as observed:
        await observed.until_known("first")
        await settled(api)
        api.show(called("second"))
        await observed.until_known("first", "second")
        known = {name: record.is_as_created for (_, name), record in observed.watch.known.items()}
        assert known == {"first": False, "second": True}


async def test_nothing_is_listed_while_the_watch_works(api: WatchedCluster) -> None:
    async with watching(api) as observed:
        await settled(api)
        listed = len(api.queries(LIST))
        for number in range(20):
            api.show(seen_job(progress=progress(number)))
            await observed.change()
    assert len(api.queries(LIST)) == listed


@pytest.mark.parametrize(
    "faults",
    [
        [refuses(410, "Expired")],
        [streams(json.dumps(TOO_OLD).encode() + b"\n")],
        [streams(json.dumps(BROKEN).encode() + b"\n")] * 3,
        [refuses(404, "NotFound")] * 3,
        [refuses(403, "Forbidden", "not yet")] * 2,
        [streams(b"<html>Please log in\n")] * 3,
        [streams(b'{"type": "MODIFIED"}\n')] * 3,
        [streams(b'{"type": "ADDED", "object": {"metadata": {"resourceVersion": "x", "uid": "1", "name": "x"}}}\n')]
        * 3,
    ],
    ids=["410", "410 event", "500 event", "404", "403", "nonsense", "no object", "x"],
)
async def test_whatever_a_watch_answers_what_vanished_meanwhile_is_found(
    api: WatchedCluster, faults: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BACKOFFS", (0.01,))
    api.show(called("vanishes"), called("stays"))
    async with watching(api) as observed:
        await observed.until_known("stays", "vanishes")
        await settled(api)
        # No event will ever say so.
        api.store.drop(JOBS, "vanishes")
        api.faults[WATCH] = list(faults)
        api.tell(JOBS.plural, None)
        await observed.until_known("stays")
        api.show(called("new"))
        await observed.until_known("new", "stays")
        assert observed.watch.trouble is None


@pytest.mark.parametrize(
    "fault",
    [
        breaks_off(),
        refuses(401),
        refuses(503),
        streams(b'{"type": "ADDED", "object": {"kind": "x", "metadata": {}}}\n'),
    ],
    ids=["reset", "401", "503", "no name"],
)
async def test_a_watch_that_breaks_continues_where_it_was(
    api: WatchedCluster, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BACKOFFS", (0.01, 0.01))
    async with watching(api) as observed:
        await settled(api)
        listed = len(api.queries(LIST))
        api.faults[WATCH] = [fault] * 2
        api.tell(JOBS.plural, None)
        api.show(seen_job())
        assert (await observed.change()).name == NAME
    assert len(api.queries(LIST)) == listed


async def test_a_server_that_ends_every_watch_at_once_is_not_asked_at_once(
    api: WatchedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(watch_session, "_SECONDS_BETWEEN_WATCHES", 100.0)
    sleep = asyncio.sleep

    async def skipped(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    api.faults[WATCH] = [streams()] * 4
    async with watching(api):
        monkeypatch.setattr(watch_session.asyncio, "sleep", skipped)
        async with asyncio.timeout(deadline(PATIENCE)):
            while api.faults[WATCH]:
                await sleep(0.001)
    assert len([pause for pause in pauses if 99 < pause <= 100]) >= 3


async def test_a_job_with_the_marks_of_other_kopf_operators_is_left_alone(api: WatchedCluster) -> None:
    """kopf would take its own finalizer away from a job that is being deleted."""
    job = seen_job()
    job["metadata"] |= {
        "finalizers": ["kopf.zalando.org/KopfFinalizerMarker"],
        "annotations": {"kopf.zalando.org/last-handled-configuration": "{}"},
        "deletionTimestamp": "2026-01-15T12:00:00Z",
    }
    async with watching(api) as observed:
        await settled(api)
        api.show(job)
        assert (await observed.change()).name == NAME
        api.show({**job, "status": {"state": "Running"}})
        assert (await observed.change()).name == NAME
        assert observed.watch.trouble is None


@pytest.mark.parametrize("method", ["post", "patch", "put", "delete"])
async def test_kopf_cannot_write(api: WatchedCluster, method: str) -> None:
    async with watch_session.watch_session(credentials_for(api.url), JOBS.path(None), lambda _: None) as session:
        with pytest.raises(aiohttp.ClientError, match="kopf only reads"):
            await session.request(method, f"{api.url}apis/{constants.API_VERSION}/tputrainingjobs")
    assert not api.asked


async def test_the_token_is_read_for_every_request(api: WatchedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = iter(range(1000))
    sent: list[str] = []
    credentials = credentials_for(api.url)
    monkeypatch.setattr(type(credentials), "authorization", lambda _: f"Bearer {next(tokens)}")
    async with watch_session.watch_session(credentials, JOBS.path(None), lambda _: None) as session:
        for _ in range(3):
            async with session.get(f"{api.url}api") as response:
                sent.append(response.request_info.headers["Authorization"])
    assert sent == ["Bearer 0", "Bearer 1", "Bearer 2"]
