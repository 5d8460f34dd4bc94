"""The `Cluster` protocol against a Kubernetes API server: raw JSON over aiohttp.

Built by `main`. A short pause that the server asks for (429, or 503 with Retry-After) is made here; everything else is
told to the caller, whose work queue decides about another try.

What is read is bounded: whoever may create objects in some namespace decides how large they are, and one page of them
must not take more memory than this process has.
"""

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from tpu_training_operator.api.constants import MANAGER
from tpu_training_operator.runtime.cluster import (
    EVENTS,
    PODS,
    AlreadyExists,
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    Object,
    Resource,
    Unavailable,
    resource_of,
)
from tpu_training_operator.runtime.credentials import Credentials
from tpu_training_operator.runtime.server_clock import ServerClock
from tpu_training_operator.runtime.throttle import Throttle

log = logging.getLogger(__name__)

# Objects per page, each thinned out before the next page is requested.
_PAGE = 50
_PAGE_OF_PODS = 100
# Bytes of one answer. An object can be as large as etcd takes, 1.5 MiB; a page that is larger than this is requested
# again with fewer objects. Parsing takes up to nine times as much: one character beyond the Basic Multilingual Plane
# makes Python hold every character of a text in four bytes.
_LONGEST_BODY = 8 * 2**20
_PAGES_AT_ONCE = 2
# A list ends after so many objects that were read, kept or not. Nobody needs all the events of a pod.
_MOST: Mapping[Resource, int] = {EVENTS: 100}
_TIMEOUT = aiohttp.ClientTimeout(total=30, connect=5)
_TRIES_WHEN_OVERLOADED = 5
# All pauses of one request. A worker that waits longer is missing for other jobs.
_LONGEST_PAUSE = 2.0
_LONGEST_RETRY_AFTER = 30.0
_TOKEN_LIFETIME = 60.0
_LONGEST_QUOTE = 1000

# What a list returns of an object; None to leave it out.
Keep = Callable[[Object], Object | None]
# Receives the method, the HTTP status (0: no answer) and the seconds of each request, in the context of its caller.
OnAnswer = Callable[[str, int, float], None]


@dataclass(frozen=True)
class _Page:
    """What is kept of a page of a list, how many objects it had, and the token of the following one, if any."""

    kept: tuple[Object, ...]
    read: int
    following: str


class _TooLarge(Unavailable):
    """The answer is longer than what is read of one."""


class KubernetesCluster:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        credentials: Credentials,
        throttle: Throttle,
        on_answer: OnAnswer | None = None,
        keep: Mapping[Resource, Keep] | None = None,
    ) -> None:
        self._session = session
        self._credentials = credentials
        self._throttle = throttle
        self._on_answer = on_answer
        self._keep = keep or {}
        self._pages = asyncio.Semaphore(_PAGES_AT_ONCE)
        self._ssl = credentials.ssl_context()
        self._authorization: str | None = None
        self._authorized_at = float("-inf")
        self.last_answer = time.monotonic()
        self.clock = ServerClock()

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        return await self._request("GET", f"{resource.path(namespace)}/{name}")

    async def list(
        self,
        resource: Resource,
        namespace: str | None,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> list[Object]:
        query: dict[str, str] = {}
        if labels:
            query["labelSelector"] = _selector(labels)
        if fields:
            query["fieldSelector"] = _selector(fields)
        limit = _PAGE_OF_PODS if resource is PODS else _PAGE
        read, most = 0, _MOST.get(resource, math.inf)
        items: list[Object] = []
        while True:
            query["limit"] = str(limit)
            try:
                async with self._pages:
                    page = await self._page(resource, namespace, query)
            except _TooLarge:
                if limit == 1:
                    raise
                limit //= 2
                continue
            items += page.kept
            read += page.read
            query["continue"] = page.following
            if not page.following or read >= most:
                return items

    async def _page(self, resource: Resource, namespace: str | None, query: Mapping[str, str]) -> _Page:
        # A method of its own, so that the whole page is gone before the next one is there.
        page = await self._request("GET", resource.path(namespace), query=query)
        keep = self._keep.get(resource, _as_it_is)
        found = page["items"]
        kept = tuple(thin for thin in map(keep, found) if thin is not None)
        return _Page(kept, len(found), page["metadata"].get("continue") or "")

    async def create(self, body: Object) -> Object:
        path = resource_of(body).path(body["metadata"].get("namespace"))
        return await self._request("POST", path, body, query={"fieldManager": MANAGER})

    async def update(self, body: Object) -> Object:
        """Replace the object; Conflict unless metadata.resourceVersion is the current one."""
        metadata = body["metadata"]
        path = f"{resource_of(body).path(metadata['namespace'])}/{metadata['name']}"
        return await self._request("PUT", path, body, query={"fieldManager": MANAGER})

    async def update_status(self, body: Object) -> Object:
        metadata = body["metadata"]
        path = f"{resource_of(body).path(metadata['namespace'])}/{metadata['name']}/status"
        return await self._request("PUT", path, body, query={"fieldManager": MANAGER})

    async def delete(
        self, resource: Resource, namespace: str, name: str, uid: str, *, grace_seconds: int | None = None
    ) -> None:
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        await self._request("DELETE", f"{resource.path(namespace)}/{name}", options)

    async def _request(
        self, method: str, path: str, sent: Object | None = None, query: Mapping[str, str] | None = None
    ) -> Object:
        paused = 0.0
        for tries_left in reversed(range(_TRIES_WHEN_OVERLOADED)):
            await self._throttle.wait()
            status, headers, body = await self._send(method, path, sent, query)
            pause = _pause_asked_for(status, headers)
            if pause is None or not tries_left or paused + pause > _LONGEST_PAUSE:
                break
            log.warning(
                "pausing %g s, as the API server asks: %s %s: %s", pause, method, path, _error(method, status, body)
            )
            paused += pause
            await asyncio.sleep(pause)
        if status >= 400:
            raise _error(method, status, body, pause)
        answer = _object(body)
        if answer is None:
            # A proxy on the way, or an answer that was cut off.
            raise Unavailable(status, "NoObject", f"{method} {path}: answered with no object: {_quote(body)}")
        return answer

    async def _send(
        self, method: str, path: str, sent: Object | None, query: Mapping[str, str] | None
    ) -> tuple[int, Mapping[str, str], bytearray]:
        # Compressed, a small answer could become a large one before anybody has counted it.
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": MANAGER}
        if authorization := await self._current_authorization():
            headers["Authorization"] = authorization
        url = self._credentials.server.rstrip("/") + path
        began, asked = time.monotonic(), self.clock.local()
        try:
            async with self._session.request(
                method, url, json=sent, params=query, headers=headers, ssl=self._ssl, timeout=_TIMEOUT
            ) as response:
                body = await _read(response)
                self._answered(method, response.status, began)
                self.clock.heard(response.headers.get("Date"), asked, self.clock.local())
                if response.status == 401:
                    # The token was replaced before we thought it would be.
                    self._authorized_at = float("-inf")
                else:
                    self.last_answer = time.monotonic()
                return response.status, response.headers, body
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            self._answered(method, 0, began)
            raise Unavailable(0, "NoAnswer", f"{method} {path}: {error or type(error).__name__}") from error

    def _answered(self, method: str, status: int, began: float) -> None:
        if self._on_answer:
            self._on_answer(method, status, time.monotonic() - began)

    async def _current_authorization(self) -> str | None:
        if time.monotonic() - self._authorized_at > _TOKEN_LIFETIME:
            self._authorization = await asyncio.to_thread(self._credentials.authorization)
            self._authorized_at = time.monotonic()
        return self._authorization


@asynccontextmanager
async def connect(
    credentials: Credentials,
    requests_per_second: float,
    burst: int,
    on_answer: OnAnswer | None = None,
    keep: Mapping[Resource, Keep] | None = None,
) -> AsyncIterator[KubernetesCluster]:
    """A cluster adapter with its own connections, closed at the end. `keep`: what `list` returns of objects of a kind,
    where not all of them is wanted."""
    # The throttle bounds the rate; the connection limit bounds what may be under way at once.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64)) as session:
        throttle = Throttle(requests_per_second, burst, time.monotonic)
        yield KubernetesCluster(session, credentials, throttle, on_answer, keep)


def _as_it_is(found: Object) -> Object:
    return found


def _selector(wanted: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in wanted.items())


async def _read(response: aiohttp.ClientResponse) -> bytearray:
    """The body. Raises _TooLarge as soon as it is longer than what is read of one; the connection ends then."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > _LONGEST_BODY:
            what = f"{response.method} {response.url.path}"
            raise _TooLarge(response.status, "TooLarge", f"{what}: the answer is longer than {_LONGEST_BODY} bytes")
    return body


def _object(body: bytearray) -> Object | None:
    """The API object in the answer; None where it holds none."""
    try:
        parsed: Any = json.loads(body)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) and "kind" in parsed else None


def _quote(body: bytearray) -> str:
    return body[:_LONGEST_QUOTE].decode(errors="replace").strip()


def _pause_asked_for(status: int, headers: Mapping[str, str]) -> float | None:
    """In seconds; None where there is nothing to wait for. Overload asks for one even without saying how long."""
    text = headers.get("Retry-After", "")
    if status not in (429, 503) or (status == 503 and not text):
        return None
    return min(float(text) if text.isdigit() else 1.0, _LONGEST_RETRY_AFTER)


def _error(method: str, status: int, body: bytearray, pause: float | None = None) -> ApiError:
    answer = _object(body) or {"message": _quote(body)}
    reason, message = str(answer.get("reason", "")), str(answer.get("message", ""))
    kinds: dict[int, type[ApiError]] = {
        400: Invalid,
        403: Forbidden,
        404: NotFound,
        # Larger than etcd takes.
        413: Invalid,
        409: AlreadyExists if method == "POST" and reason == "AlreadyExists" else Conflict,
        422: Invalid,
    }
    kind = kinds.get(status, Unavailable)
    return kind(status, reason, message, retry_after=pause or 0.0)
