"""How many connections the progress service holds, and what each of them costs. Used by `server`.

Anybody who reaches the port can begin a handshake, and most of a connection's memory is spent by then. So connections
are counted from when they are accepted until they are gone, with those whose handshake never ends.
"""

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections import Counter
from collections.abc import Callable

_SECONDS_TO_SHAKE_HANDS = 5
_SECONDS_TO_PART = 2.0


class Connections:
    """Counts those that there are. `full`: called when one is turned away for the sake of all, not of its address."""

    def __init__(self, most: int, most_per_address: int, full: Callable[[], None]) -> None:
        self._most = most
        self._most_per_address = most_per_address
        self._full = full
        self._by_address = Counter[str]()

    def enter(self, address: str) -> bool:
        """False for one too many. Every other one must `leave`."""
        if self._by_address[address] >= self._most_per_address:
            return False
        if self._by_address.total() >= self._most:
            self._full()
            return False
        self._by_address[address] += 1
        return True

    def leave(self, address: str) -> None:
        self._by_address[address] -= 1
        # Also those that are 0 because they were turned away.
        self._by_address = +self._by_address


class TlsConnection(SSLProtocol):
    """asyncio's own TLS over a connection that may be turned away before its handshake.

    With `create_server(ssl=...)` a protocol learns neither who connects before the handshake nor of one that fails.
    """

    # asyncio's buffer of 256 KiB for each connection is made for downloads; this is a record's length.
    max_size = 16 * 1024

    def __init__(self, connections: Connections, tls: ssl.SSLContext, protocol: asyncio.Protocol) -> None:
        super().__init__(
            asyncio.get_running_loop(),
            protocol,
            tls,
            # Nobody waits for the handshake.
            None,  # type: ignore[arg-type]
            server_side=True,
            ssl_handshake_timeout=_SECONDS_TO_SHAKE_HANDS,
            ssl_shutdown_timeout=_SECONDS_TO_PART,
        )
        self._connections = connections
        self._address: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if peer else ""
        if not self._connections.enter(address):
            assert isinstance(transport, asyncio.Transport)
            transport.abort()
            return
        self._address = address
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._address is not None:
            self._connections.leave(self._address)
        super().connection_lost(exc)
