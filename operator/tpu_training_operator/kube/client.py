"""A client of the Kubernetes API, with JSON and aiohttp, for the operator and the command line.

The client waits for the request's turn (`kube.turns`), and makes the short pauses that the server asks for (429, or 503
with Retry-After). Every other failure goes to the caller, who decides whether to try again.

Memory is bounded: every user who may create objects decides how large they are, and one page of them must fit into the
memory of this process.
"""

import asyncio
import logging
import math
import os
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Generic, TypeVar

import aiohttp

from tpu_training_operator.api.constants import MANAGER
from tpu_training_operator.kube.cluster import EVENTS, PODS, Object, Resource, resource_of
from tpu_training_operator.kube.credentials import Credentials
from tpu_training_operator.kube.encoding import decode, encode
from tpu_training_operator.kube.errors import ApiError, Silence, TooLarge, Unavailable, error_of, quote
from tpu_training_operator.kube.turns import PLACES, Turns

log = logging.getLogger(__name__)

T = TypeVar("T")

# Objects per page. Each is reduced to what the caller keeps before the next page is requested.
_PAGE = 50
_PAGE_OF_PODS = 100
# Bytes of one answer, or of one event of a watch. An object can have 1.5 MiB, as much as etcd accepts; a page that is
# larger than this is requested again with fewer objects. Parsing takes up to nine times as much memory: with a single
# character outside the Basic Multilingual Plane, Python stores every character of a text in four bytes.
_LONGEST_BODY = 8 * 2**20
_PAGES_AT_ONCE = 2
# A list ends after this many objects. Not all events of a pod are needed.
_MOST: Mapping[Resource, int] = {EVENTS: 100}
_TIMEOUT = aiohttp.ClientTimeout(total=30, connect=5)
_CONNECT_SECONDS = 5
# The server ends an idle watch, so a connection that stays silent for longer is dead.
_WATCH_SECONDS = 50
_SILENT_WATCH_SECONDS = 60.0
_TRIES_WHEN_OVERLOADED = 5
# The most seconds for all pauses of one request: other jobs need the operator's worker that waits.
_PATIENCE_SECONDS = 2.0
_LONGEST_RETRY_AFTER = 30.0
_TOKEN_LIFETIME = 60.0

# A larger change of the difference between the clocks is logged.
_NOTABLE_OFFSET = timedelta(seconds=10)
_SECOND = timedelta(seconds=1)
_TLS_OBJECT = re.compile(r" ssl:(<[^>]*>|\S+)")

# Returns what a list keeps of an object; None leaves the object out.
Keep = Callable[[Object], T | None]
# Receives the method, the HTTP status (0: no answer) and the seconds of each request, in the context of its caller.
OnAnswer = Callable[[str, int, float], None]


def local_time() -> datetime:
    return datetime.now(UTC)


class ServerClock:
    """The API server's clock, learned from the Date header of its answers. `local` is this machine's clock.

    The operator compares the present with times that the control plane wrote: when a pod was created or got its node,
    when its grace period ends. This machine's clock may be minutes off.
    """

    def __init__(self, local: Callable[[], datetime] = local_time) -> None:
        self.local = local
        self._offset = timedelta(0)

    def now(self) -> datetime:
        return self.local() + self._offset

    def learn(self, date: str | None, asked: datetime, answered: datetime) -> None:
        """Adjusts the clock to an answer. `date`: its Date header. `asked`, `answered`: local times.

        The server wrote the header between the two, in whole seconds, so it bounds the offset from both sides. The
        clock moves into these bounds and no further, so that it does not jump back and forth with every answer.
        """
        try:
            server_time = _parse_http_date(date or "")
        except ValueError:
            return
        least, most = server_time - answered - _SECOND, server_time + _SECOND - asked + _SECOND
        offset = min(max(self._offset, least), most)
        if abs(offset - self._offset) >= _NOTABLE_OFFSET:
            seconds = offset.total_seconds()
            log.warning("this machine's clock differs by %+.0f s from the API server's, which is used", -seconds)
        self._offset = offset


# Hundreds of answers per second have the same date, and parsing it takes longer than the rest of `learn`.
@lru_cache(maxsize=1)
def _parse_http_date(date: str) -> datetime:
    return parsedate_to_datetime(date).replace(tzinfo=UTC)


@dataclass(frozen=True)
class Selection:
    """Selects objects of one kind in a namespace (None: in all) by labels and fields. A label with None may have any
    value."""

    resource: Resource
    namespace: str | None
    labels: Mapping[str, str | None] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return self.resource.path(self.namespace)

    def query(self) -> dict[str, str]:
        selectors = {"labelSelector": self.labels, "fieldSelector": self.fields}
        return {
            name: ",".join(key if value is None else f"{key}={value}" for key, value in wanted.items())
            for name, wanted in selectors.items()
            if wanted
        }


@dataclass(frozen=True)
class Page(Generic[T]):
    """One page of a list. `items`: what is kept of its objects. `read`: the number of objects. `continue_token`: empty
    on the last page. A watch continues from `version`."""

    items: tuple[T, ...]
    read: int
    continue_token: str
    version: str


@dataclass(frozen=True)
class ClientOptions:
    """Options in which the operator and the command line differ.

    `turns` decides which request is sent next. `keep`: what `Client.list` keeps of objects, by kind; by default, the
    whole object. `clean` is applied to every object read. `patience`: the seconds for which a request may pause because
    the server asks.
    """

    agent: str = MANAGER
    turns: Turns = field(default_factory=Turns)
    on_answer: OnAnswer = lambda method, status, seconds: None
    keep: Mapping[Resource, Keep[Object]] = field(default_factory=dict)
    clean: Callable[[Object], Object] = lambda body: body
    patience: float = _PATIENCE_SECONDS
    connections: int = 2 * PLACES


class Client:
    """Implements the `Cluster` protocol with an API server; also offers pages, watches and streams."""

    def __init__(self, session: aiohttp.ClientSession, credentials: Credentials, options: ClientOptions) -> None:
        self._session = session
        self._credentials = credentials
        self._options = options
        self._turns = options.turns
        self._pages = asyncio.Semaphore(_PAGES_AT_ONCE)
        self._ssl = credentials.ssl_context()
        self._authorization: str | None = None
        self._authorized_at = float("-inf")
        self.last_answer = time.monotonic()
        self.clock = ServerClock()

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        return self._options.clean(await self.request("GET", f"{resource.path(namespace)}/{name}"))

    async def list(
        self,
        resource: Resource,
        namespace: str | None,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> list[Object]:
        selection = Selection(resource, namespace, labels or {}, fields or {})
        keep = self._options.keep.get(resource, lambda body: body)
        return [item async for page in self.pages(selection, keep) for item in page.items]

    async def create(self, body: Object) -> Object:
        resource = resource_of(body)
        # The job's schema does not know every field of a pod, and the API server would drop a misspelt one.
        strict = {"fieldValidation": "Strict"} if resource is PODS else {}
        path = resource.path(body["metadata"].get("namespace"))
        return await self.request("POST", path, body, {"fieldManager": MANAGER} | strict)

    async def update(self, body: Object) -> Object:
        return await self.request("PUT", _path_of(body), body, {"fieldManager": MANAGER})

    async def update_status(self, body: Object) -> Object:
        return await self.request("PUT", f"{_path_of(body)}/status", body, {"fieldManager": MANAGER})

    async def patch(self, resource: Resource, namespace: str, name: str, body: Object) -> Object:
        """Changes the fields in `body` (RFC 7386)."""
        return await self.request("PATCH", f"{resource.path(namespace)}/{name}", body, {"fieldManager": MANAGER})

    async def delete(
        self, resource: Resource, namespace: str, name: str, uid: str, *, grace_seconds: int | None = None
    ) -> Object | None:
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        answer = await self.request("DELETE", f"{resource.path(namespace)}/{name}", options)
        # If it was deleted in the meantime, the API server answers with its last state, without a version.
        is_gone = answer["kind"] == "Status" or "resourceVersion" not in answer["metadata"]
        return None if is_gone else answer

    async def pages(self, selection: Selection, keep: Keep[T]) -> AsyncIterator[Page[T]]:
        """Lists page by page, and keeps of each object what `keep` returns."""
        query = selection.query()
        limit = _PAGE_OF_PODS if selection.resource is PODS else _PAGE
        read, most = 0, _MOST.get(selection.resource, math.inf)
        while True:
            try:
                async with self._pages:
                    page = await self._page(selection.path, query | {"limit": str(limit)}, keep)
            except TooLarge:
                if limit == 1:
                    raise
                limit //= 2
                continue
            yield page
            read += page.read
            query["continue"] = page.continue_token
            if not page.continue_token or read >= most:
                return

    async def _page(self, path: str, query: Mapping[str, str], keep: Keep[T]) -> Page[T]:
        # A separate method, so that the raw page is freed before the next one is read.
        page = await self.request("GET", path, query=query)
        bodies, metadata = page["items"], page["metadata"]
        items = tuple(item for body in bodies if (item := keep(self._options.clean(body))) is not None)
        return Page(items, len(bodies), metadata.get("continue") or "", metadata.get("resourceVersion") or "")

    async def watch(self, selection: Selection, version: str) -> AsyncIterator[Object]:
        """Yields the events after `version` until the server ends the watch. The next watch continues from the last
        event's version."""
        query = selection.query() | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_SECONDS),
            "resourceVersion": version,
        }
        async with aclosing(self.stream(selection.path, query, silent_seconds=_SILENT_WATCH_SECONDS)) as pieces:
            async for line in _lines(pieces):
                event = _json_object(line)
                if event is None:
                    raise Unavailable(0, "NoObject", f"the watch was cut off: {quote(line)!r}")
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise error_of(int(status.get("code", 500)), status.get("reason"), status.get("message"))
                yield self._options.clean(event)

    async def request(
        self, method: str, path: str, sent: Object | None = None, query: Mapping[str, str] | None = None
    ) -> Object:
        async with self._answer(_HttpRequest(method, path, sent, query)) as response:
            body = await _read(response)
        answer = _json_object(body)
        if answer is None or "kind" not in answer:
            # A proxy has answered, or the answer was cut off.
            raise Unavailable(response.status, "NoObject", f"{method} {path}: answered with no object: {quote(body)}")
        return answer

    async def stream(
        self, path: str, query: Mapping[str, str], *, silent_seconds: float
    ) -> AsyncGenerator[bytes, None]:
        """Yields a long answer in pieces of any length. Raises Silence after `silent_seconds` without one."""
        limits = aiohttp.ClientTimeout(sock_connect=_CONNECT_SECONDS, sock_read=silent_seconds)
        async with self._answer(_HttpRequest("GET", path, query=query, limits=limits)) as response:
            try:
                async for piece in response.content.iter_any():
                    yield piece
            except TimeoutError:
                raise Silence(0, "Silence", f"GET {path}: no data for {silent_seconds:g} s") from None

    @asynccontextmanager
    async def _answer(self, request: "_HttpRequest") -> AsyncIterator[aiohttp.ClientResponse]:
        """Yields a successful answer before its body is read. An error while the caller reads it becomes an
        ApiError."""
        paused = 0.0
        async with self._turns.turn(request.method) as flow:
            for tries_left in reversed(range(_TRIES_WHEN_OVERLOADED)):
                async with self._send(request) as response:
                    if response.status < 400:
                        yield response
                        return
                    pause = _requested_pause(response)
                    error = await _refusal(response, pause or 0.0)
                if pause is None or not tries_left or paused + pause > self._options.patience:
                    raise error
                log.info("pausing %g s, as the API server asks: %s %s: %s", pause, request.method, request.path, error)
                paused += pause
                with flow.wait() if flow else nullcontext():
                    await asyncio.sleep(pause)

    @asynccontextmanager
    async def _send(self, request: "_HttpRequest") -> AsyncIterator[aiohttp.ClientResponse]:
        # A small compressed answer could become a large one before its bytes are counted.
        headers = {"Accept": "application/json, */*", "Accept-Encoding": "identity", "User-Agent": self._options.agent}
        if authorization := await self._current_authorization():
            headers["Authorization"] = authorization
        if request.sent is not None:
            kind = "merge-patch+json" if request.method == "PATCH" else "json"
            headers["Content-Type"] = f"application/{kind}"
        method, url = request.method, self._credentials.server.rstrip("/") + request.path
        began, asked = time.monotonic(), self.clock.local()
        try:
            async with self._session.request(
                method,
                url,
                data=None if request.sent is None else encode(request.sent),
                params=request.query,
                headers=headers,
                ssl=self._ssl,
                timeout=request.limits,
            ) as response:
                self.clock.learn(response.headers.get("Date"), asked, self.clock.local())
                if response.status == 401:
                    # The token was replaced earlier than expected.
                    self._authorized_at = float("-inf")
                else:
                    self.last_answer = time.monotonic()
                yield response
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            self._options.on_answer(method, 0, time.monotonic() - began)
            raise Unavailable(0, "NoAnswer", f"{method} {request.path}: {_why_no_answer(error)}") from error
        self._options.on_answer(method, response.status, time.monotonic() - began)

    async def _current_authorization(self) -> str | None:
        if time.monotonic() - self._authorized_at > _TOKEN_LIFETIME:
            self._authorization = await asyncio.to_thread(self._credentials.authorization)
            self._authorized_at = time.monotonic()
        return self._authorization


def _why_no_answer(error: Exception) -> str:
    """Returns the error in words. What aiohttp says of a failed connection names its own objects."""
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError):
        cause = error.os_error
        number = cause.errno or 0
        return os.strerror(number).lower() if number > 0 else cause.strerror or str(cause)
    return _TLS_OBJECT.sub("", str(error)) or type(error).__name__


@asynccontextmanager
async def connect(credentials: Credentials, options: ClientOptions | None = None) -> AsyncIterator[Client]:
    """Yields a client with its own connections, which are closed at the end."""
    options = options or ClientOptions()
    # A request that has its turn must find a connection: the writes of batches take at most half of them.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=options.connections)) as session:
        yield Client(session, credentials, options)


@dataclass(frozen=True)
class _HttpRequest:
    method: str
    path: str
    sent: Object | None = None
    query: Mapping[str, str] | None = None
    limits: aiohttp.ClientTimeout = field(default_factory=lambda: _TIMEOUT)


def _path_of(body: Object) -> str:
    metadata = body["metadata"]
    return f"{resource_of(body).path(metadata['namespace'])}/{metadata['name']}"


async def _read(response: aiohttp.ClientResponse) -> bytearray:
    """Returns the body. Raises TooLarge as soon as it is too long, which closes the connection."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > _LONGEST_BODY:
            what = f"{response.method} {response.url.path}"
            raise TooLarge(response.status, "TooLarge", f"{what}: the answer is longer than {_LONGEST_BODY} bytes")
    return body


async def _lines(pieces: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    """Yields the complete lines of a watch. The last line of a connection that breaks is dropped."""
    buffer = bytearray()
    async for piece in pieces:
        searched = len(buffer)
        buffer += piece
        while (end := buffer.find(b"\n", searched)) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            searched = 0
            if line:
                yield line
        if len(buffer) > _LONGEST_BODY:
            raise TooLarge(0, "TooLarge", f"the watch sent an event of more than {_LONGEST_BODY} bytes")


def _json_object(body: bytes | bytearray) -> Object | None:
    try:
        value = decode(body)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


async def _refusal(response: aiohttp.ClientResponse, pause: float) -> ApiError:
    body = await _read(response)
    answer = _json_object(body)
    if answer is None or "kind" not in answer:
        answer = {"message": quote(body)}
    reason, message = answer.get("reason"), answer.get("message")
    return error_of(response.status, reason, message, method=response.method, retry_after=pause)


def _requested_pause(response: aiohttp.ClientResponse) -> float | None:
    """Returns seconds; None if the server does not ask for a pause. A 429 asks for one even without a duration."""
    text = response.headers.get("Retry-After", "")
    if response.status != 429 and (response.status != 503 or not text):
        return None
    return min(float(text) if text.isdigit() else 1.0, _LONGEST_RETRY_AFTER)
