"""The queue's promises: hints collapse, one key is in one pair of hands, failures wait longer, and all have their turn.

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

    async def pass_by(self, seconds: float = SETTLE * 2) -> None:
        self._now += seconds
        # One round for the timers that are due, one for the tasks that they wake, and one for what these wake.
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


async def take(queue: WorkQueue[str], most: int = 100) -> list[str]:
    """Takes the keys that are handed out now, as one worker each; they stay in work."""
    workers = [asyncio.ensure_future(queue.get()) for _ in range(most)]
    for _ in range(3):
        await asyncio.sleep(0)
    for worker in workers:
        worker.cancel()
    return [worker.result() for worker in workers if worker.done()]


async def work(queue: WorkQueue[str]) -> list[str]:
    """Takes one key after the other until none is due, as a single worker."""
    keys: list[str] = []
    while len(keys) < 100 and (taken := await take(queue, 1)):
        keys += taken
        queue.done(*taken)
    return keys


@pytest.mark.parametrize(("settle", "longer"), [(SETTLE, 0.0), (SETTLE * 10, SETTLE * 10)])
async def test_hints_collapse_until_the_settle_time_of_the_first_is_over(
    time: Time, queue: WorkQueue[str], settle: float, longer: float
) -> None:
    for _ in range(9):
        queue.add("a", settle_seconds=longer)
        await time.pass_by(settle / 10)
    assert await take(queue) == []
    await time.pass_by(settle / 5)
    queue.add("a")
    await time.pass_by()
    assert await work(queue) == ["a"]


async def test_keys_come_in_the_order_of_their_arrival(time: Time, queue: WorkQueue[str]) -> None:
    for key in ("b", "a", "c"):
        queue.add(key)
        await time.pass_by(0.001)
    await time.pass_by()
    assert await take(queue) == ["b", "a", "c"]


async def test_a_key_in_work_comes_again_only_afterwards(time: Time, queue: WorkQueue[str]) -> None:
    queue.add("a")
    await time.pass_by()
    assert await take(queue) == ["a"]
    queue.add("a")
    await time.pass_by()
    assert await take(queue) == []
    another = asyncio.ensure_future(queue.get())
    await time.pass_by(0)
    queue.done("a")
    await time.pass_by(0)
    assert another.done()


async def test_the_sooner_of_two_times_counts(time: Time, queue: WorkQueue[str]) -> None:
    queue.add_after("a", 30)
    queue.add("a")
    queue.add_after("a", 60)
    await time.pass_by()
    assert await work(queue) == ["a"]
    await time.pass_by(60)
    assert await work(queue) == []


async def test_a_closed_queue_hands_out_nothing(time: Time, queue: WorkQueue[str]) -> None:
    queue.add("a")
    queue.close()
    await time.pass_by(60)
    assert await take(queue) == []


# Failures


async def test_work_that_fails_waits_longer_every_time_until_it_succeeds(time: Time, queue: WorkQueue[str]) -> None:
    for failures in range(14):
        wait = min(0.05 * 2**failures, 60)
        queue.retry("a")
        await time.pass_by(wait * 0.99)
        assert await take(queue) == []
        await time.pass_by(wait * 0.02)
        assert await work(queue) == ["a"]
    queue.forget("a")
    queue.retry("a")
    await time.pass_by(0.06)
    assert await work(queue) == ["a"]


@pytest.mark.parametrize("in_work", [False, True])
@pytest.mark.parametrize("background", [False, True])
async def test_a_paused_key_stays_paused_when_it_is_added(
    time: Time, queue: WorkQueue[str], background: bool, in_work: bool
) -> None:
    """`in_work`: it is also added while it is in work."""
    queue.add("a")
    await time.pass_by()
    assert await take(queue) == ["a"]
    if in_work:
        queue.add("a", background=True)
        queue.add("a", background=background)
    queue.retry("a", pause_seconds=30)
    queue.done("a")
    queue.add("a", background=background)
    await time.pass_by(29.9)
    assert await take(queue) == []
    await time.pass_by(0.2)
    assert await work(queue) == ["a"]
    queue.add("a", background=background)
    await time.pass_by()
    assert await work(queue) == ["a"], "the pause is over"


# Whose turn it is


async def test_hurried_keys_go_before_added_ones_and_these_before_the_background(
    time: Time, queue: WorkQueue[str]
) -> None:
    for key in ("listed", "listed, then added", "new", "failed"):
        queue.add(key, background=key.startswith("listed"))
    queue.add("listed, then added")
    await time.pass_by()
    queue.add("edited", first=True)
    queue.add("failed", first=True)
    await time.pass_by()
    assert await work(queue) == ["edited", "failed", "new", "listed, then added", "listed"]


@pytest.mark.parametrize("hints", [1, 2])
async def test_a_key_is_hurried_once(time: Time, queue: WorkQueue[str], hints: int) -> None:
    for _ in range(hints):
        queue.add("a", first=True)
        await time.pass_by()
    assert await work(queue) == ["a"]
    for key in ("b", "a"):
        queue.add_after(key, 0)
        await time.pass_by()
    assert await work(queue) == ["b", "a"]


async def test_a_hurried_key_whose_work_fails_is_hurried_again(time: Time, queue: WorkQueue[str]) -> None:
    queue.add("a", first=True)
    await time.pass_by()
    assert await take(queue) == ["a"]
    queue.add("b")
    await time.pass_by()
    queue.retry("a")
    queue.done("a")
    await time.pass_by()
    assert await work(queue) == ["a", "b"]


@pytest.mark.parametrize("stream_is_hurried", [False, True])
async def test_no_stream_of_keys_starves_those_behind_it(
    time: Time, queue: WorkQueue[str], stream_is_hurried: bool
) -> None:
    for key in ("x", "y"):
        queue.add(key, background=not stream_is_hurried)
    for number in range(20):
        queue.add(str(number), first=stream_is_hurried)
    await time.pass_by()
    order = await work(queue)
    assert order.index("x") < 10
    assert order.index("y") < 20


async def test_the_background_never_occupies_all_workers(time: Time, queue: WorkQueue[str]) -> None:
    for key in "abcdefgh":
        queue.add(key, background=True)
    assert await take(queue, 5) == ["a", "b", "c"]
    waiting = asyncio.ensure_future(queue.get())
    await time.pass_by(0)
    queue.done("a")
    await time.pass_by(0)
    assert waiting.done()


async def test_only_a_key_that_is_due_much_later_also_enters_the_background(time: Time, queue: WorkQueue[str]) -> None:
    queue.add("a")
    for _ in range(2):
        queue.add("a", background=True)
        await time.pass_by()
    assert await take(queue) == ["a"]
    queue.add("a", background=True)
    queue.done("a")
    assert await work(queue) == ["a"]
    await time.pass_by(60)
    assert await work(queue) == []
    queue.add_after("a", 10**6)
    queue.add("a", background=True)
    assert await work(queue) == ["a"]
    await time.pass_by(10**6)
    assert await work(queue) == ["a"]
