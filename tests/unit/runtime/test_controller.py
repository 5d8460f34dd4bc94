"""What makes the controller look at a job, and what ends the work on all of them."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import cast

import pytest

from tpu_training_operator.kube.cluster import JobKey
from tpu_training_operator.kube.errors import Unavailable
from tpu_training_operator.runtime.controller import Controller
from tpu_training_operator.runtime.reconciler import Reconciler

KEY = JobKey("team", "digits")
STARTING = JobKey("team", "starting")
OWN_VERSION = "7"


class Seen:
    """A reconciler that tells of its passes, and has written one version of every job."""

    def __init__(self) -> None:
        self.keys: asyncio.Queue[JobKey] = asyncio.Queue()

    async def reconcile(self, key: JobKey, *, follows: bool = False) -> timedelta | None:
        self.keys.put_nowait(key)
        # A request's time.
        await asyncio.sleep(0.001)
        return timedelta(0) if key == STARTING and not follows else None

    def is_restarting(self, key: JobKey) -> bool:
        return False

    def settle_seconds(self, key: JobKey) -> float:
        return 0.0

    def wrote(self, key: JobKey, version: str) -> bool:
        return version == OWN_VERSION


async def no_jobs() -> list[JobKey]:
    return []


@pytest.fixture
async def seen() -> Seen:
    return Seen()


def controller(seen: Seen, list_jobs: Callable[[], Awaitable[list[JobKey]]] = no_jobs) -> Controller:
    return Controller(cast("Reconciler", seen), list_jobs, settle_seconds=0)


async def test_a_failing_resync_does_not_stop_the_work_on_enqueued_jobs(seen: Seen) -> None:
    listed = asyncio.Event()

    async def list_jobs() -> list[JobKey]:
        listed.set()
        raise ValueError("a status that nobody understands")

    working = controller(seen, list_jobs)
    running = asyncio.create_task(working.run())
    await listed.wait()
    working.enqueue(KEY)

    assert await asyncio.wait_for(seen.keys.get(), timeout=60) == KEY
    assert working.is_running
    running.cancel()
    await asyncio.wait({running})


async def test_a_job_that_is_due_at_once_has_its_next_pass_before_any_other_job(seen: Seen) -> None:
    working = Controller(cast("Reconciler", seen), no_jobs, settle_seconds=0, workers=1)
    running = asyncio.create_task(working.run())
    for key in (STARTING, KEY):
        working.enqueue(key)
    async with asyncio.timeout(60):
        assert [await seen.keys.get() for _ in range(3)] == [STARTING, STARTING, KEY]
    running.cancel()
    await asyncio.wait({running})


async def test_the_echo_of_its_own_write_is_ignored(seen: Seen) -> None:
    other = JobKey("team", "other")
    working = controller(seen)
    running = asyncio.create_task(working.run())
    working.enqueue(KEY, job_version=OWN_VERSION)
    working.enqueue(other, job_version="8")

    # Passes are made in the order of the hints.
    assert await asyncio.wait_for(seen.keys.get(), timeout=60) == other
    assert seen.keys.empty()
    running.cancel()
    await asyncio.wait({running})


async def test_an_overloaded_namespace_does_not_block_other_jobs(seen: Seen) -> None:
    other = JobKey("another-team", "digits")
    reconcile = seen.reconcile

    async def overloaded(key: JobKey) -> timedelta | None:
        again = await reconcile(key)
        if key == KEY:
            raise Unavailable(429, "TooManyRequests", "busy", retry_after=30)
        return again

    seen.reconcile = overloaded  # type: ignore[method-assign]
    working = Controller(cast("Reconciler", seen), no_jobs, settle_seconds=0, workers=1)
    running = asyncio.create_task(working.run())
    working.enqueue(KEY)
    assert await asyncio.wait_for(seen.keys.get(), timeout=60) == KEY
    # Sooner than the API server will hear of it.
    working.enqueue(KEY)
    working.enqueue_within(other, 0.2)

    assert await asyncio.wait_for(seen.keys.get(), timeout=60) == other
    running.cancel()
    await asyncio.wait({running})


async def test_an_enqueued_job_overtakes_the_backlog_of_a_resync(seen: Seen) -> None:
    backlog = [JobKey("team", f"kept-{number}") for number in range(100)]
    listed = asyncio.Event()

    async def list_jobs() -> list[JobKey]:
        listed.set()
        return backlog

    working = controller(seen, list_jobs)
    running = asyncio.create_task(working.run())
    await listed.wait()
    working.enqueue(KEY)
    order = [await asyncio.wait_for(seen.keys.get(), timeout=60) for _ in range(101)]

    assert set(order) == {KEY, *backlog}
    assert order.index(KEY) < 10
    running.cancel()
    await asyncio.wait({running})
