"""The operator's ports: HTTP servers that bound what anyone who reaches them can cost the operator.

A connection counts from accept() until it is closed, so before its TLS handshake costs anything. It carries one
request. A new connection is always accepted: when all places are taken, the address with the most connections loses its
oldest. So a stranger competes with itself, and a kubelet or a worker finds a place.

aiohttp would keep 128 headers of 8 KiB from each connection before any of our code runs, queue 32 such requests behind
the first, and wait forever for a client that does not read. So this module bounds the bytes and the life of a
connection outside of aiohttp.
"""

import asyncio
import gc
import logging
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import cast

from aiohttp import web
from aiohttp.typedefs import Handler

_LONGEST_LINE = 1024
# A worker's token takes some 1.5 KiB.
_LONGEST_HEADER = 4 * 1024
# A service mesh adds twenty.
_MOST_HEADERS = 64
_MOST_HEAD_BYTES = 16 * 1024
# The size of the buffers in the kernel and in aiohttp, before the handler reads.
_BUFFER_BYTES = 16 * 1024
# Further clients wait in the kernel.
_MOST_UNACCEPTED = 1024

# How many connections without a request cause a garbage collection. Each may leave 350 KiB of garbage.
_CONNECTIONS_BETWEEN_COLLECTIONS = 100

_SECONDS_TO_SHAKE_HANDS = 5.0
_SECONDS_TO_ASK = 10.0
_SECONDS_TO_LAST = 30.0
_SECONDS_TO_DRAIN = 1.0
_SECONDS_TO_PART = 2.0
_SECONDS_TO_STOP = 2.0
_ACCEPT_PAUSE_SECONDS = 1.0

log = logging.getLogger(__name__)
# aiohttp logs a traceback for every request that is not HTTP.
_http_log = logging.getLogger(f"{__name__}.http")
_http_log.setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class Bounds:
    """`connections`: the most at once. `body_bytes`: the largest body that is read."""

    connections: int
    body_bytes: int = 0

    @property
    def bytes_of_each(self) -> int:
        """The most bytes of one connection: twice the body, for chunks, and so that a body that is a little too long
        still gets an answer."""
        return _MOST_HEAD_BYTES + 2 * self.body_bytes


@asynccontextmanager
async def serve_bounded(
    app: web.Application, port: int, bounds: Bounds, *, tls: ssl.SSLContext | None = None, host: str | None = None
) -> AsyncIterator[int]:
    """Listens on `host` (None: all addresses) until the block ends; then requests under way have a moment to finish.
    Yields the port; 0 asks for any free one. Raises OSError if the port is taken."""
    app.middlewares.insert(0, _closed_after_the_answer)
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=_http_log,
        # A decompression bomb would pass the limit on bytes.
        auto_decompress=False,
        max_line_size=_LONGEST_LINE,
        max_field_size=_LONGEST_HEADER,
        max_headers=_MOST_HEADERS,
        read_bufsize=_BUFFER_BYTES,
        # It also limits the wait for the first request.
        keepalive_timeout=_SECONDS_TO_ASK,
        lingering_time=_SECONDS_TO_DRAIN,
        shutdown_timeout=_SECONDS_TO_STOP,
        # A handler that outlived its connection would not be counted.
        handler_cancellation=True,
    )
    await runner.setup()
    server = runner.server
    assert server is not None
    acceptor = _Acceptor(server, bounds, tls)
    try:
        with listening_socket(host, port) as listener:
            accepting = asyncio.create_task(acceptor.accept(listener), name=f"port {port}")
            try:
                yield listener.getsockname()[1]
            finally:
                accepting.cancel()
                with suppress(asyncio.CancelledError):
                    await accepting
    finally:
        await runner.cleanup()
        await acceptor.close()


@web.middleware
async def _closed_after_the_answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Closes the connection after the answer: keeping it costs more memory than the next handshake costs time."""
    if request.transport is not None:
        cast("_BoundedConnection", request.transport.get_protocol()).has_asked = True
    try:
        response = await handler(request)
    except web.HTTPException as error:
        error.force_close()
        raise
    response.force_close()
    return response


def listening_socket(host: str | None, port: int) -> socket.socket:
    if host is None and socket.has_dualstack_ipv6():
        listener = socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_MOST_UNACCEPTED
        )
    else:
        listener = socket.create_server((host or "", port), backlog=_MOST_UNACCEPTED)
    listener.setblocking(False)
    # Accepted sockets inherit it. By default the kernel keeps megabytes for each.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    return listener


class _BoundedConnection(asyncio.Protocol):
    """Passes one connection on to aiohttp (`http`), and closes it when it has sent too much or lasted too long. `gone`
    is called when it no longer counts. `has_asked`: it has sent a request."""

    def __init__(
        self, http: asyncio.Protocol, address: str, most_bytes: int, gone: Callable[["_BoundedConnection"], None]
    ) -> None:
        self.address = address
        self.has_asked = False
        self._http = http
        self._left = most_bytes
        self._gone = gone
        self._transport: asyncio.Transport | None = None
        self._handshake: asyncio.Task[None] | None = None
        self._end = asyncio.get_running_loop().call_later(_SECONDS_TO_LAST, self.abort)

    @property
    def has_shaken_hands(self) -> bool:
        return self._transport is not None

    def begin(self, accepted: socket.socket, tls: ssl.SSLContext | None) -> None:
        self._handshake = asyncio.create_task(self._shake_hands(accepted, tls))

    async def _shake_hands(self, accepted: socket.socket, tls: ssl.SSLContext | None) -> None:
        patience = {"ssl_handshake_timeout": _SECONDS_TO_SHAKE_HANDS, "ssl_shutdown_timeout": _SECONDS_TO_PART}
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self, accepted, ssl=tls, **(patience if tls else {})
            )
        except (OSError, asyncio.CancelledError) as error:
            # This is not TLS, the client does not trust us, the handshake took too long, or its place was needed. In
            # asyncio, the traceback keeps the error and buffers of 256 KiB in memory until the next collection.
            error.__traceback__ = None
        finally:
            self._handshake = None
            if self._transport is None:
                self._forget()

    def abort(self) -> None:
        """Closes the connection at once, without waiting for the client."""
        if self._transport is not None:
            self._transport.abort()
        elif self._handshake is not None:
            self._handshake.cancel()
        self._forget()

    def _forget(self) -> None:
        self._end.cancel()
        self._gone(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._http.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            self.abort()
        else:
            self._http.data_received(data)

    def eof_received(self) -> bool | None:
        return self._http.eof_received()

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._http.connection_lost(exc)
        self._forget()


class _Acceptor:
    """The connections of one port, in order of their arrival."""

    def __init__(self, http: web.Server, bounds: Bounds, tls: ssl.SSLContext | None) -> None:
        self._http = http
        self._bounds = bounds
        self._tls = tls
        self._open: dict[_BoundedConnection, None] = {}
        self._without_request = 0

    async def accept(self, listener: socket.socket) -> None:
        """Accepts connections until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, (address, *_) = await loop.sock_accept(listener)
            except OSError as error:
                # For example, this process has no file descriptor left.
                log.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE_SECONDS)
                continue
            self._make_room()
            connection = _BoundedConnection(self._http(), str(address), self._bounds.bytes_of_each, self._forget)
            self._open[connection] = None
            connection.begin(accepted, self._tls)
            # A flood of connections must not starve other tasks.
            await asyncio.sleep(0)

    def _make_room(self) -> None:
        """Closes a connection when all places are taken: the oldest of the address that has the most, preferably one
        that is still in its handshake."""
        if len(self._open) >= self._bounds.connections:
            [(greediest, _)] = Counter(connection.address for connection in self._open).most_common(1)
            candidates = (connection for connection in self._open if connection.address == greediest)
            min(candidates, key=lambda connection: connection.has_shaken_hands).abort()

    def _forget(self, connection: _BoundedConnection) -> None:
        if connection not in self._open:
            return
        del self._open[connection]
        self._without_request += not connection.has_asked
        if self._without_request >= _CONNECTIONS_BETWEEN_COLLECTIONS:
            self._without_request = 0
            # The traceback of aiohttp's error about a malformed request keeps the whole connection in memory.
            gc.collect()

    async def close(self) -> None:
        for connection in list(self._open):
            connection.abort()
        # A cancelled handshake closes its socket.
        await asyncio.sleep(0)
