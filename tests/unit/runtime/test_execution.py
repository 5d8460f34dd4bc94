"""A batch is a stream: how many actions are under way, which are begun, and what ends it. Requests are counted in their
order; no time passes."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.fakes.cluster import FakeCluster
from tests.fakes.held_requests import HeldRequests, settle
from tests.unit.jobs import job, job_body
from tests.unit.pods import NOON
from tpu_training_operator.domain.job.options import options_of
from tpu_training_operator.domain.objects.actions import Action, Create, DeletePod
from tpu_training_operator.domain.objects.placeholder import missing_placeholders
from tpu_training_operator.domain.plan.plan import Batch, Plan
from tpu_training_operator.kube.cluster import JOBS, JobKey, Object
from tpu_training_operator.kube.errors import ApiError, Conflict, Forbidden, InvalidRequest, NotFound, Unavailable
from tpu_training_operator.kube.turns import LEAST, WriteLimit
from tpu_training_operator.runtime.execution import Memory, PlanExecution, Refused

SIDE_BY_SIDE = 32


class Clock:
    now = NOON

    def __call__(self) -> datetime:
        return self.now


def a_job(name: str, **metadata: Any) -> Object:
    body = job_body()
    return body | {"metadata": body["metadata"] | {"name": name} | metadata}


class Pods(Sequence[Action]):
    """The creations of a gang's pods. `built`: how many bodies were built."""

    def __init__(self, job: str, hosts: int) -> None:
        self._job = job
        self._hosts = hosts
        self.built = 0

    def __len__(self) -> int:
        return self._hosts

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._hosts:
            raise IndexError
        self.built += 1
        return Create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"{self._job}-{index}"}})


def deletions(job: str, hosts: int) -> list[Action]:
    return [DeletePod(f"{job}-{index}", f"uid-{index}") for index in range(hosts)]


@pytest.fixture
def server() -> HeldRequests:
    return HeldRequests()


@pytest.fixture
def cluster(server: HeldRequests) -> FakeCluster:
    return FakeCluster(a_job("large"), a_job("small"), held=server)


def senders(server: HeldRequests) -> list[str]:
    """The gangs whose requests have arrived, in order."""
    return [name.partition("-")[0] for name in server.sent]


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Running:
    """Stages that are carried out. `end` waits for the result."""

    def __init__(self, cluster: FakeCluster, clock: Clock) -> None:
        self._cluster = cluster
        self._clock = clock
        self.tasks: list[asyncio.Task[bool]] = []

    async def begin(
        self,
        *batches: Sequence[Action],
        name: str = "large",
        told: Collection[str] = (),
        body: Object | None = None,
    ) -> "asyncio.Task[bool]":
        """`told`: the kinds of optional objects of which everybody knows that the cluster refuses them. `body`: the job
        as the pass has read it."""
        key = JobKey("default", name)
        memory = Memory(sent_missing=set(told))
        execution = PlanExecution(self._cluster, self._clock, None, key, body or a_job(name), memory)
        self.tasks.append(asyncio.create_task(execution.carry_out(Plan(tuple(map(Batch, batches))))))
        await settle()
        return self.tasks[-1]


@pytest.fixture
async def running(cluster: FakeCluster, clock: Clock) -> AsyncIterator[Running]:
    started = Running(cluster, clock)
    yield started
    for task in started.tasks:
        task.cancel()
    await asyncio.gather(*started.tasks, return_exceptions=True)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "a task is left behind"


# The stream


async def test_the_next_action_begins_as_one_ends(server: HeldRequests, running: Running) -> None:
    """One slow answer holds up nothing but itself."""
    task = await running.begin(Pods("large", 500))
    await server.answer_all(leaving=1)
    assert (len(server.sent), server.under_way, task.done()) == (500, 1, False)
    await server.answer()
    assert await task


async def test_bodies_are_built_as_they_are_sent(server: HeldRequests, running: Running) -> None:
    pods = Pods("large", 200)
    task = await running.begin(pods)
    for answered in range(200):
        assert server.under_way == min(SIDE_BY_SIDE, 200 - answered)
        assert pods.built == len(server.sent)
        await server.answer()
    assert await task


async def test_the_actions_begin_in_their_order(server: HeldRequests, running: Running) -> None:
    await running.begin(Pods("large", 100))
    await server.answer_all()
    assert server.sent == [f"large-{index}" for index in range(100)]


async def test_a_batch_begins_when_the_one_before_has_ended(server: HeldRequests, running: Running) -> None:
    await running.begin(deletions("old", 3), Pods("new", 3))
    await server.answer_all(leaving=1)
    assert senders(server) == ["old"] * 3
    await server.answer()
    assert senders(server) == ["old"] * 3 + ["new"] * 3


async def test_an_empty_batch_asks_for_nothing(cluster: FakeCluster, server: HeldRequests, running: Running) -> None:
    assert await (await running.begin([]))
    assert (server.sent, cluster.requests) == ([], [])


async def test_one_line_tells_what_a_batch_has_done(
    cluster: FakeCluster, server: HeldRequests, running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        await running.begin(Pods("large", 64), deletions("old", 40))
        for _ in range(64 + 10):
            await server.answer()
        await server.answer(Forbidden(403, "Forbidden", "no"))
        await server.answer_all()
    lines = [record.getMessage() for record in caplog.records if "carried out" in record.getMessage()]
    assert lines == ["carried out create Pod x 64", "carried out delete Pod x 39"]


# What ends it


def is_deleted(cluster: FakeCluster) -> None:
    cluster.faults["get TPUTrainingJob"] = NotFound(404, "NotFound", "not found")


def is_being_deleted(cluster: FakeCluster) -> None:
    cluster.put(a_job("large", deletionTimestamp="2026-01-01T00:00:00Z"))


def is_changed(cluster: FakeCluster) -> None:
    """Suspended, for example."""
    cluster.put(a_job("large", generation=99))


def is_another(cluster: FakeCluster) -> None:
    cluster.put(a_job("large", uid="another"))


@pytest.mark.parametrize("happens", [is_deleted, is_being_deleted, is_changed, is_another])
async def test_the_rest_is_not_done_for_a_job_that_does_not_want_it(
    cluster: FakeCluster, server: HeldRequests, running: Running, happens: Any
) -> None:
    task = await running.begin(Pods("large", 2304))
    for _ in range(100):
        await server.answer()
    sent = len(server.sent)
    happens(cluster)
    await server.answer_all()
    assert await task is False
    assert len(server.sent) - sent <= 32


async def test_all_workers_of_a_job_that_is_being_deleted_are_stopped_in_one_pass(
    cluster: FakeCluster, server: HeldRequests, running: Running
) -> None:
    is_being_deleted(cluster)
    task = await running.begin(deletions("large", 200), body=await cluster.get(JOBS, "default", "large"))
    await server.answer_all()
    assert await task
    assert len(server.sent) == 200


async def test_a_slow_server_does_not_keep_the_job_from_being_read(
    cluster: FakeCluster, server: HeldRequests, running: Running, clock: Clock
) -> None:
    task = await running.begin(Pods("large", 2304))
    await server.answer()
    sent = len(server.sent)
    is_deleted(cluster)
    clock.now += timedelta(seconds=6)
    await server.answer_all()
    assert await task is False
    assert len(server.sent) == sent


async def test_the_job_is_read_once_in_32_actions(cluster: FakeCluster, server: HeldRequests, running: Running) -> None:
    await running.begin(Pods("large", 320))
    await server.answer_all()
    assert cluster.count()["get TPUTrainingJob"] == 9


async def test_a_refusal_ends_the_batch(server: HeldRequests, running: Running) -> None:
    task = await running.begin(Pods("large", 2304))
    await server.answer(Unavailable(500, "", "before"))
    await server.answer(InvalidRequest(422, "Invalid", "no such field"))
    assert not task.done(), "what was sent is awaited"
    sent = len(server.sent)
    await server.answer_all()
    with pytest.raises(Refused, match="no such field"):
        await task
    assert len(server.sent) == sent


async def test_the_refusal_of_one_placeholder_ends_their_batch_and_not_the_pass(
    server: HeldRequests, running: Running, clock: Clock
) -> None:
    """A quota refuses all of them, and they are asked for again and again while the gang trains."""
    (slice_,) = options_of(job({"spec.slice": {"acceleratorType": "v5p-4096"}, "spec.recipe.globalBatchSize": 2048}))
    holders = missing_placeholders(slice_, 0, ())
    assert len(holders) == 512
    task = await running.begin(holders, deletions("old", 3), told={"Pod"})
    await server.answer(Forbidden(403, "Forbidden", "exceeded quota"))
    await server.answer_all(leaving=0)
    assert await task
    assert Counter(senders(server)) == {"digits": SIDE_BY_SIDE, "old": 3}


async def test_failures_in_a_row_end_the_batch(server: HeldRequests, running: Running) -> None:
    task = await running.begin(Pods("large", 2304))
    for number in range(3):
        await server.answer(Unavailable(503, "", f"failure {number}"))
    sent = len(server.sent)
    await server.answer_all()
    with pytest.raises(Unavailable, match="failure 0"):
        await task
    assert len(server.sent) == sent == SIDE_BY_SIDE + 2


@pytest.mark.parametrize("error", [Unavailable(503, "", "for a moment"), Conflict(409, "Conflict", "has changed")])
async def test_a_single_failure_is_told_after_the_rest_was_done(
    server: HeldRequests, running: Running, error: ApiError
) -> None:
    task = await running.begin(Pods("large", 200))
    for _ in range(20):
        await server.answer(error)
        await server.answer()
    await server.answer_all()
    with pytest.raises(type(error)):
        await task
    assert len(server.sent) == 200


async def test_what_waits_for_its_turn_is_not_sent_once_the_batch_is_in_vain(
    server: HeldRequests, running: Running
) -> None:
    server.turns.limit = WriteLimit(LEAST)
    task = await running.begin(Pods("large", 2304))
    for _ in range(3):
        await server.answer(Unavailable(503, "", "overloaded"))
    sent = len(server.sent)
    assert sent < SIDE_BY_SIDE
    await server.answer_all()
    with pytest.raises(Unavailable):
        await task
    assert len(server.sent) == sent


async def test_a_pass_that_is_cancelled_leaves_nothing_behind(server: HeldRequests, running: Running) -> None:
    server.turns.limit = WriteLimit(LEAST)
    task = await running.begin(Pods("large", 2304))
    task.cancel()
    await settle()
    assert task.cancelled()
    await server.answer_all()
    server.sent.clear()
    # The places are free again.
    other = await running.begin(Pods("small", 4), name="small")
    assert Counter(senders(server)) == {"small": 4}
    await server.answer_all()
    assert await other


# Side by side with other jobs


@pytest.mark.parametrize("large", [Pods("large", 2304), deletions("large", 2304)], ids=["created", "deleted"])
async def test_a_large_gang_does_not_hold_up_the_restart_of_a_small_one(
    server: HeldRequests, running: Running, large: Sequence[Action]
) -> None:
    """The small one deletes its four pods and creates four: eight requests. One job has half of the places at most, so
    with a second large one they are all taken."""
    for _ in range(2):
        await running.begin(large)
    for _ in range(1000):
        await server.answer()
    assert "small" not in senders(server)
    before = len(server.sent)
    restart = await running.begin(deletions("small", 4), Pods("small", 4), name="small")
    while not restart.done():
        await server.answer()
    sent = Counter(senders(server)[before:])
    # Both batches wait for four places, and then for the answers to all that were sent before theirs.
    assert sent["small"] == 8
    assert sent["large"] < 3 * 64
    assert running.tasks[0].done() is running.tasks[1].done() is False


async def test_flows_share_the_last_places(server: HeldRequests, running: Running) -> None:
    server.turns.limit = WriteLimit(LEAST)
    await running.begin(Pods("large", 2304))
    await running.begin(Pods("small", 4), name="small")
    for _ in range(8):
        await server.answer()
    assert Counter(senders(server))["small"] == 4
