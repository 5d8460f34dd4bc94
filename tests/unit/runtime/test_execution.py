"""What becomes of the actions of a batch: how many are under way, what ends it, and that it holds up no other job.

Requests are counted in their order; no time passes.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from datetime import timedelta
from typing import Any

import pytest

from tests.fakes.clock import Clock
from tests.fakes.cluster import FakeCluster
from tests.fakes.held_requests import HeldRequests, settle
from tests.unit.jobs import job, job_body
from tests.unit.pods import NOON
from tpu_training_operator.domain.job.options import options_of
from tpu_training_operator.domain.objects.actions import Action, Create, Delete
from tpu_training_operator.domain.objects.placeholder import missing_placeholders
from tpu_training_operator.domain.plan.plan import Batch, Plan
from tpu_training_operator.kube.cluster import JOBS, JobKey, Object
from tpu_training_operator.kube.errors import ApiError, Conflict, Forbidden, InvalidRequest, Unavailable
from tpu_training_operator.kube.turns import Turns
from tpu_training_operator.runtime.execution import Memory, PlanExecution, Refused

SIDE_BY_SIDE = 32
FEW = 4


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
    return [Delete("Pod", f"{job}-{index}", f"uid-{index}") for index in range(hosts)]


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
    return Clock(NOON)


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


async def test_the_next_action_begins_as_one_ends(cluster: FakeCluster, server: HeldRequests, running: Running) -> None:
    """One slow answer holds up nothing but itself. A body is built as it is sent, and few reads are added."""
    pods = Pods("large", 500)
    task = await running.begin(pods)
    assert server.under_way == pods.built == SIDE_BY_SIDE
    await server.answer_all(leaving=1)
    assert (len(server.sent), pods.built, task.done()) == (500, 500, False)
    assert cluster.count()["get TPUTrainingJob"] == 500 // 32
    await server.answer()
    assert await task


async def test_a_batch_begins_when_the_one_before_has_ended(server: HeldRequests, running: Running) -> None:
    await running.begin(deletions("old", 3), Pods("new", 3))
    await server.answer_all(leaving=1)
    assert senders(server) == ["old"] * 3
    await server.answer()
    assert server.sent[3:] == ["new-0", "new-1", "new-2"]


async def test_one_line_tells_what_a_batch_has_done(
    server: HeldRequests, running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        await running.begin(Pods("large", 64), deletions("old", 40))
        for _ in range(64 + 10):
            await server.answer()
        await server.answer(Forbidden(403, "Forbidden", "no"))
        await server.answer_all()
    lines = [record.getMessage() for record in caplog.records if "carried out" in record.getMessage()]
    assert lines == ["carried out create Pod x 64", "carried out delete Pod x 39"]


# A job that no longer wants it


GOING = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
# What is then different about the job; None: it is gone.
CHANGES = {"gone": None, "being deleted": GOING, "suspended": {"generation": 99}, "a namesake": {"uid": "another"}}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(("seconds", "limit", "most"), [(0, SIDE_BY_SIDE, 32), (6, FEW, 1)], ids=["fast", "slow"])
async def test_the_rest_is_not_done_for_a_job_that_does_not_want_it(
    cluster: FakeCluster,
    server: HeldRequests,
    running: Running,
    clock: Clock,
    change: Any,
    seconds: int,
    limit: int,
    most: int,
) -> None:
    """`seconds`: how long the next answer takes; `most`: the requests that are still sent."""
    server.turns = Turns(places=limit)
    task = await running.begin(Pods("large", 2304))
    for _ in range(100):
        await server.answer()
    sent = len(server.sent)
    cluster.drop(JOBS, "large")
    if change is not None:
        cluster.put(a_job("large", **change))
    clock.now += timedelta(seconds=seconds)
    await server.answer_all()
    assert await task is False
    assert len(server.sent) - sent <= most


async def test_all_workers_of_a_job_that_is_being_deleted_are_stopped_in_one_pass(
    cluster: FakeCluster, server: HeldRequests, running: Running
) -> None:
    going = a_job("large", **GOING)
    cluster.put(going)
    task = await running.begin(deletions("large", 200), body=going)
    await server.answer_all()
    assert await task
    assert len(server.sent) == 200


# Failures


REFUSED = InvalidRequest(422, "Invalid", "no such field")
OVERLOADED = Unavailable(503, "", "overloaded")


@pytest.mark.parametrize(
    ("errors", "raised"),
    [([Unavailable(500, "", "before"), REFUSED], Refused), ([OVERLOADED] * 3, Unavailable)],
    ids=["a refusal", "failures in a row"],
)
@pytest.mark.parametrize("limit", [SIDE_BY_SIDE, FEW])
async def test_a_refusal_or_failures_in_a_row_end_the_batch(
    server: HeldRequests, running: Running, errors: list[ApiError], raised: type[Exception], limit: int
) -> None:
    """With a low limit, actions that have begun wait for their turn: they are not sent either."""
    server.turns = Turns(places=limit)
    task = await running.begin(Pods("large", 2304))
    for error in errors:
        await server.answer(error)
    assert not task.done(), "what was sent is awaited"
    sent = len(server.sent)
    assert sent < SIDE_BY_SIDE + len(errors)
    await server.answer_all()
    with pytest.raises(raised):
        await task
    assert len(server.sent) == sent


@pytest.mark.parametrize("error", [OVERLOADED, Conflict(409, "Conflict", "has changed")])
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


async def test_the_refusal_of_one_placeholder_ends_their_batch_and_not_the_pass(
    server: HeldRequests, running: Running
) -> None:
    """A quota refuses all of them, and they are asked for again and again while the gang trains."""
    (slice_,) = options_of(job({"spec.slice": {"acceleratorType": "v5p-4096"}, "spec.recipe.globalBatchSize": 2048}))
    task = await running.begin(missing_placeholders(slice_, 0, ()), deletions("old", 3), told={"Pod"})
    await server.answer(Forbidden(403, "Forbidden", "exceeded quota"))
    await server.answer_all()
    assert await task
    assert Counter(senders(server)) == {"digits": SIDE_BY_SIDE, "old": 3}


async def test_a_pass_that_is_cancelled_leaves_nothing_behind(server: HeldRequests, running: Running) -> None:
    server.turns = Turns(places=FEW)
    task = await running.begin(Pods("large", 2304))
    task.cancel()
    await settle()
    assert task.cancelled()
    await server.answer_all()
    server.sent.clear()
    # The places are free again.
    other = await running.begin(Pods("small", 4), name="small")
    assert senders(server) == ["small"] * 4
    await server.answer_all()
    assert await other


# Side by side with other jobs
