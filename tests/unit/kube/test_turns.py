"""When a request may be sent. Requests are counted in their order; no time passes.

test_overload.py shows what an overloaded API server gets.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from tests.fakes.held_requests import HeldRequests, settle
from tests.unit.virtual_time import run
from tpu_training_operator.kube.turns import PLACES, Flow, TokenBucket, Turns, flow

FEW = 4


@pytest.fixture
def server() -> HeldRequests:
    return HeldRequests()


@pytest.fixture
def narrow() -> HeldRequests:
    return HeldRequests(Turns(places=FEW))


def a_flow(server: HeldRequests, who: str, count: int) -> tuple[Flow, list["asyncio.Task[None]"]]:
    """Begins so many requests at once."""
    with flow() as begun:
        return begun, [asyncio.create_task(server.send(who)) for _ in range(count)]


async def test_a_gang_of_four_does_not_wait_for_one_of_thousands(server: HeldRequests) -> None:
    """While the large gang's namespace has an admission webhook that does not answer, say."""
    a_flow(server, "large", 2304)
    await settle()
    assert server.sent == ["large"] * (PLACES + 1)
    a_flow(server, "small", 1)
    await settle()
    assert server.sent[-1] == "small"
    await server.answer_all()


async def test_flows_wait_for_places_in_the_order_in_which_they_ask(narrow: HeldRequests) -> None:
    a_flow(narrow, "large", 7)
    await settle()
    a_flow(narrow, "small", 3)
    await settle()
    assert narrow.sent == ["large"] * (FEW + 1) + ["small"]
    await narrow.answer_all()
    assert narrow.sent[FEW + 2 :] == ["large", "large", "small", "small"]


async def outside_of_flows(server: HeldRequests) -> None:
    """A status is written, and a report's token reviewed."""
    await server.send("status", "PUT")


async def reads_in_a_flow(server: HeldRequests) -> None:
    with flow():
        await server.send("status", "GET")


@pytest.mark.parametrize("ask", [outside_of_flows, reads_in_a_flow])
async def test_reads_and_statuses_need_no_place(
    narrow: HeldRequests, ask: Callable[[HeldRequests], Awaitable[None]]
) -> None:
    a_flow(narrow, "large", 100)
    await settle()
    task = asyncio.ensure_future(ask(narrow))
    await settle()
    assert narrow.sent[-1] == "status"
    await narrow.answer_all()
    await task


def test_a_rate_limit_lets_reads_and_statuses_go_first() -> None:
    async def story() -> list[str]:
        server = HeldRequests(Turns(TokenBucket(1, 1, asyncio.get_running_loop().time)))
        a_flow(server, "large", 5)
        await settle()
        status = asyncio.create_task(server.send("status", "PUT"))
        await asyncio.sleep(7.5)
        await server.answer_all()
        await status
        return server.sent

    assert run(story()) == ["large", "status", "large", "large", "large", "large"]


async def test_a_cancelled_request_gives_its_place_or_its_turn_back(server: HeldRequests) -> None:
    begun, tasks = a_flow(server, "large", 40)
    await settle()
    # The first one has the flow's own place.
    for task in (*begun.waiting, tasks[1], tasks[2]):
        task.cancel()
    await settle()
    a_flow(server, "other", 4)
    await settle()
    assert Counter(server.sent) == {"large": PLACES + 1, "other": 3}
    await server.answer_all()


async def test_a_request_that_is_cancelled_while_it_gets_its_turn_passes_it_on(narrow: HeldRequests) -> None:
    _, tasks = a_flow(narrow, "large", FEW + 3)
    await settle()
    # In one step: the answer to the second one admits the next, which is cancelled before it runs.
    narrow.answer_unsettled(position=1)
    await asyncio.sleep(0)
    tasks[FEW + 1].cancel()
    await settle()
    assert tasks[FEW + 1].cancelled()
    assert (len(narrow.sent), narrow.under_way) == (FEW + 2, FEW + 1)
    await narrow.answer_all()
