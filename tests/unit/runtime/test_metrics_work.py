"""Queue, passes and requests are counted as client-go and controller-runtime count theirs.

The queue and the controller are the real ones; time is turned by hand where it is measured.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import timedelta
from typing import cast

import pytest

from tests.fakes.clock import Clock
from tests.unit.scrape import counted, value
from tpu_training_operator.kube.cluster import JobKey
from tpu_training_operator.kube.errors import Conflict, Unavailable
from tpu_training_operator.runtime.controller import Controller
from tpu_training_operator.runtime.metrics import Metrics
from tpu_training_operator.runtime.reconciler import Reconciler
from tpu_training_operator.runtime.work_queue import WorkQueue

KEY = JobKey("default", "digits")


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def metrics(clock: Clock) -> Metrics:
    return Metrics(clock)


@pytest.fixture
async def queue(metrics: Metrics) -> AsyncIterator[WorkQueue[str]]:
    queue: WorkQueue[str] = WorkQueue(0.0, metrics)
    yield queue
    queue.close()


async def is_due(queue: WorkQueue[str], *keys: str) -> None:
    for key in keys:
        queue.add(key)
    # Once round, for the timers.
    await asyncio.sleep(0.001)


async def test_the_depth_counts_due_keys_that_are_not_in_work(metrics: Metrics, queue: WorkQueue[str]) -> None:
    await is_due(queue, "a", "b", "b")
    await queue.get()
    assert value(metrics, "workqueue_depth") == 1
    assert value(metrics, "workqueue_adds_total") == 2


async def test_a_key_added_while_in_work_waits_from_then_on(
    metrics: Metrics, queue: WorkQueue[str], clock: Clock
) -> None:
    await is_due(queue, "a")
    key = await queue.get()
    await is_due(queue, "a")
    clock.now += 3
    assert value(metrics, "workqueue_depth") == 1
    queue.done(key)
    await queue.get()
    assert value(metrics, "workqueue_queue_duration_seconds_sum") == 3


async def test_waiting_and_work_are_measured_separately(metrics: Metrics, queue: WorkQueue[str], clock: Clock) -> None:
    await is_due(queue, "a")
    clock.now += 2
    key = await queue.get()
    clock.now += 5
    queue.done(key)
    assert value(metrics, "workqueue_queue_duration_seconds_sum") == 2
    assert value(metrics, "workqueue_work_duration_seconds_sum") == 5


async def test_unfinished_work_is_measured(metrics: Metrics, queue: WorkQueue[str], clock: Clock) -> None:
    await is_due(queue, "a", "b")
    await queue.get()
    clock.now += 10
    await queue.get()
    clock.now += 1
    assert value(metrics, "workqueue_unfinished_work_seconds") == 12
    assert value(metrics, "workqueue_longest_running_processor_seconds") == 11
    assert value(metrics, "controller_runtime_active_workers") == 2


def changed() -> None:
    raise Conflict(409, "Conflict", "the job has changed")


def overloaded() -> None:
    raise Unavailable(503, "", "no answer")


def bug() -> None:
    raise ZeroDivisionError


PASSES: list[tuple[Callable[[], timedelta | None], dict[str, float], int, int]] = [
    (lambda: None, {"success": 1}, 0, 0),
    (lambda: timedelta(hours=1), {"requeue_after": 1}, 0, 0),
    (changed, {"requeue": 1}, 0, 1),
    (overloaded, {"error": 1}, 1, 1),
    (bug, {"error": 1}, 1, 1),
]


@pytest.mark.parametrize(
    ("ends", "results", "errors", "retries"),
    PASSES,
    ids=["nothing more to do", "due again later", "the job has changed", "no answer", "a bug"],
)
async def test_a_pass_is_counted_by_how_it_ends(
    metrics: Metrics, ends: Callable[[], timedelta | None], results: dict[str, float], errors: int, retries: int
) -> None:
    await one_pass(metrics, ends)
    assert counted(metrics, "controller_runtime_reconcile_total", "result") == results
    assert value(metrics, "controller_runtime_reconcile_errors_total") == errors
    assert value(metrics, "workqueue_retries_total") == retries
    assert value(metrics, "controller_runtime_reconcile_time_seconds_count") == 1


class OnePass:
    """A reconciler for which every pass ends in the same way; `asked` is set by the first."""

    def __init__(self, ends: Callable[[], timedelta | None]) -> None:
        self._ends = ends
        self.asked = asyncio.Event()

    async def reconcile(self, key: JobKey, *, follows: bool = False) -> timedelta | None:
        self.asked.set()
        return self._ends()

    def is_restarting(self, key: JobKey) -> bool:
        return False


async def one_pass(metrics: Metrics, ends: Callable[[], timedelta | None]) -> None:
    async def list_jobs() -> list[JobKey]:
        return [KEY]

    reconciler = OnePass(ends)
    controller = Controller(cast("Reconciler", reconciler), list_jobs, settle_seconds=0.0, workers=1, metrics=metrics)
    running = asyncio.create_task(controller.run())
    # The worker gives the key back before anybody else has a turn: nothing is awaited on the way.
    await reconciler.asked.wait()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
