"""Answers that hold for a while: asked for once at a time, and never more of them than there is room for."""

import asyncio

import pytest

from tests.fakes.clock import Clock
from tpu_training_operator.runtime.progress import tokens as module
from tpu_training_operator.runtime.progress.tokens import Cache


class Questions:
    """Counts, and answers with the number of the question."""

    count = 0

    async def __call__(self) -> int:
        self.count += 1
        await asyncio.sleep(0)
        return self.count


async def test_a_caller_that_gives_up_does_not_affect_the_others() -> None:
    gate = asyncio.Event()

    async def ask() -> int:
        await gate.wait()
        return 1

    answers: Cache[int] = Cache(60, Clock())
    first, second = (asyncio.create_task(answers.get("key", ask)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    gate.set()
    assert await second == 1
    assert first.cancelled()


async def test_an_error_goes_to_every_waiting_caller_and_is_forgotten() -> None:
    failing, ask = True, Questions()

    async def unsteady() -> int:
        if failing:
            raise OSError("no route")
        return await ask()

    answers: Cache[int] = Cache(60, Clock())
    results = await asyncio.gather(*(answers.get("key", unsteady) for _ in range(3)), return_exceptions=True)
    assert [str(result) for result in results] == ["no route"] * 3
    failing = False
    assert await answers.get("key", unsteady) == 1


async def test_an_error_without_waiting_callers_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    gate = asyncio.Event()

    async def ask() -> int:
        await gate.wait()
        raise OSError("no route")

    answers: Cache[int] = Cache(60, Clock())
    waiting = asyncio.create_task(answers.get("key", ask))
    await asyncio.sleep(0)
    waiting.cancel()
    gate.set()
    async with asyncio.timeout(10):
        while answers._asking:  # noqa: ASYNC110 - it ends within a few rounds of the loop
            await asyncio.sleep(0)
    assert caplog.records == []


async def test_the_oldest_answers_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_ANSWERS", 3)
    ask = Questions()
    answers: Cache[int] = Cache(60, Clock())
    for key in ("a", "b", "c", "d"):
        await answers.get(key, ask)
    assert [await answers.get(key, ask) for key in ("b", "c", "d", "a")] == [2, 3, 4, 5]
    assert len(answers._known) == 3
