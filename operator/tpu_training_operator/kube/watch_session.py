"""The HTTP session through which kopf reads jobs.

It reads the token for every request, because bound tokens rotate, lets nothing but reads through, and asks a server
that ends each watch at once only once a second. It also reports what the API server has answered, which kopf keeps to
itself.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp

from tpu_training_operator.api.constants import MANAGER
from tpu_training_operator.kube.credentials import Credentials

_SECONDS_BETWEEN_WATCHES = 1.0


@asynccontextmanager
async def watch_session(
    credentials: Credentials, path: str, answered: Callable[[bool], None]
) -> AsyncIterator[aiohttp.ClientSession]:
    """Yields the session. `answered` is called when the API server has answered a request for `path`: True for a watch,
    which has begun then, False for a page of a list."""
    watched_at = float("-inf")

    async def send(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        nonlocal watched_at
        if request.method != "GET":
            raise aiohttp.ClientError(f"{request.method} {request.url.path}: kopf only reads")
        is_of_jobs, is_watch = request.url.path == path, "watch" in request.url.query
        if is_of_jobs and is_watch:
            await asyncio.sleep(watched_at + _SECONDS_BETWEEN_WATCHES - time.monotonic())
            watched_at = time.monotonic()
        if authorization := await asyncio.to_thread(credentials.authorization):
            request.headers["Authorization"] = authorization
        response = await handler(request)
        if response.status == 401:
            response.close()
            # After a few refusals kopf would end; after this error it tries again.
            raise aiohttp.ClientConnectionError("the API server refused the operator's token")
        if is_of_jobs and response.status < 400:
            answered(is_watch)
        return response

    # A small compressed answer could become a large one.
    headers = {"Accept-Encoding": "identity", "User-Agent": MANAGER}
    connector = aiohttp.TCPConnector(ssl=credentials.ssl_context(), limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers, middlewares=(send,)) as session:
        yield session
