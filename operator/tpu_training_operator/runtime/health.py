"""Serves /healthz for the kubelet: whether this process still works, by its passes, its watches and its requests.

A slow or failing API server is no reason for a restart: the next process would have the same API server.
"""

import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from aiohttp import web

from tpu_training_operator.kube.client import Client
from tpu_training_operator.runtime.controller import Controller
from tpu_training_operator.runtime.ports import Bounds, serve_bounded
from tpu_training_operator.runtime.resync import RESYNC_SECONDS
from tpu_training_operator.runtime.watching import Watching

# A request takes up to 30 s, and is tried five times with pauses of up to 30 s if the API server is overloaded.
_LONGEST_STANDSTILL_SECONDS = 300.0
# Three resyncs in a row without an answer are more than a short outage.
_LONGEST_SILENCE_SECONDS = 3 * RESYNC_SECONDS
_BOUNDS = Bounds(connections=32)

log = logging.getLogger(__name__)


class Unhealthy(Exception):
    """The process should be restarted; the message says why."""


class Liveness:
    """`clients`: the API server is reachable if it answers any of them."""

    def __init__(self, controller: Controller, clients: Sequence[Client], watching: Watching) -> None:
        self._controller = controller
        self._clients = clients
        self._watching = watching

    def check(self) -> dict[str, float]:
        """Returns ages in seconds. Raises Unhealthy if one of them shows that this process is stuck."""
        if not self._controller.is_running:
            raise Unhealthy("the controller has stopped")
        if not self._watching.is_running:
            raise Unhealthy("watching has stopped")
        standstill = self._controller.longest_standstill_seconds()
        silence = time.monotonic() - max(client.last_answer for client in self._clients)
        unwatched = self._watching.longest_standstill_seconds()
        if standstill > _LONGEST_STANDSTILL_SECONDS:
            raise Unhealthy(f"a pass has been stuck for {standstill:.0f} s")
        if silence > _LONGEST_SILENCE_SECONDS:
            raise Unhealthy(f"the API server has not answered for {silence:.0f} s")
        if unwatched > _LONGEST_STANDSTILL_SECONDS:
            raise Unhealthy(f"a watch has been stuck for {unwatched:.0f} s")
        return {
            "longestStandstillSeconds": round(standstill, 1),
            "secondsSinceLastAnswer": round(silence, 1),
            "secondsSinceLastNews": round(self._watching.longest_silence_seconds(), 1),
        }


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
