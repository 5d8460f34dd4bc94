"""How the operator watches: nothing ends it, nothing is missed, and only what matters is a hint."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.cluster.deadlines import deadline
from tests.fakes.api_server import credentials_for, refuses
from tests.fakes.watched_cluster import WatchedCluster, breaks_off, served, streams
from tests.unit.pods import ended, pod, ready, with_status
from tests.unit.seen_jobs import progress, seen_job
from tpu_training_operator.api import constants
from tpu_training_operator.domain.job.naming import gang_selector
from tpu_training_operator.kube import client, informer
from tpu_training_operator.kube.client import connect
from tpu_training_operator.kube.cluster import JOBS, PODS, JobKey, Object
from tpu_training_operator.kube.errors import NotFound, Unavailable
from tpu_training_operator.runtime import watching as module
from tpu_training_operator.runtime.cached_cluster import CachedCluster
from tpu_training_operator.runtime.controller import Haste
from tpu_training_operator.runtime.job_watch import JobWatch
from tpu_training_operator.runtime.watching import Watching

KEY = JobKey("default", "digits")
# Seconds after which a test fails that would otherwise wait forever.
PATIENCE = 60


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(informer, "FIRST_PAUSE", 0.01)


@pytest.fixture
async def api() -> AsyncIterator[WatchedCluster]:
    async with served(WatchedCluster()) as started:
        yield started


class Operator:
    """`hints`: what it was told: the job's version, and how soon it needs a pass."""

    def __init__(self, url: str, reader: client.Client, *namespaces: str) -> None:
        self.hints: list[tuple[JobKey, str | None, Haste]] = []
        self.heard = asyncio.Event()
        credentials = credentials_for(url)
        self.jobs = {namespace: JobWatch(reader, credentials, namespace) for namespace in namespaces or (None,)}
        self.watching = Watching(reader, self.jobs, self._hint)
        self.cluster = CachedCluster(reader, self.watching.served)

    def _hint(self, *hint: Any) -> None:
        self.hints.append(hint)
        self.heard.set()

    async def gang(self) -> list[str]:
        found = await self.cluster.list(PODS, "default", gang_selector("digits"))
        return sorted(worker["metadata"]["name"] for worker in found)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(deadline(PATIENCE)):
            while not holds():
                self.heard.clear()
                await self.heard.wait()

    async def until_known(self, *names: str) -> None:
        """Until the memory has these workers."""
        replica = self.watching.served("default")
        assert replica is not None
        async with asyncio.timeout(deadline(PATIENCE)):
            # Not every change of the memory is a hint.
            while sorted(name for (_, name), _ in replica.pods.items()) != sorted(names):  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@asynccontextmanager
async def watching(api: WatchedCluster, *namespaces: str) -> AsyncIterator[Operator]:
    async with connect(credentials_for(api.url)) as reader:
        operator = Operator(api.url, reader, *namespaces)
        tasks = [asyncio.create_task(watch.run()) for watch in (*operator.jobs.values(), operator.watching)]
        try:
            yield operator
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def settled(api: WatchedCluster, operator: Operator) -> None:
    """Both watches are open, and all hints about the start have come."""
    async with asyncio.timeout(deadline(PATIENCE)):
        while not (api._watches[JOBS.plural] and api._watches[PODS.plural]):  # noqa: ASYNC110
            await asyncio.sleep(0)
    operator.hints.clear()


async def test_what_is_found_at_the_start_is_only_listed(api: WatchedCluster) -> None:
    api.show(seen_job(), *map(pod, range(4)))
    async with watching(api) as operator:
        await operator.until(lambda: bool(operator.hints))
        asked = len(api.asked)
        assert await operator.cluster.get(JOBS, "default", "digits")
        assert (len(await operator.gang()), len(api.asked)) == (4, asked), "its pass finds it in memory"
    assert operator.hints == [(KEY, None, Haste.IDLE)]


async def test_who_begins_to_lead_knows_the_jobs_already(api: WatchedCluster) -> None:
    api.show(seen_job(), pod(0))
    async with connect(credentials_for(api.url)) as reader:
        operator = Operator(api.url, reader)
        standby = asyncio.create_task(operator.jobs[None].run())
        async with asyncio.timeout(deadline(PATIENCE)):
            while not api._watches[JOBS.plural] or len(api.queries(f"list {JOBS.plural}")) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        asked = api.asked.copy()
        leading = asyncio.create_task(operator.watching.run())
        await operator.until(lambda: bool(operator.hints))
        assert await operator.cluster.get(JOBS, "default", "digits")
        standby.cancel()
        leading.cancel()
        await asyncio.gather(standby, leading, return_exceptions=True)
    assert operator.hints == [(KEY, None, Haste.FIRST)]
    assert {what for what, _ in api.asked[len(asked) :]} == {"list pods", "watch pods"}


BROKEN = {
    "a worker has ended": (seen_job(), [*map(pod, range(3)), ended(pod(3), 1)]),
    "a worker is missing": (seen_job(), [*map(pod, range(3))]),
    "all are missing": (seen_job(), []),
    "it restarts": (seen_job("Restarting", attempt=2), [ended(pod(0), 1)]),
}


@pytest.mark.parametrize(("job", "pods"), BROKEN.values(), ids=BROKEN)
async def test_a_gang_that_stands_idle_at_the_start_goes_first(
    api: WatchedCluster, job: Object, pods: list[Object]
) -> None:
    api.show(job, *pods)
    async with watching(api) as operator:
        await operator.until(lambda: bool(operator.hints))
    assert operator.hints == [(KEY, None, Haste.FIRST)]


@pytest.mark.parametrize(("pods", "hints"), [(0, []), (1, [(KEY, None, Haste.IDLE)])])
async def test_a_suspended_job_is_no_hint_at_the_start_unless_it_has_workers(
    api: WatchedCluster, pods: int, hints: list[object]
) -> None:
    job = seen_job("Suspended", spec={"runPolicy": {"suspend": True}}, observedGeneration=1)
    job["metadata"]["generation"] = 1
    api.show(job, *map(pod, range(pods)))
    async with watching(api) as operator:
        async with asyncio.timeout(deadline(PATIENCE)):
            while not api._watches[JOBS.plural]:  # noqa: ASYNC110
                await asyncio.sleep(0)
    assert operator.hints == hints


async def test_a_finished_job_whose_workers_still_run_is_a_hint_at_the_start(api: WatchedCluster) -> None:
    api.show(seen_job("Succeeded", completionTime="2026-01-15T12:00:00Z"), ready(pod(0)))
    async with watching(api) as operator:
        await operator.until(lambda: bool(operator.hints))
    assert operator.hints == [(KEY, None, Haste.IDLE)]


async def test_a_finished_job_whose_pods_have_ended_is_no_hint_at_the_start(api: WatchedCluster) -> None:
    api.show(seen_job("Succeeded", completionTime="2026-01-15T12:00:00Z"), ended(pod(0)))
    async with watching(api) as operator:
        await settled(api, operator)
        await operator.cluster.list(JOBS, None)
        api.show(ready(pod(1)))
        await operator.until(lambda: bool(operator.hints))
    assert operator.hints == [(KEY, None, Haste.SOON)]


async def test_a_change_is_a_hint_with_the_version_of_the_job(api: WatchedCluster) -> None:
    api.show(seen_job(), pod(0))
    async with watching(api) as operator:
        await settled(api, operator)
        api.show(seen_job(progress=progress(3)))
        version = str(api.store.version)
        await operator.until(lambda: len(operator.hints) >= 1)
        api.remove(PODS, "digits-1-0-0")
        await operator.until(lambda: len(operator.hints) >= 2)
        api.remove(JOBS, "digits")
        await operator.until(lambda: len(operator.hints) >= 3)
        with pytest.raises(NotFound):
            await operator.cluster.get(JOBS, "default", "digits")
    assert operator.hints == [(KEY, version, Haste.FIRST), (KEY, None, Haste.FIRST), (KEY, None, Haste.FIRST)]


async def test_only_what_completes_something_or_ends_is_urgent(api: WatchedCluster) -> None:
    """Anything else about a pod is soon followed by more of the same, and a pass reads the whole gang."""
    api.show(seen_job(), *map(pod, range(3)))
    started = [with_status(pod(host), podIPs=[{"ip": f"10.0.0.{host}"}]) for host in range(3)]
    story = [
        *((body, Haste.SOON) for body in started[:2]),
        (started[2], Haste.NOW),
        *((ready(body), Haste.SOON) for body in started[:2]),
        (ready(started[2]), Haste.NOW),
        (ended(started[1], 1), Haste.FIRST),
        (ended(started[0], 1), Haste.SOON),
        (ended(started[2], 1), Haste.FIRST),
    ]
    async with watching(api) as operator:
        await operator.until_known(*(body["metadata"]["name"] for body in started))
        await settled(api, operator)
        for number, (body, _) in enumerate(story):
            api.show(body)
            await operator.until(lambda least=number: len(operator.hints) > least)
    assert [haste for _, _, haste in operator.hints] == [haste for _, haste in story]


async def test_in_a_steady_state_passes_send_no_request(api: WatchedCluster) -> None:
    api.show(seen_job(), pod(0), pod(1))
    async with watching(api) as operator:
        await operator.until_known("digits-1-0-0", "digits-1-0-1")
        await settled(api, operator)
        asked = len(api.asked)
        for _ in range(10):
            await operator.cluster.get(JOBS, "default", "digits")
            await operator.gang()
            await operator.cluster.list(JOBS, None)
        assert len(api.asked) == asked


OWNER = {"apiVersion": constants.API_VERSION, "kind": constants.KIND, "name": "digits", "uid": "1", "controller": True}


@pytest.mark.parametrize(
    ("owners", "is_hint"),
    [
        ([OWNER], True),
        ([{**OWNER, "apiVersion": f"{constants.GROUP}/v1"}], True),
        ([], False),
        ([{**OWNER, "name": "another"}], False),
        ([{**OWNER, "controller": False}], False),
        ([{**OWNER, "kind": "Job"}], False),
        ([{**OWNER, "apiVersion": "batch/v1"}], False),
    ],
    ids=["its job's", "a later version's", "nobody's", "another job's", "not controlled", "a Job's", "another group's"],
)
async def test_a_pod_is_a_hint_for_the_job_that_controls_it(
    api: WatchedCluster, owners: list[Object], is_hint: bool
) -> None:
    api.show(seen_job())
    async with watching(api) as operator:
        await settled(api, operator)
        body = pod(0)
        body["metadata"]["ownerReferences"] = owners
        api.show(body)
        api.show(seen_job(progress=progress(1)))
        await operator.until(lambda: any(version is not None for _, version, _ in operator.hints))
    changed = str(api.store.version)
    assert [version for _, version, _ in operator.hints] == ([None, changed] if is_hint else [changed])


def too_old() -> bytes:
    event = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}}
    return json.dumps(event).encode() + b"\n"


@pytest.mark.parametrize(
    "faults",
    [
        [refuses(410, "Expired")],
        [streams(too_old())],
        [refuses(500, "InternalError", "etcd")] * 4,
        [refuses(401)] * 3,
        [refuses(403, "Forbidden", "not yet")] * 3,
        [breaks_off()] * 3,
        [streams(b"<html>Please log in\n")] * 3,
        [streams(b'{"type": "MODIFIED", "object": {"kind": "Pod", "metadata": {}}}\n')] * 3,
        [streams(b'{"type": "MODIFIED"}\n')] * 3,
        [streams(b'{"type": "ADDED", "object": {"metadata": {"resourceVersion": "x"}}}\n')] * 3,
    ],
    ids=["410", "told 410", "500", "401", "403", "reset", "nonsense", "no version", "no object", "odd version"],
)
async def test_whatever_a_watch_answers_deletions_are_found(api: WatchedCluster, faults: list[Any]) -> None:
    api.show(seen_job(), pod(0), pod(1))
    async with watching(api) as operator:
        await operator.until_known("digits-1-0-0", "digits-1-0-1")
        await settled(api, operator)
        # Deleted while nobody watches: no event will ever say so.
        api.store.drop(PODS, "digits-1-0-1")
        api.faults["watch pods"] = list(faults)
        api.tell("pods", None)
        await operator.until_known("digits-1-0-0")
        await operator.until(lambda: (KEY, None, Haste.SOON) in operator.hints)


@pytest.mark.parametrize(
    "fault", [refuses(500, "InternalError", "etcd"), refuses(403, "Forbidden", "no"), breaks_off()]
)
@pytest.mark.parametrize("plural", [JOBS.plural, PODS.plural])
async def test_a_first_list_that_fails_is_tried_again_and_meanwhile_the_api_server_is_read(
    api: WatchedCluster, plural: str, fault: Any
) -> None:
    api.show(seen_job(), pod(0))
    api.faults[f"list {plural}"] = [fault] * 2
    async with watching(api) as operator:
        assert (await operator.cluster.get(JOBS, "default", "digits"))["spec"]
        await operator.until_known("digits-1-0-0")
        await settled(api, operator)
        assert await operator.gang() == ["digits-1-0-0"]


async def test_the_resync_of_jobs_that_cannot_be_listed_is_an_error(api: WatchedCluster) -> None:
    api.faults[f"list {JOBS.plural}"] = [refuses(403, "Forbidden", "tputrainingjobs is forbidden")] * 1000
    async with watching(api) as operator:
        with pytest.raises(Unavailable, match="tputrainingjobs is forbidden"):
            await operator.cluster.list(JOBS, None)


async def test_an_object_that_cannot_be_read_hides_no_other(api: WatchedCluster) -> None:
    odd = pod(1)
    odd["status"] = {"phase": "Running", "containerStatuses": [1]}
    api.show(odd, pod(0))
    async with watching(api) as operator:
        await operator.until_known("digits-1-0-0")
        await settled(api, operator)
        api.show(odd, ready(pod(0)), pod(2))
        await operator.until_known("digits-1-0-0", "digits-1-0-2")


async def test_memory_without_a_sign_of_life_is_not_used(api: WatchedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    api.show(seen_job(), pod(0))
    async with watching(api) as operator:
        await operator.until_known("digits-1-0-0")
        await settled(api, operator)
        api.store.drop(PODS, "digits-1-0-0")
        assert await operator.gang() == ["digits-1-0-0"]
        monkeypatch.setattr(module, "_TRUSTED_SECONDS", -1.0)
        assert await operator.gang() == []
        assert operator.watching.longest_silence_seconds() >= 0


async def test_only_the_served_namespaces_are_watched(api: WatchedCluster) -> None:
    async with watching(api, "default", "team") as operator:
        await settled(api, operator)
        assert operator.watching.served("default") is not operator.watching.served("team")
        assert operator.watching.served("other") is None
        assert operator.watching.served(None) is None
    assert api.queries("list pods")[0]["labelSelector"] == constants.LABEL_JOB_NAME
