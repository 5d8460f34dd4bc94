"""The watch of Workloads: none before the first job in a queue, and then a hint for every change."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.fakes.api_server import credentials_for
from tests.fakes.watched_cluster import WatchedCluster, served
from tpu_training_operator.kube.client import connect
from tpu_training_operator.kube.cluster import KUEUE_VERSIONS, WORKLOADS, JobKey, Object
from tpu_training_operator.runtime.controller import Haste
from tpu_training_operator.runtime.watching import WorkloadWatching

KIND = WORKLOADS[KUEUE_VERSIONS[0]]
OWNER = {"apiVersion": "tpu-operator.dev/v1alpha1", "kind": "TPUTrainingJob", "name": "digits", "controller": True}


def a_workload(name: str = "w", namespace: str = "team-a", **owner: str) -> Object:
    metadata = {"namespace": namespace, "name": name, "uid": f"uid-{name}", "ownerReferences": [OWNER | owner]}
    return {"apiVersion": KIND.api_version, "kind": KIND.kind, "metadata": metadata}


class Watched:
    """The namespace team-a is watched, where there is one Workload."""

    def __init__(self, api: WatchedCluster, watching: WorkloadWatching) -> None:
        self.api = api
        self.watching = watching
        self.hints: asyncio.Queue[tuple[JobKey, str | None, Haste]] = asyncio.Queue()

    async def hint(self) -> tuple[JobKey, str | None, Haste]:
        async with asyncio.timeout(60):
            return await self.hints.get()


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    async with served(WatchedCluster()) as api, connect(credentials_for(api.url)) as client:
        api.show(a_workload(), a_workload(namespace="team-b"))
        watching = WorkloadWatching(client, ["team-a"], lambda *hint: watched.hints.put_nowait(hint))
        watched = Watched(api, watching)
        task = asyncio.create_task(watching.run())
        yield watched
        task.cancel()


async def test_nothing_is_asked_before_a_job_is_in_a_queue(watched: Watched) -> None:
    for _ in range(10):
        await asyncio.sleep(0)
    assert watched.api.asked == []


async def test_every_change_of_a_workload_is_a_hint_for_its_job(watched: Watched) -> None:
    watched.watching.begin(KIND)
    watched.watching.begin(KIND)
    assert await watched.hint() == (JobKey("team-a", "digits"), None, Haste.IDLE)
    watched.api.show(a_workload())
    assert await watched.hint() == (JobKey("team-a", "digits"), None, Haste.NOW)
    watched.api.remove(KIND, "w", "team-a")
    assert await watched.hint() == (JobKey("team-a", "digits"), None, Haste.NOW)
    assert [request for request, _ in watched.api.asked] == ["list workloads", "watch workloads"]


async def test_a_workload_of_another_kind_of_job_is_no_hint(watched: Watched) -> None:
    watched.watching.begin(KIND)
    await watched.hint()
    watched.api.show(a_workload("another", apiVersion="batch/v1", kind="Job"), a_workload())
    assert (await watched.hint())[0].name == "digits"
    assert watched.hints.empty()
