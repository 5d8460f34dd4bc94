"""Serves /metrics over HTTP, for Prometheus.

There is neither encryption nor authentication: it serves numbers, no names, and only inside the cluster's network
(docs/install.md).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from tpu_training_operator.runtime.metrics import Metrics
from tpu_training_operator.runtime.ports import Bounds, serve_bounded

_BOUNDS = Bounds(connections=32)


@asynccontextmanager
async def serve_metrics(port: int, metrics: Metrics) -> AsyncIterator[None]:
    """Serves on `port` of every address, and measures the event loop, until the block ends. Raises OSError if the port
    is taken."""

    async def answer(request: web.Request) -> web.Response:
        body, content_type = metrics.exposition(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    app = web.Application()
    app.router.add_get("/metrics", answer)
    lag = asyncio.create_task(metrics.watch_event_loop(), name="event loop lag")
    try:
        async with serve_bounded(app, port, _BOUNDS):
            yield
    finally:
        lag.cancel()
        with suppress(asyncio.CancelledError):
            await lag
