"""The watch of Workloads: none before the first job in a queue, and then a hint for every change."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from tpu_training_operator.kube.client import Client, Keep, Page, Selection
from tpu_training_operator.kube.cluster import KUEUE_VERSIONS, WORKLOADS, JobKey, Object
from tpu_training_operator.runtime.controller import Haste
from tpu_training_operator.runtime.watching import WorkloadWatching

KIND = WORKLOADS[KUEUE_VERSIONS[0]]
OWNER = {"apiVersion": "tpu-operator.dev/v1alpha1", "kind": "TPUTrainingJob", "name": "digits", "controller": True}


class Api:
    """One Workload that was there before, and then the events that the test gives."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Object] = asyncio.Queue()
        self.asked: list[Selection] = []

    async def pages(self, selection: Selection, keep: Keep[Any]) -> AsyncIterator[Page[Any]]:
        self.asked.append(selection)
        yield Page((keep(a_workload(5)),), 1, "", "5")

    async def watch(self, selection: Selection, version: str) -> AsyncIterator[Object]:
        while True:
            yield await self.events.get()


def a_workload(version: int, owner: Object | None = None) -> Object:
    metadata = {"namespace": "team-a", "name": "w", "uid": "1", "resourceVersion": str(version)}
    return {"metadata": {**metadata, "ownerReferences": [OWNER if owner is None else owner]}}


class Watched:
    def __init__(self, *namespaces: str) -> None:
        self.api = Api()
        self.hints: asyncio.Queue[tuple[JobKey, str | None, Haste]] = asyncio.Queue()
        self.watching = WorkloadWatching(
            cast("Client", self.api), namespaces, lambda *hint: self.hints.put_nowait(hint)
        )
        self.task = asyncio.create_task(self.watching.run())

    async def hint(self) -> tuple[JobKey, str | None, Haste]:
        async with asyncio.timeout(60):
            return await self.hints.get()


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    one = Watched("team-a")
    yield one
    one.task.cancel()


async def test_nothing_is_asked_before_a_job_is_in_a_queue(watched: Watched) -> None:
    for _ in range(10):
        await asyncio.sleep(0)
    assert watched.api.asked == []


async def test_every_change_of_a_workload_is_a_hint_for_its_job(watched: Watched) -> None:
    watched.watching.begin(KIND)
    watched.watching.begin(KIND)
    assert await watched.hint() == (JobKey("team-a", "digits"), None, Haste.IDLE)
    watched.api.events.put_nowait({"type": "MODIFIED", "object": a_workload(6)})
    assert await watched.hint() == (JobKey("team-a", "digits"), None, Haste.NOW)
    watched.api.events.put_nowait({"type": "DELETED", "object": a_workload(7)})
    assert await watched.hint() == (JobKey("team-a", "digits"), None, Haste.NOW)
    (selection,) = watched.api.asked
    assert (selection.resource, selection.namespace) == (KIND, "team-a")


async def test_a_workload_of_another_kind_of_job_is_no_hint(watched: Watched) -> None:
    watched.watching.begin(KIND)
    await watched.hint()
    others = a_workload(6, {**OWNER, "apiVersion": "batch/v1", "kind": "Job"})
    others["metadata"] |= {"name": "another", "uid": "2"}
    watched.api.events.put_nowait({"type": "ADDED", "object": others})
    watched.api.events.put_nowait({"type": "MODIFIED", "object": a_workload(7)})
    assert (await watched.hint())[0].name == "digits"
    assert watched.hints.empty()
