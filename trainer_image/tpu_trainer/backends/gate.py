"""The gate in front of the gang's store: nobody gets to the store who does not know the gang's key.

TCPStore has no authentication, and keeps whatever it is sent. So it listens on loopback only. The gate listens where
the other hosts look for the store, and joins a connection to it once both sides have proved that they know the key
(HMAC of fresh random numbers). TCPStore's client cannot do that, so on the other side stands a porter: a port on
loopback whose connections it takes through the gate.

It keeps strangers out and does not encrypt: whoever can read or change packets between the hosts is not kept out.
One thread with one event loop serves all connections of a process. Used by `rendezvous`.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import Any

MOST_WAITING = 1024
"""Connections that may be proving themselves at once. Beyond that the oldest goes, so that strangers who say nothing
cannot keep the others out; a host that is sent away comes again."""

PROOF_SECONDS = 10.0
"""How long that may take."""

_MAGIC = b"tpugang1"
_NONCE = 32
_PROOF = 32
_BACKLOG = 4096


class StrangerError(OSError):
    """What answers is no gate of this gang."""


def key_of(gang: str) -> bytes:
    """`gang`: the job's uid, which nobody learns without rights in the job's namespace, and the attempt."""
    return sha256(f"tpu-trainer gang {gang}".encode()).digest()


class _Keeper:
    """A listening socket, served by a thread of its own until `close`."""

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._waiting: dict[asyncio.Task[None], None] = {}
        self._ends: set[_End] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cuts all connections. From another thread than the keeper's own."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _welcome(self, guest: socket.socket) -> None:
        """Joins the connection to what it came for, or raises OSError or TimeoutError."""
        raise NotImplementedError

    def _submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._accepting = self._loop.create_task(self._accept())
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._clear_up())
            self._loop.close()

    async def _clear_up(self) -> None:
        self._listener.close()
        tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for end in self._ends.copy():
            end.cut()
        # Cut transports close their sockets in the loop's next round.
        await asyncio.sleep(0)

    async def _accept(self) -> None:
        while True:
            try:
                guest, _ = await self._loop.sock_accept(self._listener)
            except OSError:
                # Out of file descriptors, or a guest that has left already.
                self._dismiss_oldest()
                await asyncio.sleep(0.05)
                continue
            guest.setblocking(False)
            if len(self._waiting) >= MOST_WAITING:
                self._dismiss_oldest()
            task = self._loop.create_task(self._receive(guest))
            self._waiting[task] = None
            task.add_done_callback(partial(self._received, guest))

    async def _receive(self, guest: socket.socket) -> None:
        async with asyncio.timeout(PROOF_SECONDS):
            await self._welcome(guest)

    def _received(self, guest: socket.socket, task: asyncio.Task[None]) -> None:
        self._waiting.pop(task, None)
        # One that was dismissed before its first line ran has no other place to be closed in.
        if task.cancelled() or task.exception() is not None:
            guest.close()

    def _dismiss_oldest(self) -> None:
        oldest = next(iter(self._waiting), None)
        if oldest is not None:
            del self._waiting[oldest]
            oldest.cancel()

    async def _splice(self, guest: socket.socket, onward: socket.socket) -> None:
        one, other = _End(self._ends), _End(self._ends)
        one.other, other.other = other, one
        try:
            await self._loop.create_connection(lambda: other, sock=onward)
            await self._loop.create_connection(lambda: one, sock=guest)
        except BaseException:
            onward.close()
            other.cut()
            raise


class Gate(_Keeper):
    """Lets those who know `key` through to the store on loopback at `store_port`; ends when the store does."""

    def __init__(self, listener: socket.socket, key: bytes, store_port: int) -> None:
        self._key, self._store_port = key, store_port
        super().__init__(listener)
        self._submit(self._end_with_store())

    async def _welcome(self, guest: socket.socket) -> None:
        asked = os.urandom(_NONCE)
        await self._loop.sock_sendall(guest, _MAGIC + asked)
        # Read by the byte: a stranger who sends megabytes gets no further than this.
        answer = await _exactly(guest, _NONCE + _PROOF)
        told, proof = answer[:_NONCE], answer[_NONCE:]
        if not hmac.compare_digest(proof, _proof(self._key, b"guest", asked, told)):
            raise StrangerError
        await self._loop.sock_sendall(guest, _proof(self._key, b"gate", asked, told))
        await self._splice(guest, await self._to_store())

    async def _to_store(self) -> socket.socket:
        return await _connected(socket.AF_INET, ("127.0.0.1", self._store_port))

    async def _end_with_store(self) -> None:
        """The store never speaks first: what comes on a connection that asks nothing is its end."""
        with suppress(OSError):
            store = await self._to_store()
            try:
                await self._loop.sock_recv(store, 1)
            finally:
                store.close()
        self._loop.stop()


class Porter(_Keeper):
    """Takes connections to its port on loopback through the gate at `address`."""

    def __init__(self, address: tuple[str, int], key: bytes) -> None:
        self._address, self._key = address, key
        super().__init__(socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG))

    def knock(self, seconds: float) -> None:
        """Goes through the gate once, for nothing.

        Raises:
            StrangerError: something else answers there.
            OSError: nothing does, or not within `seconds`.
        """

        async def through() -> None:
            async with asyncio.timeout(seconds):
                (await self._through()).close()

        self._submit(through()).result()

    async def _welcome(self, guest: socket.socket) -> None:
        await self._splice(guest, await self._through())

    async def _through(self) -> socket.socket:
        onward = await self._connect()
        try:
            greeting = await _exactly(onward, len(_MAGIC) + _NONCE)
            if not greeting.startswith(_MAGIC):
                raise StrangerError("what answers there is no gate")
            asked, told = greeting[len(_MAGIC) :], os.urandom(_NONCE)
            await self._loop.sock_sendall(onward, told + _proof(self._key, b"guest", asked, told))
            try:
                proof = await _exactly(onward, _PROOF)
            except OSError:
                proof = b""
            if not hmac.compare_digest(proof, _proof(self._key, b"gate", asked, told)):
                raise StrangerError("what answers there belongs to another job or attempt")
        except BaseException:
            onward.close()
            raise
        return onward

    async def _connect(self) -> socket.socket:
        host, port = self._address
        places = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        refused = OSError(f"{host} has no address")
        for family, _, _, _, place in places:
            try:
                return await _connected(family, place)
            except OSError as error:
                refused = error
        raise refused


class _End(asyncio.Protocol):
    """One of two joined connections: what comes in goes out at the other, no faster than that one takes it."""

    other: _End

    def __init__(self, all_ends: set[_End]) -> None:
        self._all_ends = all_ends
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._all_ends.add(self)

    def cut(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, _: Exception | None) -> None:
        self._all_ends.discard(self)
        if self.other.transport is not None:
            self.other.transport.close()


def _proof(key: bytes, side: bytes, asked: bytes, told: bytes) -> bytes:
    return hmac.digest(key, side + asked + told, "sha256")


async def _connected(family: int, place: Any) -> socket.socket:
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, place)
    except BaseException:
        connection.close()
        raise
    return connection


async def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = await asyncio.get_running_loop().sock_recv(connection, size - len(data))
        if not more:
            raise StrangerError("the connection was closed")
        data += more
    return data
