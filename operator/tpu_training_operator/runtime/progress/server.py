"""The progress service: receives workers' reports over HTTPS, and limits what anyone can cost the operator.

Cheap refusals come first. Only reports of a job's own worker count against its limit, or anyone could use it up. Every
unknown token costs the API server a request, so it counts as a refusal of its address until it is accepted.

A job that is silent is treated as hung unless the inbox knows that a report was lost. A stranger must not be able to
cause that. So only two failures count as a lost report: our own error in handling a report of an accepted worker, and
an API server that does not answer.

`runtime.ports` bounds what a connection may cost before it becomes a report.
"""

import asyncio
import json
import logging
import math
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, TypeVar

from aiohttp import web

from tpu_contract.protocol import REPORT_LIMIT
from tpu_training_operator.api.constants import API_VERSION, PLURAL
from tpu_training_operator.domain.cluster_state.worker_reports import WorkerReport
from tpu_training_operator.kube.cluster import JobKey
from tpu_training_operator.kube.turns import TokenBucket
from tpu_training_operator.runtime.inbox import Inboxes
from tpu_training_operator.runtime.metrics import Metrics
from tpu_training_operator.runtime.ports import Bounds, serve_bounded
from tpu_training_operator.runtime.progress.payload import read_progress, read_trainer_status
from tpu_training_operator.runtime.progress.tokens import ReportRefused, Reviewer, Sender, TokenNotReviewed

PROGRESS_PATH = f"/apis/{API_VERSION}/namespaces/{{namespace}}/{PLURAL}/{{name}}/progress"
# Kubeflow Trainer's path, literally (KEP-2779): its clients are given the whole URL, but may look at it.
TRAINER_STATUS_PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/{namespace}/trainjobs/{name}/status"

# A connection lasts for one report, some 50 ms, and takes up to 350 KiB of memory, most of it asyncio's TLS buffers.
MOST_CONNECTIONS = 200
REPORTS_PER_SECOND, REPORTS_AT_ONCE = 1.0, 5
REFUSALS_PER_SECOND, REFUSALS_AT_ONCE = 0.2, 20

_SECONDS_TO_READ = 10.0
# Longer than one request to the API server may take: a token may have to wait for its turn first.
_SECONDS_TO_REVIEW = 20.0
_RETRY_SECONDS = 5.0
# No name in Kubernetes is longer.
_LONGEST_NAME = 253
# Jobs or addresses whose limits are remembered: as many as a large cluster has jobs, and some more.
_MOST_KEYS = 10_000

# Whether the token of the report was accepted, now or the last time.
_IS_KNOWN = web.RequestKey("is_known", bool)

log = logging.getLogger(__name__)

_Reader = Callable[[bytes, Sender, datetime], WorkerReport]
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Key = TypeVar("_Key")


class Limits(Generic[_Key]):
    """A token bucket for each key: `burst` at once and `per_second` on average. The key that has been quiet for longest
    is forgotten first, and starts with a full bucket when it comes back."""

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float]) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._buckets: OrderedDict[_Key, TokenBucket] = OrderedDict()

    def take(self, key: _Key, why: str) -> None:
        """Takes one token of the key's bucket. Raises ReportRefused (429) with the reason `why` if there is none."""
        bucket = self._buckets.pop(key, None) or TokenBucket(self._per_second, self._burst, self._clock)
        self._buckets[key] = bucket
        if wait := bucket.seconds_until_next():
            raise ReportRefused(429, why, wait)
        bucket.take()
        if len(self._buckets) > _MOST_KEYS:
            self._buckets.popitem(last=False)

    def give_back(self, key: _Key) -> None:
        """Puts back the token taken last."""
        if bucket := self._buckets.get(key):
            bucket.give_back()


@dataclass(frozen=True)
class ProgressServer:
    """Puts reports into `inboxes`. `enqueue` asks for a pass over a job within so many seconds. `clock` gives the time
    of a report; `seconds` are monotonic and time the limits."""

    reviewer: Reviewer
    inboxes: Inboxes
    enqueue: Callable[[JobKey, float], None]
    clock: Callable[[], datetime]
    seconds: Callable[[], float]
    metrics: Metrics | None = None

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._answered], client_max_size=REPORT_LIMIT)
        reports = Limits[JobKey](REPORTS_PER_SECOND, REPORTS_AT_ONCE, self.seconds)
        refusals = Limits[str](REFUSALS_PER_SECOND, REFUSALS_AT_ONCE, self.seconds)

        async def take(request: web.Request, read: _Reader) -> JobKey:
            key = JobKey(request.match_info["namespace"], request.match_info["name"])
            if max(len(key.namespace), len(key.name)) > _LONGEST_NAME:
                raise web.HTTPNotFound
            sender = await self._sender(request, key, refusals)
            reports.take(key, f"job {key} may report {REPORTS_PER_SECOND:g} times a second")
            try:
                self.inboxes.put(key, read(await _body(request), sender, self.clock()))
                self.enqueue(key, self.inboxes.between_writes.total_seconds())
            except (ReportRefused, web.HTTPException):
                raise
            except Exception:
                self.inboxes.note_loss(key)
                raise
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
        # Many workers may share an address: a stranger must not lock out those whose tokens are known.
        is_trusted = request[_IS_KNOWN] = self.reviewer.trusts(token)
        if not is_trusted:
            refusals.take(address, "too many reports from this address were refused")
        try:
            async with asyncio.timeout(_SECONDS_TO_REVIEW):
                sender = await self.reviewer.sender(token, key, address)
        except TimeoutError:
            raise ReportRefused(429, "too many unknown tokens are waiting for review", _RETRY_SECONDS) from None
        except TokenNotReviewed as error:
            self.inboxes.note_loss(key)
            if not is_trusted:
                refusals.give_back(address)
            raise ReportRefused(503, f"the API server could not review the token: {error}", _RETRY_SECONDS) from error
        if not is_trusted:
            refusals.give_back(address)
        request[_IS_KNOWN] = True
        return sender

    @web.middleware
    async def _answered(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Counts every answer, and turns every error into JSON with a message."""
        try:
            response = await handler(request)
        except ReportRefused as refused:
            response = _error(refused.status, str(refused), refused.retry_after)
        except web.HTTPRequestEntityTooLarge:
            response = _error(413, f"the body is longer than {REPORT_LIMIT} bytes")
        except web.HTTPException as error:
            # No such path or method.
            response = _error(error.status, f"{error.reason}; reports are POSTed to {PROGRESS_PATH}")
        except Exception:
            log.exception("a report could not be processed")
            response = _error(500, "the report could not be processed; see the operator's log")
        if self.metrics:
            self.metrics.report_answered(response.status, is_known=request.get(_IS_KNOWN, False))
        return response


@asynccontextmanager
async def serve(service: ProgressServer, port: int, tls: ssl.SSLContext, host: str | None = None) -> AsyncIterator[int]:
    """Listens until the block ends. Yields the port; 0 asks for any free one."""
    bounds = Bounds(MOST_CONNECTIONS, REPORT_LIMIT)
    async with serve_bounded(service.application(), port, bounds, tls=tls, host=host) as chosen:
        yield chosen


def _token(request: web.Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        raise ReportRefused(
            401, "a report needs the header Authorization: Bearer <the token that is mounted into worker 0>"
        )
    if not token.isascii():
        raise ReportRefused(401, "the token is not ASCII; send the one that is mounted into worker 0")
    return token


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(_SECONDS_TO_READ):
            return await request.read()
    except TimeoutError:
        raise ReportRefused(408, f"the body did not arrive within {_SECONDS_TO_READ:g} s") from None
    except (ConnectionError, web.RequestPayloadError):
        raise ReportRefused(400, "the body was cut off") from None


def _error(status: int, message: str, retry_after: float | None = None) -> web.Response:
    response = web.Response(status=status, text=json.dumps({"message": message}), content_type="application/json")
    if retry_after is not None:
        response.headers["Retry-After"] = str(math.ceil(retry_after))
    return response
