"""/healthz over HTTP, for the kubelet."""

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from aiohttp import web

from tpu_training_operator.runtime.health import Unhealthy
from tpu_training_operator.runtime.ports import Bounds, serve_bounded

_BOUNDS = Bounds(connections=32)

log = logging.getLogger(__name__)


@asynccontextmanager
async def serve_health(port: int, check: Callable[[], Mapping[str, float]]) -> AsyncIterator[int]:
    """Serves /healthz on `port` of every address until the block ends: the result of `check`, or 503 if it raises
    Unhealthy, which is logged once. Yields the port; OSError: it is taken."""
    logged = ""

    async def answer(_: web.Request) -> web.Response:
        nonlocal logged
        before, logged = logged, ""
        try:
            return web.json_response(dict(check()))
        except Unhealthy as unhealthy:
            logged = str(unhealthy)
            if not before:
                log.error("this process should be restarted: %s", logged)
            return web.json_response({"message": logged}, status=503)

    app = web.Application()
    app.router.add_get("/healthz", answer)
    async with serve_bounded(app, port, _BOUNDS) as chosen:
        yield chosen
