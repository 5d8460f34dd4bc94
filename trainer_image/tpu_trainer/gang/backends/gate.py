"""The gate in front of the gang's store: only those who know the gang's key reach the store.

TCPStore has no authentication and keeps whatever it is sent, so it listens on loopback only. The gate listens where the
other hosts look for the store, and connects a peer once both sides have proved that they know the key (an HMAC over
fresh random numbers from both). TCPStore's client cannot do that, so each client host runs a `Tunnel`: a port on
loopback whose connections go through the gate. Before its proof a peer costs the gate one socket and 64 bytes.

The gate keeps strangers out. It does not encrypt: anyone who can read or change packets between the hosts gets past it.
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
"""The most connections without a proof at once. Beyond that the oldest is dropped, so silent strangers cannot keep the
others out; a host that is dropped tries again."""

PROOF_SECONDS = 10.0
"""How long a proof may take."""

_MAGIC = b"tpugang1"
_NONCE = 32
_PROOF = 32
_BACKLOG = 4096
_PIECE = 1 << 16


class StrangerError(OSError):
    """The peer is not part of this gang."""


def key_of(gang: str) -> bytes:
    """Returns the key of a gang: the job's uid, which is readable only with rights in the job's namespace, and the
    attempt."""
    return sha256(f"tpu-trainer gang {gang}".encode()).digest()


class _GuardedServer:
    """A listening socket, served by one thread with its own event loop until `close`."""

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._waiting: dict[asyncio.Task[None], None] = {}
        self._closing = asyncio.Event()
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cuts all connections. Must not be called from the server's own thread."""
        # The loop is already gone if the store has ended.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    async def _admit(self, guest: socket.socket) -> socket.socket:
        """Returns the connection to splice `guest` to; raises OSError if the guest is refused."""
        raise NotImplementedError

    def _submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self) -> None:
        # Leaving the runner cancels all tasks; each closes its sockets.
        with self._runner, self._listener:
            self._runner.run(self._accept_until_closing())

    async def _accept_until_closing(self) -> None:
        accepting = self._loop.create_task(self._accept())
        await self._closing.wait()
        accepting.cancel()

    async def _accept(self) -> None:
        while True:
            try:
                guest, _ = await self._loop.sock_accept(self._listener)
            except OSError:
                # Out of file descriptors, or the guest has already left.
                self._drop_oldest()
                await asyncio.sleep(0.05)
                continue
            guest.setblocking(False)
            if len(self._waiting) >= MOST_WAITING:
                self._drop_oldest()
            task = self._loop.create_task(self._serve(guest))
            self._waiting[task] = None
            # Here and not in the task, which may be dropped before its first line has run.
            task.add_done_callback(partial(self._leave, guest))

    async def _serve(self, guest: socket.socket) -> None:
        with suppress(OSError):
            async with asyncio.timeout(PROOF_SECONDS):
                onward = await self._admit(guest)
            task = asyncio.current_task()
            assert task is not None
            self._waiting.pop(task, None)
            with onward:
                await _splice(guest, onward)

    def _leave(self, guest: socket.socket, task: asyncio.Task[None]) -> None:
        self._waiting.pop(task, None)
        guest.close()

    def _drop_oldest(self) -> None:
        oldest = next(iter(self._waiting), None)
        if oldest is not None:
            del self._waiting[oldest]
            oldest.cancel()


class Gate(_GuardedServer):
    """Connects peers who know `key` to the store on loopback at `store_port`; ends when the store does."""

    def __init__(self, listener: socket.socket, key: bytes, store_port: int) -> None:
        self._key, self._store_port = key, store_port
        super().__init__(listener)
        self._submit(self._end_with_store())

    async def _admit(self, guest: socket.socket) -> socket.socket:
        gate_nonce = os.urandom(_NONCE)
        await self._loop.sock_sendall(guest, _MAGIC + gate_nonce)
        # Reads exactly the expected size, so a stranger may send as much as it likes.
        answer = await _receive(guest, _NONCE + _PROOF)
        guest_nonce, proof = answer[:_NONCE], answer[_NONCE:]
        if not hmac.compare_digest(proof, _proof(self._key, b"guest", gate_nonce, guest_nonce)):
            raise StrangerError
        await self._loop.sock_sendall(guest, _proof(self._key, b"gate", gate_nonce, guest_nonce))
        return await self._to_store()

    async def _to_store(self) -> socket.socket:
        return await _open_connection(socket.AF_INET, ("127.0.0.1", self._store_port))

    async def _end_with_store(self) -> None:
        """Closes the gate when the store ends: it never speaks first, so any event on an idle connection is its end."""
        with suppress(OSError), await self._to_store() as store:
            await self._loop.sock_recv(store, 1)
        self._closing.set()


class Tunnel(_GuardedServer):
    """Forwards connections to its port on loopback through the gate at `address`."""

    def __init__(self, address: tuple[str, int], key: bytes) -> None:
        self._address, self._key = address, key
        super().__init__(socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG))

    def probe(self, seconds: float) -> None:
        """Passes the gate once and leaves.

        Raises:
            StrangerError: something else answers there.
            OSError: nothing does, or not within `seconds`.
        """

        async def through() -> None:
            async with asyncio.timeout(seconds):
                (await self._through()).close()

        self._submit(through()).result()

    async def _admit(self, guest: socket.socket) -> socket.socket:
        return await self._through()

    async def _through(self) -> socket.socket:
        onward = await self._connect()
        try:
            greeting = await _receive(onward, len(_MAGIC) + _NONCE)
            if not greeting.startswith(_MAGIC):
                raise StrangerError("what answers there is not a gate")
            gate_nonce, guest_nonce = greeting[len(_MAGIC) :], os.urandom(_NONCE)
            await self._loop.sock_sendall(onward, guest_nonce + _proof(self._key, b"guest", gate_nonce, guest_nonce))
            try:
                proof = await _receive(onward, _PROOF)
            except OSError:
                proof = b""
            if not hmac.compare_digest(proof, _proof(self._key, b"gate", gate_nonce, guest_nonce)):
                raise StrangerError("what answers there belongs to another job or attempt")
        except BaseException:
            onward.close()
            raise
        return onward

    async def _connect(self) -> socket.socket:
        host, port = self._address
        refused = OSError(f"{host} has no address")
        for family, _, _, _, place in await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                return await _open_connection(family, place)
            except OSError as error:
                refused = error
        raise refused


async def _splice(guest: socket.socket, onward: socket.socket) -> None:
    """Carries bytes both ways, no faster than they are taken, until either side ends."""
    pumps = {asyncio.ensure_future(_pump(guest, onward)), asyncio.ensure_future(_pump(onward, guest))}
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(source: socket.socket, sink: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(source, _PIECE):
        await loop.sock_sendall(sink, data)


def _proof(key: bytes, side: bytes, gate_nonce: bytes, guest_nonce: bytes) -> bytes:
    return hmac.digest(key, side + gate_nonce + guest_nonce, "sha256")


async def _open_connection(family: int, place: Any) -> socket.socket:
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, place)
    except BaseException:
        connection.close()
        raise
    return connection


async def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = await asyncio.get_running_loop().sock_recv(connection, size - len(data))
        if not more:
            raise StrangerError("the connection was closed")
        data += more
    return data
