"""Workers reach the operator that leads through one that waits."""

import asyncio

import pytest

from tests.unit.progress_desk import KEY, SECONDS, Desk
from tests.unit.test_progress_on_the_wire import Wire, served
from tests.unit.tls_probe import LOOPBACK
from tpu_training_operator.runtime.progress import relay as module
from tpu_training_operator.runtime.progress.relay import relay


@pytest.fixture
def desk() -> Desk:
    return Desk()


async def test_a_report_through_another_operator_arrives(desk: Desk) -> None:
    async with served(desk) as direct, relay(0, lambda: f"{LOOPBACK}:{direct.port}", LOOPBACK) as port:
        # The worker checks the leader's certificate: nobody in between can read its token.
        assert await Wire(port, direct.client).post() == 200
    assert desk.hints == [KEY]


@pytest.mark.parametrize("leader", ["", f"{LOOPBACK}:1"], ids=["nobody leads", "the leader has gone"])
async def test_without_a_leader_the_worker_is_told_at_once(leader: str) -> None:
    async with relay(0, lambda: leader, LOOPBACK) as port, asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection(LOOPBACK, port)
        assert await reader.read() == b""
        writer.close()


async def test_the_next_connection_goes_to_the_next_leader(desk: Desk) -> None:
    async with served(desk) as direct:
        leaders = iter(["", f"{LOOPBACK}:{direct.port}"])
        async with relay(0, lambda: next(leaders), LOOPBACK) as port:
            wire = Wire(port, direct.client)
            with pytest.raises(OSError, match=r".*"):
                await wire.post()
            assert await wire.post() == 200


async def test_when_all_places_are_taken_the_oldest_connection_makes_room(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_CONNECTIONS", 2)
    async with served(desk) as direct, relay(0, lambda: f"{LOOPBACK}:{direct.port}", LOOPBACK) as port:
        async with asyncio.timeout(SECONDS):
            idle = [await asyncio.open_connection(LOOPBACK, port) for _ in range(2)]
            assert await Wire(port, direct.client).post() == 200
            assert await idle[0][0].read() == b""
            for _, writer in idle:
                writer.close()
