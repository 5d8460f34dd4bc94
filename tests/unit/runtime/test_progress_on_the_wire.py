"""The progress service on its port: TLS, sockets, and those who misuse them."""

import asyncio
import gzip
import json
import ssl
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime

import aiohttp
import pytest

from tests.unit.progress_desk import GOOD, KEY, PROGRESS, SECONDS, Desk, until
from tests.unit.tls_probe import LOOPBACK, trusting
from tpu_contract.protocol import REPORT_LIMIT
from tpu_training_operator.runtime import ports
from tpu_training_operator.runtime.progress import server as module
from tpu_training_operator.runtime.progress.pki import new_authority, server_tls
from tpu_training_operator.runtime.progress.server import serve

SERVICE_HOST = "operator.tpu-system.svc"


@pytest.fixture
def desk() -> Desk:
    return Desk()


class Wire:
    """The service behind TLS on a port of its own, and connections to it."""

    def __init__(self, port: int, client: ssl.SSLContext) -> None:
        self.port = port
        self.client = client

    async def open(self, frm: str = LOOPBACK) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection from the address `frm` of this machine's loopback."""
        return await asyncio.open_connection(
            LOOPBACK, self.port, ssl=self.client, server_hostname=SERVICE_HOST, local_addr=(frm, 0)
        )

    async def say(self, text: bytes, frm: str = LOOPBACK) -> bytes:
        """What is answered until the server hangs up."""
        async with asyncio.timeout(SECONDS):
            reader, writer = await self.open(frm)
            writer.write(text)
            answer = await reader.read()
            writer.close()
            return answer

    async def post(self, token: str = "token") -> int:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session:
            url = f"https://{LOOPBACK}:{self.port}{PROGRESS}"
            async with session.post(url, json=GOOD, ssl=self.client, server_hostname=SERVICE_HOST) as response:
                return response.status


@asynccontextmanager
async def served(desk: Desk) -> AsyncIterator[Wire]:
    authority = new_authority("progress", datetime.now(UTC))
    async with (
        server_tls(authority, (SERVICE_HOST,), lambda: datetime.now(UTC)) as tls,
        serve(desk.service, 0, tls) as port,
    ):
        yield Wire(port, trusting(authority))


def request(*lines: str, body: bytes = b"") -> bytes:
    head = (f"POST {PROGRESS} HTTP/1.1", "Host: operator", "Authorization: Bearer token", *lines)
    return "\r\n".join((*head, "", "")).encode() + body


async def test_a_report_is_taken_over_tls_and_the_port_is_free_afterwards(desk: Desk) -> None:
    async with served(desk) as wire:
        assert await wire.post() == 200
    assert desk.hints == [KEY]
    with pytest.raises(ConnectionRefusedError):
        await wire.open()


async def test_bytes_that_are_not_tls_or_http_are_not_logged(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    async with served(desk) as wire:
        reader, writer = await asyncio.open_connection(LOOPBACK, wire.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert b"HTTP" not in await reader.read()
        writer.close()
        for garbage in (b"\x00" * 100, b"hello\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", request("x: " + "y" * 20_000)):
            assert b"400 Bad Request" in await wire.say(garbage + b"\r\n\r\n")
        assert await wire.post() == 200
    assert caplog.records == []


async def test_a_token_that_is_not_text_is_401(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    async with served(desk) as wire:
        said = request("Connection: close", "Content-Length: 0").replace(b"Bearer token", b"Bearer t\xf6ken")
        answer = await wire.say(said)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert caplog.records == []


async def test_a_worker_that_does_not_trust_the_server_affects_nobody_else(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(desk) as wire:
        stranger = Wire(wire.port, trusting(new_authority("progress", datetime.now(UTC))))
        with pytest.raises(ssl.SSLCertVerificationError):
            await stranger.open()
        assert await wire.post() == 200
    assert caplog.records == []


async def test_a_connection_without_a_handshake_is_closed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ports, "_SECONDS_TO_SHAKE_HANDS", 0.05)
    async with served(desk) as wire, asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection(LOOPBACK, wire.port)
        assert await reader.read() == b""
        writer.close()
    assert caplog.records == []


async def test_a_body_that_does_not_arrive_is_408(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS_TO_READ", 0.05)
    monkeypatch.setattr(ports, "_SECONDS_TO_DRAIN", 0.05)
    async with served(desk) as wire:
        answer = await wire.say(request("Content-Length: 10", body=b"half"))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive within" in answer


async def test_a_truncated_body_affects_nobody_else(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    async with served(desk) as wire:
        _, writer = await wire.open()
        writer.write(request("Content-Length: 10", body=b"half"))
        await until(lambda: desk.cluster.count()["get TPUTrainingJob"] == 1)
        writer.transport.abort()
        _, writer = await wire.open()
        writer.write(request("Transfer-Encoding: chunked", body=b"no chunk\r\n"))
        assert await wire.post() == 200
        writer.transport.abort()
    assert desk.inbox.report is not None
    assert caplog.records == []


async def test_a_compressed_body_is_not_decompressed(desk: Desk) -> None:
    bomb = gzip.compress(b" " * 50_000_000 + json.dumps(GOOD).encode())
    assert len(bomb) < REPORT_LIMIT
    async with served(desk) as wire:
        answer = await wire.say(
            request(f"Content-Length: {len(bomb)}", "Content-Encoding: gzip", "Connection: close", body=bomb)
        )
    assert answer.startswith(b"HTTP/1.1 400 ")


async def test_connections_without_a_handshake_keep_no_report_out(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CONNECTIONS", 4)
    for limit in ("_SECONDS_TO_SHAKE_HANDS", "_SECONDS_TO_ASK", "_SECONDS_TO_LAST"):
        monkeypatch.setattr(ports, limit, 10 * SECONDS)
    async with served(desk) as wire, asyncio.timeout(SECONDS):
        reader, writer = await wire.open()
        silent = [await asyncio.open_connection(LOOPBACK, wire.port) for _ in range(20)]
        assert await wire.post() == 200
        for closed, _ in silent[:16]:
            assert await closed.read() == b""
        writer.write(request("Content-Length: 0"))
        assert b" 400 " in await reader.readline()
        for _, opened in (*silent, (reader, writer)):
            opened.transport.abort()


@pytest.mark.parametrize("addresses", [1, 5])
async def test_a_flood_of_invalid_tokens_keeps_no_worker_out(desk: Desk, addresses: int) -> None:
    """Each address keeps as many connections going as it may, all with tokens that nobody has seen before."""
    heard: list[int] = []

    async def flood(wire: Wire, address: str) -> None:
        while True:
            made_up = request("Content-Length: 0").replace(b"Bearer token", b"Bearer " + uuid.uuid4().hex.encode())
            with suppress(OSError):
                await wire.say(made_up, frm=address)

    async with served(desk) as wire:
        strangers = [
            asyncio.create_task(flood(wire, f"127.0.1.{1 + number % addresses}")) for number in range(8 * addresses)
        ]
        await until(lambda: desk.cluster.count()["create TokenReview"] >= 20 * addresses)
        for number in range(5):
            desk.cluster.reviews[str(number)] = desk.cluster.reviews["token"]
            heard.append(await wire.post(str(number)))
            desk.seconds += 5
        for stranger in strangers:
            stranger.cancel()
        await asyncio.gather(*strangers, return_exceptions=True)
    assert heard == [200] * 5
    assert desk.inbox.last_loss is None
