"""Whose request is next, and how many are under way. The tests count requests in their order; no time passes."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.held_requests import HeldRequests, settle
from tpu_training_operator.kube.turns import LEAST, MOST, Flow, TokenBucket, Turns, WriteLimit, flow

# How many requests are under way: the decision


def test_an_overload_halves_the_places() -> None:
    for status in (0, 429, 503, 504):
        assert WriteLimit(64).after_answer(status, number=1, next_number=2, under_way=64).limit == 32


@pytest.mark.parametrize("status", [200, 201, 403, 404, 409, 422, 500])
def test_any_other_answer_is_no_sign_of_overload(status: int) -> None:
    assert WriteLimit(32).after_answer(status, number=1, next_number=2, under_way=32).limit > 32


def test_requests_that_were_under_way_together_tell_of_one_overload() -> None:
    places = WriteLimit(64)
    for number in range(1, 65):
        places = places.after_answer(429, number, next_number=65, under_way=64)
    assert places.limit == 32
    assert places.after_answer(429, 65, next_number=66, under_way=32).limit == 16, (
        "one that was sent under the new limit"
    )


def test_a_round_of_good_answers_adds_about_one_place() -> None:
    places = WriteLimit(16)
    for number in range(1, 17):
        places = places.after_answer(201, number, next_number=17, under_way=16)
    assert places.limit == pytest.approx(17, abs=0.05)


def test_places_that_nobody_takes_do_not_grow() -> None:
    assert WriteLimit(32).after_answer(201, number=1, next_number=2, under_way=15) == WriteLimit(32)


@given(st.lists(st.tuples(st.sampled_from([0, 200, 429, 500]), st.integers(0, 200), st.integers(0, 70)), max_size=200))
def test_the_places_stay_within_their_bounds(answers: list[tuple[int, int, int]]) -> None:
    places = WriteLimit()
    for following, (status, number, under_way) in enumerate(answers, 200):
        places = places.after_answer(status, number, following, under_way)
        assert LEAST <= places.limit <= MOST


# Whose request is next


@pytest.fixture
def server() -> HeldRequests:
    return HeldRequests()


def a_flow(server: HeldRequests, who: str, count: int) -> tuple[Flow, list["asyncio.Task[None]"]]:
    """So many requests at once."""
    with flow() as begun:
        return begun, [asyncio.create_task(server.send(who)) for _ in range(count)]


async def test_no_more_are_under_way_than_there_are_places(server: HeldRequests) -> None:
    _, tasks = a_flow(server, "large", 100)
    await settle()
    assert server.under_way == 32
    while server.under_way:
        await server.answer()
        assert server.under_way <= server.turns.limit.limit
    assert len(server.sent) == 100
    await asyncio.gather(*tasks)


async def test_a_gang_of_four_does_not_wait_for_one_of_thousands(server: HeldRequests) -> None:
    _, large = a_flow(server, "large", 2304)
    await settle()
    _, small = a_flow(server, "small", 4)
    await settle()
    assert Counter(server.sent) == {"large": 32, "small": 1}, "all places are taken"
    for _ in range(8):
        await server.answer()
    assert Counter(server.sent)["small"] == 4
    await server.answer_all()
    await asyncio.gather(*large, *small)


async def test_a_gang_of_four_is_made_while_the_requests_of_others_are_not_answered(server: HeldRequests) -> None:
    for number in range(8):
        a_flow(server, f"slow-{number}", 100)
    await settle()
    _, small = a_flow(server, "small", 4)
    for _ in range(4):
        await settle()
        await server.answer(position=-1)
    assert all(task.done() for task in small)


async def test_flows_take_turns_at_the_last_places_of_an_overloaded_server(server: HeldRequests) -> None:
    server.turns.limit = WriteLimit(LEAST)
    _, large = a_flow(server, "large", 50)
    await settle()
    _, small = a_flow(server, "small", 4)
    _, other = a_flow(server, "other", 4)
    for _ in range(12):
        await server.answer()
    assert server.sent[4:13] == ["large", "small", "other"] * 3
    await server.answer_all()
    await asyncio.gather(*large, *small, *other)


async def outside_of_stages(server: HeldRequests) -> None:
    """A status is written, and a report's token reviewed."""
    await server.send("status", "PUT")


async def reads_in_a_stage(server: HeldRequests) -> None:
    with flow():
        await server.send("status", "GET")


@pytest.mark.parametrize("ask", [outside_of_stages, reads_in_a_stage])
async def test_reads_and_statuses_need_no_place(
    server: HeldRequests, ask: Callable[[HeldRequests], Awaitable[None]]
) -> None:
    _, tasks = a_flow(server, "large", 100)
    await settle()
    task = asyncio.ensure_future(ask(server))
    await settle()
    assert server.sent[-1] == "status"
    await server.answer_all()
    await asyncio.gather(task, *tasks)


async def test_a_rate_limit_lets_reads_and_statuses_go_first_and_flows_take_turns() -> None:
    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    clock = Clock()
    server = HeldRequests(Turns(TokenBucket(1, 1, clock)))
    tasks = [*a_flow(server, "large", 5)[1], *a_flow(server, "small", 2)[1]]
    await settle()
    tasks.append(asyncio.create_task(server.send("status", "PUT")))
    await settle()
    for _ in range(8):
        clock.now += 1
        # As its alarm does.
        server.turns._admit()
        await settle()
    assert server.sent == ["large", "status", "large", "small", "large", "small", "large", "large"]
    await server.answer_all()
    await asyncio.gather(*tasks)


async def test_a_rate_limit_wakes_those_who_wait() -> None:
    server = HeldRequests(Turns(TokenBucket(1000, 1, asyncio.get_running_loop().time)))
    _, tasks = a_flow(server, "large", 1)
    await settle()
    await server.answer_all()
    # Nothing else happens that could wake it.
    async with asyncio.timeout(60), server.turns.turn("POST"):
        pass
    await asyncio.gather(*tasks)


async def test_a_request_that_has_to_pause_keeps_its_place_and_then_goes_first(server: HeldRequests) -> None:
    server.turns.limit = WriteLimit(LEAST)
    over = asyncio.Event()

    async def refused_once() -> None:
        async with server.turns.turn("POST") as turn:
            turn.record_answer(429)
            await over.wait()
        async with server.turns.turn("POST", again=True):
            server.sent.append("again")

    with flow():
        tasks = [asyncio.create_task(refused_once())]
        await settle()
        tasks += [asyncio.create_task(server.send("later")) for _ in range(10)]
    await settle()
    assert server.under_way == LEAST - 1, "the place of the one that pauses is not free"
    over.set()
    await settle()
    # Its place went to the next in the queue before it could ask for another.
    await server.answer()
    assert server.sent.index("again") <= LEAST
    await server.answer_all()
    await asyncio.gather(*tasks)


async def test_a_cancelled_request_gives_its_place_or_its_turn_back(server: HeldRequests) -> None:
    begun, tasks = a_flow(server, "large", 40)
    await settle()
    assert len(begun.waiting) == 8
    for task in (*begun.waiting, tasks[0], tasks[1]):
        task.cancel()
    await settle()
    _, others = a_flow(server, "other", 2)
    await settle()
    assert server.sent == ["large"] * 32 + ["other"] * 2
    await server.answer_all()
    await asyncio.gather(*others)
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks)


async def test_a_request_that_is_cancelled_while_it_gets_its_turn_passes_it_on(server: HeldRequests) -> None:
    server.turns.limit = WriteLimit(LEAST)
    begun, tasks = a_flow(server, "large", LEAST + 2)
    await settle()
    next_ = tasks[LEAST]
    assert next_ in begun.waiting
    # In one step: the answer admits the next one, which is cancelled before it runs.
    server.answer_unsettled()
    await asyncio.sleep(0)
    next_.cancel()
    await settle()
    assert next_.cancelled()
    assert (len(server.sent), server.under_way) == (LEAST + 1, LEAST)
    await server.answer_all()
    await asyncio.gather(*tasks, return_exceptions=True)
