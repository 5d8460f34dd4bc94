"""HTTP/1.1 byte by byte: what servers may send, and which connections are used again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from tpu_training_operator.kube import connections
from tpu_training_operator.kube.connections import BadAnswer, Connections, TimeLimits

PATIENT = TimeLimits(connect=5.0, total=5.0)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@dataclass
class Script:
    """A server that sends one of `answers` for each request, and closes the connection after None. `heads`: the
    requests, with the number of their connection."""

    answers: list[bytes | None]
    url: str = ""
    heads: list[tuple[int, str]] = field(default_factory=list)
    connections: int = 0

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        try:
            while self.answers:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((line for line in head.split("\r\n") if line.startswith("Content-Length: ")), ": 0")
                body = (await reader.readexactly(int(length.split(": ")[1]))).decode()
                self.heads.append((number, head + body))
                if (answer := self.answers.pop(0)) is not None:
                    writer.write(answer)
                if self.answers and self.answers[0] is None:
                    self.answers.pop(0)
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(*answers: bytes | None, path: str = "") -> AsyncIterator[tuple[Script, Connections]]:
    script = Script(list(answers))
    async with await asyncio.start_server(script.talk, "127.0.0.1", 0) as server:
        script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{path}"
        client = Connections(script.url, tls=False, most=4)
        yield script, client
        await client.close()


async def ask(
    client: Connections, *, path: str = "/api", data: bytes | None = None, limits: TimeLimits = PATIENT
) -> tuple[int, bytes]:
    headers = {"Accept": "application/json"}
    query = {"labelSelector": "job=a b,c", "limit": "5"}
    async with client.request(
        "GET" if data is None else "POST", path, data=data, query=query, headers=headers, limits=limits
    ) as answer:
        return answer.status, b"".join([piece async for piece in answer.pieces()])


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (OK, b"ok"),
        (b"HTTP/1.1 200\r\ncontent-length:  2 \r\n\r\nok", b"ok"),
        (
            CHUNKED + b"1\r\no\r\nA;x=1\r\nk123456789\r\n0\r\n\r\n",
            b"ok123456789",
        ),
        (CHUNKED + b"1\r\no\r\n0\r\nTrailer: x\r\n\r\n", b"o"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"ok"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
    ],
    ids=["length", "no reason", "chunks", "trailer", "continue", "no content", "empty"],
)
async def test_an_answer_is_read_to_its_end_and_its_connection_used_again(answer: bytes, body: bytes) -> None:
    async with serving(answer, OK) as (script, client):
        assert (await ask(client))[1] == body
        assert await ask(client) == (200, b"ok")
        assert [number for number, _ in script.heads] == [1, 1]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 2\r\n\r\nok",
        # Without a length, the end of the connection is the end of the answer.
        b"HTTP/1.1 200 OK\r\n\r\nok",
    ],
    ids=["said so", "no length"],
)
async def test_a_connection_that_the_server_closes_is_not_used_again(answer: bytes) -> None:
    async with serving(answer, None, OK) as (script, client):
        assert [await ask(client), await ask(client)] == [(200, b"ok")] * 2
        assert [number for number, _ in script.heads] == [1, 2]


async def test_a_connection_that_was_closed_while_idle_is_not_used_again() -> None:
    async with serving(OK, None, OK) as (script, client):
        await ask(client)
        [(_, (reader, _))] = client._idle
        assert await reader.read() == b""
        assert await ask(client) == (200, b"ok")
        assert script.connections == 2


async def test_a_connection_that_was_idle_for_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_IDLE_SECONDS", -1.0)
    async with serving(OK, OK) as (script, client):
        assert [await ask(client), await ask(client)] == [(200, b"ok")] * 2
        assert script.connections == 2


async def test_a_connection_whose_answer_was_not_read_is_not_used_again() -> None:
    async with serving(OK, OK) as (script, client):
        async with client.request("GET", "/", data=None, query=None, headers={}, limits=TimeLimits(5.0)) as answer:
            assert answer.status == 200
        assert await ask(client) == (200, b"ok")
        assert script.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok",
        CHUNKED + b"5\r\nok",
        CHUNKED + b"2\r\nok\r\n",
        CHUNKED + b"many\r\nok\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 fine\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x" * 2**18 + b"\r\n\r\n",
    ],
    ids=["nothing", "head", "length", "chunk", "last chunk", "no chunk", "no HTTP", "no status", "endless head"],
)
async def test_an_answer_that_is_cut_off_or_no_http_is_an_error(answer: bytes) -> None:
    async with serving(answer, None) as (_, client):
        with pytest.raises(BadAnswer):
            await ask(client)


@pytest.mark.parametrize(
    "limits", [TimeLimits(5.0, total=0.05), TimeLimits(5.0, silence=0.05)], ids=["total", "silence"]
)
@pytest.mark.parametrize("answer", [b"", OK[:-1]], ids=["no answer", "half an answer"])
async def test_a_silent_server_is_not_awaited_for_ever(answer: bytes, limits: TimeLimits) -> None:
    async with serving(answer, OK) as (_, client):
        with pytest.raises(TimeoutError):
            await ask(client, limits=limits)


async def test_a_request_has_what_a_server_needs() -> None:
    async with serving(OK, OK, path="/k8s/clusters/c-1/") as (script, client):
        await ask(client, path="/api/v1/pods/a b")
        await ask(client, data=b"{}")
    host = script.url.removeprefix("http://").partition("/")[0]
    assert [head for _, head in script.heads] == [
        "GET /k8s/clusters/c-1/api/v1/pods/a%20b?labelSelector=job%3Da+b%2Cc&limit=5 HTTP/1.1\r\n"
        f"Host: {host}\r\nAccept: application/json\r\n\r\n",
        "POST /k8s/clusters/c-1/api?labelSelector=job%3Da+b%2Cc&limit=5 HTTP/1.1\r\n"
        f"Host: {host}\r\nAccept: application/json\r\nContent-Length: 2\r\n\r\n{{}}",
    ]


async def test_a_header_cannot_smuggle_another_one() -> None:
    client = Connections("http://127.0.0.1:1", tls=False, most=1)
    headers = {"Authorization": "Bearer x\r\nImpersonate-User: admin"}
    with pytest.raises(ValueError, match="several lines"):
        async with client.request("GET", "/", data=None, query=None, headers=headers, limits=TimeLimits(1.0)):
            pass


async def test_no_more_requests_are_under_way_than_there_may_be() -> None:
    async with serving(*[OK] * 12) as (script, client):
        assert await asyncio.gather(*(ask(client) for _ in range(12))) == [(200, b"ok")] * 12
        assert script.connections <= 4
