"""The `Cluster` protocol against a Kubernetes API server: raw JSON over aiohttp.

Built by `main`. Overload (429, or 503 with Retry-After) is waited out here as the server asks; everything else is told
to the caller, whose work queue decides about another try.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tpu_training_operator.api.constants import MANAGER
from tpu_training_operator.runtime.cluster import (
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
from tpu_training_operator.runtime.observers import SILENT_REQUESTS, RequestObserver
from tpu_training_operator.runtime.pulse import beat
from tpu_training_operator.runtime.server_clock import ServerClock
from tpu_training_operator.runtime.throttle import Throttle

log = logging.getLogger(__name__)

# Objects of a page, which are read and thinned out before the next one is asked for. A job can be as large as etcd
# takes, over a megabyte.
_PAGE = 50
_PAGE_OF_PODS = 100
_TIMEOUT = aiohttp.ClientTimeout(total=30, connect=5)
_TRIES_WHEN_OVERLOADED = 5
_LONGEST_RETRY_AFTER = 30.0
_TOKEN_LIFETIME = 60.0
_LONGEST_QUOTE = 1000


class KubernetesCluster:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        credentials: Credentials,
        throttle: Throttle,
        observer: RequestObserver = SILENT_REQUESTS,
        keep: Mapping[Resource, Callable[[Object], Object]] | None = None,
    ) -> None:
        self._session = session
        self._credentials = credentials
        self._throttle = throttle
        self._observer = observer
        self._keep = keep or {}
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
        query = {"limit": str(_PAGE_OF_PODS if resource is PODS else _PAGE)}
        if labels:
            query["labelSelector"] = _selector(labels)
        if fields:
            query["fieldSelector"] = _selector(fields)
        keep = self._keep.get(resource, _as_it_is)
        items: list[Object] = []
        while True:
            page = await self._request("GET", resource.path(namespace), query=query)
            items += map(keep, page["items"])
            query["continue"] = page["metadata"].get("continue", "")
            if not query["continue"]:
                return items

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
        self, method: str, path: str, body: Object | None = None, query: Mapping[str, str] | None = None
    ) -> Object:
        for tries_left in reversed(range(_TRIES_WHEN_OVERLOADED)):
            await self._throttle.wait()
            status, headers, text = await self._send(method, path, body, query)
            pause = _pause_asked_for(status, headers)
            if pause is None or not tries_left:
                break
            log.warning(
                "pausing %g s, as the API server asks: %s %s: %s", pause, method, path, _error(method, status, text)
            )
            await asyncio.sleep(pause)
        if status >= 400:
            raise _error(method, status, text)
        answer = _object(text)
        if answer is None:
            # A proxy on the way, or an answer that was cut off.
            raise Unavailable(status, "NoObject", f"{method} {path}: answered with no object: {_quote(text)}")
        return answer

    async def _send(
        self, method: str, path: str, body: Object | None, query: Mapping[str, str] | None
    ) -> tuple[int, Mapping[str, str], str]:
        headers = {"Accept": "application/json", "User-Agent": MANAGER}
        if authorization := await self._current_authorization():
            headers["Authorization"] = authorization
        url = self._credentials.server.rstrip("/") + path
        began, asked = time.monotonic(), self.clock.local()
        try:
            async with self._session.request(
                method, url, json=body, params=query, headers=headers, ssl=self._ssl, timeout=_TIMEOUT
            ) as response:
                text = await response.text(errors="replace")
                self._observer.answered(method, response.status, time.monotonic() - began)
                self.clock.heard(response.headers.get("Date"), asked, self.clock.local())
                if response.status == 401:
                    # The token was replaced before we thought it would be.
                    self._authorized_at = float("-inf")
                else:
                    self.last_answer = time.monotonic()
                return response.status, response.headers, text
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            self._observer.answered(method, 0, time.monotonic() - began)
            raise Unavailable(0, "NoAnswer", f"{method} {path}: {error or type(error).__name__}") from error
        finally:
            beat()

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
    observer: RequestObserver = SILENT_REQUESTS,
    keep: Mapping[Resource, Callable[[Object], Object]] | None = None,
) -> AsyncIterator[KubernetesCluster]:
    """A cluster adapter with its own connections, closed at the end. `keep`: what `list` returns of objects of a kind,
    where not all of them is wanted."""
    # The throttle bounds the rate; the connection limit bounds what may be under way at once.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64)) as session:
        throttle = Throttle(requests_per_second, burst, time.monotonic)
        yield KubernetesCluster(session, credentials, throttle, observer, keep)


def _as_it_is(found: Object) -> Object:
    return found


def _selector(wanted: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in wanted.items())


def _object(text: str) -> Object | None:
    """The API object in the text; None where it holds none."""
    try:
        parsed: Any = json.loads(text)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) and "kind" in parsed else None


def _quote(text: str) -> str:
    return text[:_LONGEST_QUOTE].strip()


def _pause_asked_for(status: int, headers: Mapping[str, str]) -> float | None:
    """In seconds; None where there is nothing to wait for. Overload asks for one even without saying how long."""
    text = headers.get("Retry-After", "")
    if status not in (429, 503) or (status == 503 and not text):
        return None
    return min(float(text) if text.isdigit() else 1.0, _LONGEST_RETRY_AFTER)


def _error(method: str, status: int, text: str) -> ApiError:
    answer = _object(text) or {"message": _quote(text)}
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
    return kind(status, reason, message)
