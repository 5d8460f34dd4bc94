"""The queue's promises: hints collapse, one key is in one pair of hands, failures wait longer each time.

Time is the event loop's own, and the tests turn it.
"""

import asyncio
from collections.abc import Iterator

import pytest

from tpu_training_operator.runtime.work_queue import WorkQueue

SETTLE = 0.1


class Time:
    """The running loop's clock, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = 1000.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self._now)

    async def pass_by(self, seconds: float) -> None:
        self._now += seconds
        # Once round for the timers that are due, once for those whom they wake, once for good measure of gather.
        for _ in range(3):
            await asyncio.sleep(0)


@pytest.fixture
async def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


@pytest.fixture
def queue() -> Iterator[WorkQueue[str]]:
    queue: WorkQueue[str] = WorkQueue(SETTLE)
    yield queue
    queue.close()


class Worker:
    """Somebody waiting for the next key."""

    def __init__(self, queue: WorkQueue[str]) -> None:
        self._task = asyncio.ensure_future(queue.get())

    @property
    def key(self) -> str | None:
        return self._task.result() if self._task.done() else None

    def leave(self) -> None:
        self._task.cancel()


async def test_an_added_key_is_due_after_the_settle_time(time: Time, queue: WorkQueue[str]) -> None:
    worker = Worker(queue)
    queue.add("a")
    await time.pass_by(SETTLE / 2)
    assert worker.key is None
    await time.pass_by(SETTLE)
    assert worker.key == "a"


async def test_a_key_added_many_times_comes_once(time: Time, queue: WorkQueue[str]) -> None:
    for _ in range(100):
        queue.add("a")
    await time.pass_by(SETTLE * 2)
    queue.add("a")
    await time.pass_by(SETTLE * 2)
    assert await queue.get() == "a"
    queue.done("a")
    another = Worker(queue)
    await time.pass_by(10)
    assert another.key is None
    another.leave()


async def test_adding_a_key_again_and_again_does_not_delay_it(time: Time, queue: WorkQueue[str]) -> None:
    worker = Worker(queue)
    for _ in range(3):
        queue.add("a")
        await time.pass_by(SETTLE / 2)
    assert worker.key == "a"


async def test_keys_come_in_the_order_of_their_arrival(time: Time, queue: WorkQueue[str]) -> None:
    for key in ("b", "a", "c"):
        queue.add(key)
        await time.pass_by(0.001)
    await time.pass_by(SETTLE)
    assert [await queue.get() for _ in range(3)] == ["b", "a", "c"]


async def test_a_key_in_work_is_not_handed_out_again(time: Time, queue: WorkQueue[str]) -> None:
    queue.add("a")
    await time.pass_by(SETTLE * 2)
    assert await queue.get() == "a"
    another = Worker(queue)
    queue.add("a")
    await time.pass_by(SETTLE * 2)
    assert another.key is None
    another.leave()


async def test_a_key_added_while_in_work_comes_again_afterwards(time: Time, queue: WorkQueue[str]) -> None:
    queue.add("a")
    await time.pass_by(SETTLE * 2)
    assert await queue.get() == "a"
    another = Worker(queue)
    queue.add("a")
    await time.pass_by(SETTLE * 2)
    queue.done("a")
    await time.pass_by(0)
    assert another.key == "a"


async def test_several_waiting_workers_get_a_key_each(time: Time, queue: WorkQueue[str]) -> None:
    workers = [Worker(queue) for _ in range(3)]
    for key in ("a", "b", "c"):
        queue.add(key)
    await time.pass_by(SETTLE * 2)
    assert {worker.key for worker in workers} == {"a", "b", "c"}


@pytest.mark.parametrize("background", [False, True])
async def test_a_paused_key_stays_paused_when_it_is_added(time: Time, queue: WorkQueue[str], background: bool) -> None:
    queue.add("a")
    await time.pass_by(SETTLE * 2)
    assert await queue.get() == "a"
    # While it is in work, after its failure, and while it is paused.
    queue.add("a", background=True)
    queue.add("a", background=background)
    queue.retry("a", pause_seconds=30)
    queue.done("a")
    queue.add("a", background=background)
    worker = Worker(queue)
    await time.pass_by(29.9)
    assert worker.key is None
    await time.pass_by(0.2)
    assert worker.key == "a"
    queue.done("a")
    another = Worker(queue)
    queue.add("a", background=background)
    await time.pass_by(SETTLE * 2)
    assert another.key == "a"


async def test_work_that_fails_waits_longer_every_time(time: Time, queue: WorkQueue[str]) -> None:
    waits = []
    for _ in range(14):
        worker = Worker(queue)
        queue.retry("a")
        waited = 0.0
        while worker.key is None:
            await time.pass_by(0.05)
            waited += 0.05
        queue.done("a")
        waits.append(round(waited, 2))
    assert waits[:5] == [0.05, 0.1, 0.2, 0.4, 0.8]
    assert waits[-1] == pytest.approx(60, abs=0.1)


async def test_after_a_success_the_next_failure_is_the_first_again(time: Time, queue: WorkQueue[str]) -> None:
    for _ in range(10):
        queue.retry("a")
    queue.forget("a")
    await time.pass_by(60)
    queue.done(await queue.get())
    worker = Worker(queue)
    queue.retry("a")
    await time.pass_by(0.06)
    assert worker.key == "a"


async def test_the_sooner_of_two_times_counts(time: Time, queue: WorkQueue[str]) -> None:
    worker = Worker(queue)
    queue.add_after("a", 30)
    queue.add("a")
    queue.add_after("a", 60)
    await time.pass_by(SETTLE * 2)
    assert worker.key == "a"


async def taken(queue: WorkQueue[str], number: int) -> list[str]:
    """The next keys, each given back before the next is taken."""
    keys = []
    for _ in range(number):
        keys.append(await queue.get())
        queue.done(keys[-1])
    return keys


async def test_an_added_key_overtakes_the_background(time: Time, queue: WorkQueue[str]) -> None:
    for key in ("a", "b", "c"):
        queue.add(key, background=True)
    queue.add("urgent")
    queue.add("c")
    await time.pass_by(SETTLE * 2)
    assert await taken(queue, 4) == ["urgent", "c", "a", "b"]


async def test_a_hurried_key_overtakes_all_others(time: Time, queue: WorkQueue[str]) -> None:
    queue.add("listed", background=True)
    for key in ("new", "failed, but new", "another"):
        queue.add(key)
    await time.pass_by(SETTLE * 2)
    queue.add("edited", first=True)
    queue.add("failed, but new", first=True)
    await time.pass_by(SETTLE * 2)
    assert await taken(queue, 5) == ["edited", "failed, but new", "new", "another", "listed"]


async def test_a_key_that_was_hurried_once_is_not_hurried_for_ever(time: Time, queue: WorkQueue[str]) -> None:
    queue.add("a", first=True)
    queue.add("a", first=True)
    await time.pass_by(SETTLE * 2)
    queue.add("a", first=True)
    await time.pass_by(SETTLE * 2)
    assert await taken(queue, 1) == ["a"]
    queue.add("b")
    await time.pass_by(SETTLE * 2)
    queue.add("a")
    await time.pass_by(SETTLE * 2)
    assert await taken(queue, 2) == ["b", "a"]


async def test_a_key_hurried_in_work_comes_first_afterwards(time: Time, queue: WorkQueue[str]) -> None:
    queue.add("a")
    await time.pass_by(SETTLE * 2)
    assert await queue.get() == "a"
    queue.add("b")
    queue.add("a", first=True)
    await time.pass_by(SETTLE * 2)
    queue.done("a")
    assert await taken(queue, 2) == ["a", "b"]


async def test_an_endless_stream_of_hurried_keys_does_not_starve_the_others(time: Time, queue: WorkQueue[str]) -> None:
    for key in ("x", "y"):
        queue.add(key)
    for number in range(20):
        queue.add(str(number), first=True)
    await time.pass_by(SETTLE * 2)
    order = await taken(queue, 22)
    assert order.index("x") < 10
    assert order.index("y") < 20


async def test_the_background_never_occupies_all_workers(time: Time, queue: WorkQueue[str]) -> None:
    for key in "abcdefgh":
        queue.add(key, background=True)
    workers = [Worker(queue) for _ in range(5)]
    await time.pass_by(0)
    assert [worker.key for worker in workers] == ["a", "b", "c", None, None]
    queue.done("a")
    await time.pass_by(0)
    assert [worker.key for worker in workers] == ["a", "b", "c", "d", None]
    workers[4].leave()


async def test_an_endless_stream_of_keys_does_not_starve_the_background(time: Time, queue: WorkQueue[str]) -> None:
    queue.add("background", background=True)
    for key in range(20):
        queue.add(str(key))
    await time.pass_by(SETTLE * 2)
    assert "background" in await taken(queue, 10)


async def test_a_key_that_waits_or_is_in_work_does_not_enter_the_background(time: Time, queue: WorkQueue[str]) -> None:
    queue.add("a")
    queue.add("a", background=True)
    await time.pass_by(SETTLE * 2)
    assert await queue.get() == "a"
    queue.add("a", background=True)
    queue.done("a")
    assert await taken(queue, 1) == ["a"]
    worker = Worker(queue)
    await time.pass_by(60)
    assert worker.key is None
    worker.leave()


async def test_a_key_due_much_later_still_enters_the_background(time: Time, queue: WorkQueue[str]) -> None:
    queue.add_after("a", 10**6)
    queue.add("a", background=True)
    assert await taken(queue, 1) == ["a"]
    await time.pass_by(10**6)
    assert await taken(queue, 1) == ["a"]


async def test_a_key_can_have_its_own_settle_time(time: Time, queue: WorkQueue[str]) -> None:
    worker = Worker(queue)
    queue.add("large", settle_seconds=SETTLE * 10)
    await time.pass_by(SETTLE * 9)
    assert worker.key is None
    await time.pass_by(SETTLE * 2)
    assert worker.key == "large"


async def test_a_closed_queue_hands_out_nothing(time: Time, queue: WorkQueue[str]) -> None:
    worker = Worker(queue)
    queue.add("a")
    queue.close()
    await time.pass_by(60)
    assert worker.key is None
    worker.leave()
