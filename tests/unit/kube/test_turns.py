"""Whose request is next, and how many are under way. Requests are counted in their order; no time passes.

test_overload.py shows what the limit does to an overloaded API server.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fakes.held_requests import HeldRequests, settle
from tests.unit.virtual_time import run
from tpu_training_operator.kube.turns import LEAST, MOST, Flow, TokenBucket, Turns, WriteLimit, flow

# How many requests are under way


@pytest.mark.parametrize(
    ("status", "under_way", "after"),
    [
        *((status, 64, 16) for status in (0, 429, 503, 504)),
        *((status, 64, 32 + 1 / 32) for status in (200, 201, 403, 404, 409, 422, 500)),
        (201, 15, 32),
    ],
)
def test_an_overload_halves_the_limit_and_any_other_answer_at_the_limit_raises_it(
    status: int, under_way: int, after: float
) -> None:
    assert WriteLimit(32).after_answer(status, number=1, next_number=2, under_way=under_way).limit == after


@given(
    st.floats(LEAST, MOST),
    st.lists(st.tuples(st.sampled_from([0, 200, 429, 500]), st.integers(0, 200), st.integers(0, 70)), max_size=200),
)
@example(MOST, [(200, 1, MOST)])
def test_the_limit_stays_within_its_bounds(first: float, answers: list[tuple[int, int, int]]) -> None:
    limit = WriteLimit(first)
    for following, (status, number, under_way) in enumerate(answers, 200):
        limit = limit.after_answer(status, number, following, under_way)
        assert LEAST <= limit.limit <= MOST


@pytest.fixture
def server() -> HeldRequests:
    return HeldRequests()


@pytest.fixture
def overloaded() -> HeldRequests:
    server = HeldRequests()
    server.turns.limit = WriteLimit(LEAST)
    return server


def a_flow(server: HeldRequests, who: str, count: int) -> tuple[Flow, list["asyncio.Task[None]"]]:
    """Begins so many requests at once."""
    with flow() as begun:
        return begun, [asyncio.create_task(server.send(who)) for _ in range(count)]


# Whose request is next


async def test_a_gang_of_four_does_not_wait_for_one_of_thousands(server: HeldRequests) -> None:
    a_flow(server, "large", 2304)
    await settle()
    a_flow(server, "small", 4)
    await settle()
    assert Counter(server.sent) == {"large": 32, "small": 1}, "all places are taken"
    for _ in range(8):
        await server.answer()
    assert Counter(server.sent)["small"] == 4
    await server.answer_all()


async def test_flows_take_turns_at_the_last_places_of_an_overloaded_server(overloaded: HeldRequests) -> None:
    a_flow(overloaded, "large", 50)
    await settle()
    a_flow(overloaded, "small", 4)
    a_flow(overloaded, "other", 4)
    for _ in range(12):
        await overloaded.answer()
    assert overloaded.sent[4:13] == ["large", "small", "other"] * 3
    await overloaded.answer_all()


async def outside_of_stages(server: HeldRequests) -> None:
    """A status is written, and a report's token reviewed."""
    await server.send("status", "PUT")


async def reads_in_a_stage(server: HeldRequests) -> None:
    with flow():
        await server.send("status", "GET")


@pytest.mark.parametrize("ask", [outside_of_stages, reads_in_a_stage])
async def test_reads_and_statuses_need_no_place(
    overloaded: HeldRequests, ask: Callable[[HeldRequests], Awaitable[None]]
) -> None:
    a_flow(overloaded, "large", 100)
    await settle()
    task = asyncio.ensure_future(ask(overloaded))
    await settle()
    assert overloaded.sent[-1] == "status"
    await overloaded.answer_all()
    await task


def test_a_rate_limit_lets_reads_and_statuses_go_first_and_flows_take_turns() -> None:
    async def story() -> list[str]:
        server = HeldRequests(Turns(TokenBucket(1, 1, asyncio.get_running_loop().time)))
        a_flow(server, "large", 5)
        a_flow(server, "small", 2)
        await settle()
        status = asyncio.create_task(server.send("status", "PUT"))
        await asyncio.sleep(7.5)
        await server.answer_all()
        await status
        return server.sent

    assert run(story()) == ["large", "status", "large", "small", "large", "small", "large", "large"]


async def test_a_request_that_has_to_pause_keeps_its_place_and_then_goes_first(overloaded: HeldRequests) -> None:
    over = asyncio.Event()

    async def refused_once() -> None:
        async with overloaded.turns.turn("POST") as turn:
            turn.record_answer(429)
            await over.wait()
        async with overloaded.turns.turn("POST", again=True):
            overloaded.sent.append("again")

    with flow():
        paused = asyncio.create_task(refused_once())
        await settle()
        later = [asyncio.create_task(overloaded.send("later")) for _ in range(10)]
    await settle()
    assert overloaded.under_way == LEAST - 1, "the place of the one that pauses is not free"
    over.set()
    await settle()
    # Its place went to the next in the queue before it could ask for another.
    await overloaded.answer()
    assert overloaded.sent.index("again") <= LEAST
    await overloaded.answer_all()
    await asyncio.gather(paused, *later)


async def test_a_cancelled_request_gives_its_place_or_its_turn_back(server: HeldRequests) -> None:
    begun, tasks = a_flow(server, "large", 40)
    await settle()
    for task in (*begun.waiting, tasks[0], tasks[1]):
        task.cancel()
    await settle()
    a_flow(server, "other", 2)
    await settle()
    assert server.sent == ["large"] * 32 + ["other"] * 2
    await server.answer_all()


async def test_a_request_that_is_cancelled_while_it_gets_its_turn_passes_it_on(overloaded: HeldRequests) -> None:
    _, tasks = a_flow(overloaded, "large", LEAST + 2)
    await settle()
    # In one step: the answer admits the next one, which is cancelled before it runs.
    overloaded.answer_unsettled()
    await asyncio.sleep(0)
    tasks[LEAST].cancel()
    await settle()
    assert tasks[LEAST].cancelled()
    assert (len(overloaded.sent), overloaded.under_way) == (LEAST + 1, LEAST)
    await overloaded.answer_all()
