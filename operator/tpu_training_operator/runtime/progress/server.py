"""The progress service's HTTP side: who may say how much, and what is answered. Started by `main`.

Cheap refusals come first. A job's own limit counts its own worker's reports only, or anybody could use it up. Each
unknown token costs the API server a look, so it counts as a refusal of its address until it is accepted.

A stranger must not be able to make the operator disbelieve a silence. So only two things tell the inbox that a report
could not be heard: an error of ours over the report of an accepted worker, and an API server that does not answer.
"""

import asyncio
import json
import logging
import math
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import datetime

from aiohttp import web

from tpu_training_operator.api.constants import API_VERSION, PLURAL
from tpu_training_operator.domain.report import Report
from tpu_training_operator.kube.cluster import JobKey
from tpu_training_operator.runtime.inbox import Inboxes
from tpu_training_operator.runtime.metrics import Metrics
from tpu_training_operator.runtime.progress.connections import Connections, TlsConnection
from tpu_training_operator.runtime.progress.limits import Limits
from tpu_training_operator.runtime.progress.payload import read_progress, read_trainer_status
from tpu_training_operator.runtime.progress.refused import Refused
from tpu_training_operator.runtime.progress.reviewer import NoAnswer, Reviewer
from tpu_training_operator.runtime.progress.sender import Sender

PROGRESS_PATH = f"/apis/{API_VERSION}/namespaces/{{namespace}}/{PLURAL}/{{name}}/progress"
# Kubeflow Trainer's, word for word (KEP-2779): its clients are given the whole URL, but may look at it.
TRAINER_STATUS_PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/{namespace}/trainjobs/{name}/status"

MOST_BYTES = 64 * 1024
# Each lasts for one report, some 50 ms, and takes about 75 KiB.
MOST_CONNECTIONS = 500
# Behind one address may be many workers, and the connections of one stranger.
MOST_CONNECTIONS_PER_ADDRESS = 50
REPORTS_PER_SECOND, REPORTS_AT_ONCE = 1.0, 5
REFUSALS_PER_SECOND, REFUSALS_AT_ONCE = 0.2, 20

_SECONDS_TO_READ = 10.0
# Longer than one question to the API server may take: a token may have to wait for its turn first.
_SECONDS_TO_REVIEW = 20.0
_SECONDS_OF_SILENCE = 5.0
_SECONDS_TO_STOP = 2.0
_SECONDS_TO_DRAIN = 1.0
_RETRY_SECONDS = 5.0
# Longer names than Kubernetes has are not worth remembering.
_LONGEST_NAME = 253

log = logging.getLogger(__name__)
# aiohttp reports each request that is no HTTP with a traceback; what fails in our own code is told by `_answered`.
_http_log = logging.getLogger(f"{__name__}.http")
_http_log.setLevel(logging.CRITICAL)

_Reader = Callable[[bytes, Sender, datetime], Report]
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class ProgressService:
    """Takes reports in. `hint`: called for a job that has something new in its inbox. `clock`: the time of a report;
    `seconds` only ever grow, and time the limits."""

    reviewer: Reviewer
    inboxes: Inboxes
    hint: Callable[[JobKey], None]
    clock: Callable[[], datetime]
    seconds: Callable[[], float]
    metrics: Metrics | None = None

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._told, _answered], client_max_size=MOST_BYTES)
        reports = Limits[JobKey](REPORTS_PER_SECOND, REPORTS_AT_ONCE, self.seconds)
        refusals = Limits[str](REFUSALS_PER_SECOND, REFUSALS_AT_ONCE, self.seconds)

        async def take(request: web.Request, read: _Reader) -> JobKey:
            key = JobKey(request.match_info["namespace"], request.match_info["name"])
            if max(len(key.namespace), len(key.name)) > _LONGEST_NAME:
                raise web.HTTPNotFound
            sender = await self._sender(request, key, refusals)
            reports.take(key, f"job {key} may report {REPORTS_PER_SECOND:g} times a second")
            with self._noting_own_errors(key):
                self.inboxes.put(key, read(await _body(request), sender, self.clock()))
                self.hint(key)
            return key

        async def progress(request: web.Request) -> web.Response:
            key = await take(request, read_progress)
            return web.json_response({"stacks": self.inboxes.wants_stacks(key)})

        async def trainer_status(request: web.Request) -> web.Response:
            await take(request, read_trainer_status)
            return web.json_response({})

        app.router.add_post(PROGRESS_PATH, progress)
        app.router.add_post(TRAINER_STATUS_PATH, trainer_status)
        return app

    async def _sender(self, request: web.Request, key: JobKey, refusals: Limits[str]) -> Sender:
        address, token = request.remote or "", _token(request)
        # Behind one address may be many workers: those whose tokens are known are not locked out by another's.
        is_trusted = self.reviewer.trusts(token)
        if not is_trusted:
            refusals.take(address, "too many reports from this address were refused")
        try:
            async with asyncio.timeout(_SECONDS_TO_REVIEW):
                sender = await self.reviewer.sender(token, key, address)
        except TimeoutError:
            raise Refused(429, "too many unknown tokens wait to be looked at", _RETRY_SECONDS) from None
        except NoAnswer as error:
            self.inboxes.could_not_listen(key)
            if not is_trusted:
                refusals.give_back(address)
            raise Refused(503, f"the API server could not be asked about the token: {error}", _RETRY_SECONDS) from error
        if not is_trusted:
            refusals.give_back(address)
        return sender

    @contextmanager
    def _noting_own_errors(self, key: JobKey) -> Iterator[None]:
        try:
            yield
        except (Refused, web.HTTPException):
            raise
        except Exception:
            self.inboxes.could_not_listen(key)
            raise

    @web.middleware
    async def _told(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """The last to see an answer."""
        response = await handler(request)
        if self.metrics:
            self.metrics.report_answered(response.status)
        # One that is kept between two reports costs more memory than the next handshake costs time.
        response.force_close()
        return response


@asynccontextmanager
async def serve(
    service: ProgressService, port: int, tls: ssl.SSLContext, host: str | None = None
) -> AsyncIterator[int]:
    """Listen on `host` (None: all addresses) until the end of the block; then requests under way have a moment to end.
    Yields the port, which is any free one for 0."""
    runner = web.AppRunner(
        service.application(),
        access_log=None,
        logger=_http_log,
        # A bomb is smaller than what it unpacks to.
        auto_decompress=False,
        keepalive_timeout=_SECONDS_OF_SILENCE,
        lingering_time=_SECONDS_TO_DRAIN,
        shutdown_timeout=_SECONDS_TO_STOP,
    )
    await runner.setup()
    server = runner.server
    assert server is not None

    connections = Connections(MOST_CONNECTIONS, MOST_CONNECTIONS_PER_ADDRESS)

    def protocol() -> asyncio.BaseProtocol:
        return TlsConnection(connections, tls, server())

    try:
        listening = await asyncio.get_running_loop().create_server(protocol, host, port)
        try:
            yield listening.sockets[0].getsockname()[1]
        finally:
            listening.close()
    finally:
        await runner.cleanup()


@web.middleware
async def _answered(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Every error as JSON, with a message for a person."""
    try:
        return await handler(request)
    except Refused as refused:
        return _error(refused.status, str(refused), refused.retry_after)
    except web.HTTPRequestEntityTooLarge:
        return _error(413, f"the body is longer than {MOST_BYTES} bytes")
    except web.HTTPException as error:
        # No such path or method.
        return _error(error.status, f"{error.reason}; reports are POSTed to {PROGRESS_PATH}")
    except Exception:
        log.exception("a report could not be taken")
        return _error(500, "the report could not be taken; the operator's log says why")


def _token(request: web.Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        raise Refused(401, "a report needs the header Authorization: Bearer <the token that is mounted into worker 0>")
    if not token.isascii():
        raise Refused(401, "that is no token")
    return token


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(_SECONDS_TO_READ):
            return await request.read()
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {_SECONDS_TO_READ:g} s") from None
    except (ConnectionError, web.RequestPayloadError):
        raise Refused(400, "the body was cut off") from None


def _error(status: int, message: str, retry_after: float | None = None) -> web.Response:
    response = web.Response(status=status, text=json.dumps({"message": message}), content_type="application/json")
    if retry_after is not None:
        response.headers["Retry-After"] = str(math.ceil(retry_after))
    return response
