"""HTTP/1.1 over connections that stay open: as much of it as an API server speaks.

The operator sends fourteen requests for a job of four hosts, and needs a seventh less of the processor for it than with
aiohttp. Only the API server is asked, so nothing here follows redirects or proxies, keeps cookies, or decompresses.
"""

import asyncio
import math
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote, urlencode, urlsplit

T = TypeVar("T")

# Servers and load balancers keep an idle connection for longer.
_IDLE_SECONDS = 15.0
_LONGEST_PIECE = 2**16
# In bytes. Twice as much of a body is read ahead.
_LONGEST_HEAD = 2**17
_SAFE_IN_PATHS = "/:@!$&'()*+,;=~"
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class BadAnswer(ConnectionError):
    """The connection ended before the answer did, or the answer is not HTTP."""


@dataclass(frozen=True)
class TimeLimits:
    """Seconds for connecting, for the whole request, and for each wait for data; None: any time."""

    connect: float
    total: float | None = None
    silence: float | None = None


class Answer:
    """An answer to a request. `headers`: their names are in lower case."""

    def __init__(self, method: str, path: str, reader: asyncio.StreamReader, silence: float | None) -> None:
        self.method = method
        self.path = path
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.leaves_connection_open = False
        """Whether it has been read to its end, and another request may follow."""
        self._reader = reader
        self._silence = silence

    async def read_head(self) -> None:
        try:
            # Before its answer a server may send others, with 1xx.
            while self.status < 200:
                head = await self._in_time(self._reader.readuntil(b"\r\n\r\n"))
                first, *lines = head.decode("latin-1").split("\r\n")
                protocol, status, *_ = first.split(" ")
                if not protocol.startswith("HTTP/1."):
                    raise BadAnswer(f"answered with no HTTP: {first!r}")
                pairs = (line.partition(":") for line in lines)
                self.status, self.headers = int(status), {name.lower(): value.strip() for name, _, value in pairs}
        except asyncio.IncompleteReadError as error:
            raise BadAnswer("the server closed the connection") from error
        except (asyncio.LimitOverrunError, ValueError) as error:
            raise BadAnswer(f"answered with no HTTP: {error}") from error

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields the body in pieces of any length."""
        is_chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        length = "0" if self.status in (204, 304) else self.headers.get("content-length", "")
        left = await self._chunk_size() if is_chunked else int(length) if length.isdigit() else math.inf
        while left:
            piece = await self._in_time(self._reader.read(int(min(left, _LONGEST_PIECE))))
            if not piece and left == math.inf:
                # Without a length, the body ends with the connection.
                return
            if not piece:
                raise BadAnswer("the server closed the connection within its answer")
            left -= len(piece)
            yield piece
            if is_chunked and not left:
                await self._line()
                left = await self._chunk_size()
        while is_chunked and await self._line():
            pass
        self.leaves_connection_open = self.headers.get("connection", "").lower() != "close"

    async def _chunk_size(self) -> int:
        size = (await self._line()).partition(b";")[0]
        try:
            return int(size, 16)
        except ValueError:
            raise BadAnswer(f"the server closed the connection within its answer, or sent no chunk: {size!r}") from None

    async def _line(self) -> bytes:
        try:
            return (await self._in_time(self._reader.readline())).strip()
        except ValueError as error:
            raise BadAnswer(f"answered with no HTTP: {error}") from error

    async def _in_time(self, data: Awaitable[T]) -> T:
        if self._silence is None:
            return await data
        async with asyncio.timeout(self._silence):
            return await data


class Connections:
    """Connections to one server, which may have a path. `tls`: False if its certificate need not be right. `most`: how
    many requests may be under way; 0: any number."""

    def __init__(self, server: str, tls: ssl.SSLContext | bool, most: int) -> None:
        url = urlsplit(server)
        self._host, self._port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
        self._tls = None if url.scheme != "https" else tls if isinstance(tls, ssl.SSLContext) else _trust_all()
        self._folder = url.path.rstrip("/")
        self._host_line = f"Host: {url.netloc.rpartition('@')[2]}"
        self._places = asyncio.Semaphore(most) if most else None
        # With the time since when each is idle, the oldest first.
        self._idle: deque[tuple[float, _Streams]] = deque()

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        *,
        data: bytes | None,
        query: Mapping[str, str] | None,
        headers: Mapping[str, str],
        limits: TimeLimits,
    ) -> AsyncIterator[Answer]:
        """Yields the answer before its body is read. Raises OSError, of which TimeoutError and BadAnswer are kinds."""
        head = self._head(method, path, query, headers, data)
        async with asyncio.timeout(limits.total), self._places or nullcontext():
            reader, writer = self._take_idle() or await self._open(limits.connect)
            answer = Answer(method, path, reader, limits.silence)
            try:
                writer.write(head + (data or b""))
                await answer.read_head()
                yield answer
            finally:
                if answer.leaves_connection_open:
                    self._idle.append((time.monotonic(), (reader, writer)))
                else:
                    writer.transport.abort()

    async def close(self) -> None:
        for _, (_, writer) in self._idle:
            writer.transport.abort()
        # The transports close their sockets in the loop's next round.
        await asyncio.sleep(0)

    def _head(
        self, method: str, path: str, query: Mapping[str, str] | None, headers: Mapping[str, str], data: bytes | None
    ) -> bytes:
        target = self._folder + quote(path, _SAFE_IN_PATHS) + (f"?{urlencode(query)}" if query else "")
        lines = [
            f"{method} {target} HTTP/1.1",
            self._host_line,
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        if data is not None:
            lines.append(f"Content-Length: {len(data)}")
        if any("\n" in line or "\r" in line for line in lines):
            raise ValueError("a header has several lines")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def _take_idle(self) -> _Streams | None:
        oldest = time.monotonic() - _IDLE_SECONDS
        while self._idle and self._idle[0][0] < oldest:
            _, (_, writer) = self._idle.popleft()
            writer.transport.abort()
        while self._idle:
            _, (reader, writer) = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.transport.abort()
        return None

    async def _open(self, seconds: float) -> _Streams:
        async with asyncio.timeout(seconds):
            return await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=_LONGEST_HEAD)


def _trust_all() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
