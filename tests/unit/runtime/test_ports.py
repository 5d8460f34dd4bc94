"""What a connection to one of the operator's ports may do, and what becomes of it then."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from tests.unit.progress_desk import SECONDS, until
from tests.unit.tls_probe import LOOPBACK
from tpu_training_operator.runtime import ports
from tpu_training_operator.runtime.ports import Bounds, serve_bounded

GET = b"GET / HTTP/1.1\r\nHost: operator\r\n"
WHOLE = GET + b"\r\n"


class Counter:
    """Answers "well", to each after `gate` is open. `under_way`: handlers that have not ended."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = self.under_way = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.asked += 1
        self.under_way += 1
        try:
            await self.gate.wait()
            return web.Response(text="well" + await request.text())
        finally:
            self.under_way -= 1


@pytest.fixture
async def counter() -> Counter:
    return Counter()


@asynccontextmanager
async def served(counter: Counter, connections: int = 8, body_bytes: int = 0) -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_route("*", "/", counter.answer)
    async with serve_bounded(app, 0, Bounds(connections, body_bytes), host=LOOPBACK) as port:
        yield port


async def said(port: int, text: bytes) -> bytes:
    """What is answered until the server hangs up."""
    async with asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection(LOOPBACK, port)
        writer.write(text)
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.transport.abort()


async def test_a_connection_carries_one_request(counter: Counter) -> None:
    async with served(counter) as port:
        answer = await said(port, WHOLE + WHOLE)
    assert answer.count(b"HTTP/1.1 200 OK") == 1
    assert answer.endswith(b"well")
    assert counter.asked == 1


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (GET + b"x: " + b"y" * 4093 + b"\r\n\r\n", 200),
        (GET + b"x: " + b"y" * 4097 + b"\r\n\r\n", 400),
        (b"GET /?" + b"y" * 1000 + b" HTTP/1.1\r\nHost: operator\r\n\r\n", 200),
        (b"GET /?" + b"y" * 1030 + b" HTTP/1.1\r\n\r\n", 400),
        (GET + b"a: b\r\n" * 60 + b"\r\n", 200),
        (GET + b"a: b\r\n" * 70 + b"\r\n", 400),
    ],
    ids=["header", "too long a header", "line", "too long a line", "headers", "too many headers"],
)
async def test_the_head_of_a_request_is_bounded(counter: Counter, text: bytes, status: int) -> None:
    async with served(counter) as port:
        answer = await said(port, text)
    assert int(answer.split()[1]) == status


async def test_who_sends_more_than_a_request_takes_is_cut_off(counter: Counter) -> None:
    counter.gate.clear()
    async with served(counter) as port:
        assert await said(port, WHOLE + b"z" * 20_000) == b""
        await until(lambda: counter.under_way == 0)


@pytest.mark.parametrize("beginning", [b"", GET], ids=["nothing", "half a head"])
async def test_who_does_not_ask_is_cut_off(counter: Counter, monkeypatch: pytest.MonkeyPatch, beginning: bytes) -> None:
    monkeypatch.setattr(ports, "_SECONDS_TO_ASK", 0.05)
    async with served(counter) as port:
        assert await said(port, beginning) == b""


async def test_a_connection_does_not_last_and_its_handler_ends_with_it(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "_SECONDS_TO_LAST", 0.05)
    counter.gate.clear()
    async with served(counter) as port:
        assert await said(port, WHOLE) == b""
        await until(lambda: counter.under_way == 0)
    assert counter.asked == 1


async def test_a_new_connection_takes_the_place_of_the_oldest_of_the_greediest_address(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_SECONDS_TO_ASK", "_SECONDS_TO_LAST"):
        monkeypatch.setattr(ports, limit, 10 * SECONDS)
    async with served(counter, connections=3) as port, asyncio.timeout(SECONDS):
        worker = await asyncio.open_connection(LOOPBACK, port)
        stranger = [await asyncio.open_connection(LOOPBACK, port, local_addr=("127.0.0.66", 0)) for _ in range(5)]
        for reader, _ in stranger[:3]:
            assert await reader.read() == b""
        for reader, writer in (worker, *stranger[3:]):
            writer.write(WHOLE)
            assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
        for _, opened in (worker, *stranger):
            opened.transport.abort()
