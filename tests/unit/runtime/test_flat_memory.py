"""Jobs that have come and gone leave nothing in the operator: its memory stays flat however long it works."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

import pytest

from tests.fakes.cluster import FakeCluster
from tests.unit.jobs import job_body
from tests.unit.pods import NOON
from tests.unit.runtime.test_cached_cluster import Known
from tpu_contract.protocol import ReportPhase
from tpu_training_operator.domain.cluster_state.worker_reports import WorkerReport
from tpu_training_operator.domain.objects.shared import WorkerNetworkPolicy
from tpu_training_operator.kube.cluster import JOBS, PODS, JobKey, Object
from tpu_training_operator.kube.errors import NotFound, Unavailable
from tpu_training_operator.kube.replica import Version
from tpu_training_operator.runtime import records
from tpu_training_operator.runtime.cached_cluster import CachedCluster
from tpu_training_operator.runtime.controller import Controller, Haste
from tpu_training_operator.runtime.events import EventSender
from tpu_training_operator.runtime.inbox import Inboxes
from tpu_training_operator.runtime.metrics import Metrics
from tpu_training_operator.runtime.queues import Queues
from tpu_training_operator.runtime.reconciler import Reconciler
from tpu_training_operator.runtime.records import keep_job, keep_pod

CONTAINERS = (dict, list, tuple, set, frozenset, deque)


def entries(*roots: object) -> int:
    """The entries of all containers that the operator's own objects hold."""
    known, left, number = set[int](), list(roots), 0
    while left:
        value = left.pop()
        if id(value) in known:
            continue
        known.add(id(value))
        if isinstance(value, CONTAINERS):
            number += len(value)
            left += [*value.keys(), *value.values()] if isinstance(value, dict) else value
        elif type(value).__module__.startswith("tpu_training_operator"):
            slots: Iterable[str] = getattr(type(value), "__slots__", ())
            left += [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]
    return number


class Operating:
    """An operator without a network: its controller, and all that it keeps."""

    def __init__(self) -> None:
        self.store, self.known = FakeCluster(), Known()
        metrics, cluster = Metrics(), CachedCluster(self.store, lambda namespace: self.known)
        self.inboxes = Inboxes(lambda: NOON)
        self.events = EventSender(cluster)
        self.reconciler = Reconciler(
            cluster,
            lambda: NOON,
            fresh=cluster.fresh,
            events=self.events,
            inboxes=self.inboxes,
            network_policy=WorkerNetworkPolicy(),
            metrics=metrics,
            queues=Queues(cluster),
        )
        self.controller = Controller(self.reconciler, self._no_jobs, settle_seconds=0, metrics=metrics)
        self._kept = (self.controller, self.events, metrics, self.known.jobs, self.known.pods)

    async def _no_jobs(self) -> list[JobKey]:
        return []

    def size(self) -> int:
        return entries(*self._kept)

    async def one_comes_and_goes(self, number: int) -> None:
        """The job gets its worker, which reports, and both are deleted. Every tenth job meets a failed request."""
        key = JobKey("default", f"job-{number}")
        body = job_body({"spec.slice.acceleratorType": "v5litepod-4", "metadata.name": key.name})
        body["metadata"]["uid"] = key.name
        if number % 10 == 0:
            self.store.fail_once("create Pod", Unavailable(503, "", "not now"))
        self.told(await self.store.create(body))
        self.controller.enqueue(key)
        await self.until(lambda: self.find(f"{key.name}-1-0-0") is not None)
        pod = self.find(f"{key.name}-1-0-0") or {}
        self.inboxes.put(key, WorkerReport(1, pod["metadata"]["uid"], NOON, ReportPhase.TRAINING, 7))
        written = self.store.body(JOBS, key.name)["metadata"]["resourceVersion"]
        self.told(pod)
        self.told(self.store.drop(PODS, pod["metadata"]["name"]), is_gone=True)
        self.told(self.store.drop(JOBS, key.name), is_gone=True)
        self.controller.enqueue(key, Haste.FIRST)
        await self.until(lambda: not self.reconciler.wrote(key, written))

    def find(self, pod: str) -> Object | None:
        with suppress(NotFound):
            return self.store.body(PODS, pod)
        return None

    def told(self, body: Object, *, is_gone: bool = False) -> None:
        metadata = body["metadata"]
        name, number = (metadata["namespace"], metadata["name"]), int(metadata["resourceVersion"])
        if body["kind"] == "Pod":
            pod = Version(name, metadata["uid"], number, keep_pod(body))
            (self.known.pods.apply_deletion if is_gone else self.known.pods.apply_change)(pod)
        else:
            job = Version(name, metadata["uid"], number, keep_job(body))
            jobs = self.known.jobs
            (jobs.apply_streamed_deletion if is_gone else jobs.apply_streamed_change)(job)

    def lists(self) -> None:
        self.known.jobs.begin_list(self.store.version)
        self.known.jobs.end_list(self.store.version)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0.001)


async def test_two_hundred_jobs_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_MOST_ENDS", 10)
    operating = Operating()
    running = [asyncio.create_task(work) for work in (operating.controller.run(), operating.events.run())]
    sizes = []
    for number in range(200):
        await operating.one_comes_and_goes(number)
        if number in (49, 199):
            operating.lists()
            sizes.append(operating.size())
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    assert sizes[0] == sizes[1]
    assert sizes[0] > 0
