"""Passes connections on to the operator that leads.

The Service has every operator behind it, and only the one that leads listens to workers. A waiting operator is ready
all the same: a rollout, a PodDisruptionBudget and `helm --wait` count ready pods. So it takes the workers' connections
and passes the bytes on. TLS and tokens are between the worker and the leader; a relay can read and change nothing.

What the relay may cost is bounded: connections at once, and how long each may last. A report takes some 50 ms.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from tpu_training_operator.runtime.ports import listening_socket

# Half of what the leader has room for: workers that reach it directly keep the other half.
MOST_CONNECTIONS = 100
_SECONDS_TO_CONNECT = 3.0
_SECONDS_TO_LAST = 60.0
_PIECE = 16 * 1024


@asynccontextmanager
async def relay(port: int, leader: Callable[[], str], host: str | None = None) -> AsyncIterator[int]:
    """Listen until the block ends. `leader` is asked for each connection: HOST:PORT; empty: nobody leads, and the
    worker will try again. Yields the port; 0 asks for any free one."""
    under_way: dict[asyncio.Task[None], None] = {}

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        under_way[task] = None
        if len(under_way) > MOST_CONNECTIONS:
            next(iter(under_way)).cancel()
        try:
            await _pass_on(reader, writer, leader())
        finally:
            under_way.pop(task, None)

    listener = listening_socket(host, port)
    server = await asyncio.start_server(accepted, sock=listener)
    try:
        yield listener.getsockname()[1]
    finally:
        server.close()
        left = list(under_way)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, leader: str) -> None:
    """Bytes in both directions, until both have ended."""
    host, _, port = leader.rpartition(":")
    try:
        if not host:
            return
        # OSError: the leader has gone, or the worker.
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_SECONDS_TO_CONNECT):
                there, back = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                async with asyncio.timeout(_SECONDS_TO_LAST):
                    await asyncio.gather(_copy(reader, back), _copy(there, writer))
            finally:
                back.close()
    finally:
        writer.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while piece := await source.read(_PIECE):
        target.write(piece)
        await target.drain()
    with suppress(OSError):
        target.write_eof()
