"""How many connections the progress service holds, and what each of them costs. Used by `server`.

Anybody who reaches the port can begin a handshake, and most of a connection's memory is spent by then. So connections
are counted from when they are accepted until they are gone, with those whose handshake never ends. When there is no
room left, whoever has the most connections gives one up: a worker needs one, for a moment, and always gets it.
"""

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from typing import Protocol

_SECONDS_TO_SHAKE_HANDS = 5
_SECONDS_TO_PART = 2.0


class Connection(Protocol):
    address: str

    def turn_away(self) -> None:
        """Close it at once."""
        ...


class Connections:
    """Those that there are, by address, the oldest first."""

    def __init__(self, most: int, most_per_address: int) -> None:
        self._most = most
        self._most_per_address = most_per_address
        self._total = 0
        self._by_address: dict[str, dict[Connection, None]] = {}

    def enter(self, connection: Connection) -> bool:
        """False for one too many: of all, if no other address has more. Every other one must `leave`."""
        own = self._by_address.get(connection.address, {})
        if len(own) >= self._most_per_address:
            return False
        if self._total >= self._most:
            greediest = max(self._by_address.values(), key=len, default=own)
            if len(greediest) <= len(own):
                return False
            oldest = next(iter(greediest))
            self.leave(oldest)
            oldest.turn_away()
        self._by_address.setdefault(connection.address, {})[connection] = None
        self._total += 1
        return True

    def leave(self, connection: Connection) -> None:
        """It is gone; no matter if it was turned away before."""
        own = self._by_address.get(connection.address, {})
        if connection not in own:
            return
        del own[connection]
        self._total -= 1
        if not own:
            del self._by_address[connection.address]


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
        self.address = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        if not self._connections.enter(self):
            assert isinstance(transport, asyncio.Transport)
            transport.abort()
            return
        super().connection_made(transport)

    def turn_away(self) -> None:
        assert isinstance(self._transport, asyncio.Transport)
        self._transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.leave(self)
        super().connection_lost(exc)
