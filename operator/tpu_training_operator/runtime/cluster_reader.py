"""Reading a cluster for a person: objects, lists page by page, watches, and logs as they are written.

Used by `tpujob status`, `watch` and `logs`. Nothing is ever held as a whole but one object: a list is handed on by the
page, a watch by the event, a log by what the connection brings, however long its lines are.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tpu_training_operator.api.constants import CONTAINER_NAME
from tpu_training_operator.api.text import plain, plain_json
from tpu_training_operator.runtime.cluster import (
    ApiError,
    Forbidden,
    Invalid,
    NotFound,
    Object,
    Resource,
    Unavailable,
)
from tpu_training_operator.runtime.credentials import Credentials

_PAGE = 500
_AGENT = "tpujob"
_ANSWER = aiohttp.ClientTimeout(total=30, sock_connect=5)
# The server ends an idle watch itself, so a connection that says nothing for longer is dead.
_WATCH_SECONDS = 50
_WATCH = aiohttp.ClientTimeout(sock_connect=5, sock_read=60)
# The caller looks at the pod and asks again.
_LOG = aiohttp.ClientTimeout(sock_connect=5, sock_read=30)
_CONNECTIONS = 128
# An object is at most about 1.5 MiB in the API server's store.
_LONGEST_EVENT = 8 * 2**20
_LONGEST_QUOTE = 1000
_TRIES_WHEN_OVERLOADED = 5
_LONGEST_RETRY_AFTER = 30.0
_TOKEN_LIFETIME = 60.0
_EXPIRED = 410


@dataclass(frozen=True)
class Selection:
    """Objects of one kind: in a namespace (None: everywhere), with all the labels, or the one of that name."""

    resource: Resource
    namespace: str | None
    labels: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None

    def query(self) -> dict[str, str]:
        query = {}
        if self.labels:
            query["labelSelector"] = ",".join(f"{key}={value}" for key, value in self.labels.items())
        if self.name is not None:
            query["fieldSelector"] = f"metadata.name={self.name}"
        return query


@dataclass(frozen=True)
class Page:
    """A part of a list; `version` is where a watch goes on from."""

    items: list[Object]
    version: str


class Silence(Unavailable):
    """A log has brought nothing for a while: its worker has nothing to say, or its node is gone."""


def has_expired(error: ApiError) -> bool:
    """What was read is too old to go on from: list anew."""
    return error.status == _EXPIRED


class ClusterReader:
    """GET requests and nothing else. Every method raises the ApiErrors of `runtime.cluster`."""

    def __init__(self, session: aiohttp.ClientSession, credentials: Credentials) -> None:
        self._session = session
        self._credentials = credentials
        self._ssl = credentials.ssl_context()
        self._authorization: str | None = None
        self._authorized_at = float("-inf")

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        return await self._read(f"{resource.path(namespace)}/{name}", {})

    async def pages(self, selection: Selection) -> AsyncIterator[Page]:
        query = selection.query() | {"limit": str(_PAGE)}
        while True:
            page = await self._read(selection.resource.path(selection.namespace), query)
            yield Page(page["items"], page["metadata"].get("resourceVersion", ""))
            query["continue"] = page["metadata"].get("continue", "")
            if not query["continue"]:
                return

    async def watch(self, selection: Selection, version: str) -> AsyncIterator[Object]:
        """The events after `version`, until the server ends the watch; after that, watch on from the last one's."""
        query = selection.query() | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_SECONDS),
            "resourceVersion": version,
        }
        async with self._open(selection.resource.path(selection.namespace), query, _WATCH) as answer:
            async for line in _lines(answer):
                event = _object(line)
                if event is None:
                    raise Unavailable(0, "NoObject", f"the watch was cut off: {line[:_LONGEST_QUOTE]!r}")
                if event["type"] == "ERROR":
                    told = event["object"]
                    raise _error(int(told.get("code", 500)), told)
                yield event

    async def log(
        self, namespace: str, pod: str, *, follow: bool, tail: int | None = None, since: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The log of the pod's trainer, each line after its time; in pieces that end anywhere.

        `tail`: only so many lines at the end; `since`: only from this time on (the server reads it in whole seconds).
        Followed, it ends with the container, or with an API server that is stopped. Raises Silence after half a minute
        without a word, and Invalid for a container that has not started.
        """
        query = {"container": CONTAINER_NAME, "timestamps": "true", "follow": str(follow).lower()}
        if since is not None:
            query["sinceTime"] = since
        elif tail is not None:
            query["tailLines"] = str(tail)
        is_open = False
        try:
            async with self._open(f"/api/v1/namespaces/{namespace}/pods/{pod}/log", query, _LOG) as answer:
                is_open = True
                async for chunk in answer.content.iter_any():
                    yield chunk
        except Unavailable as error:
            if is_open and isinstance(error.__cause__, TimeoutError):
                raise Silence(0, "Silence", f"pod {pod} said nothing for a while") from error
            raise

    async def _read(self, path: str, query: Mapping[str, str]) -> Object:
        async with self._open(path, query, _ANSWER) as answer:
            text = await answer.read()
        read = _object(text)
        if read is None:
            raise Unavailable(200, "NoObject", f"GET {path}: not answered in JSON: {text[:_LONGEST_QUOTE]!r}")
        return read

    @asynccontextmanager
    async def _open(
        self, path: str, query: Mapping[str, str], limits: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A good answer, its body not read yet. What goes wrong while it is read becomes an ApiError, too."""
        url = self._credentials.server.rstrip("/") + path
        try:
            for left in reversed(range(_TRIES_WHEN_OVERLOADED)):
                headers = {"Accept": "application/json, */*", "User-Agent": _AGENT} | await self._authorized()
                async with self._session.get(
                    url, params=query, headers=headers, ssl=self._ssl, timeout=limits
                ) as answer:
                    if answer.status == 429 and left:
                        await asyncio.sleep(_retry_after(answer.headers))
                        continue
                    if answer.status >= 400:
                        raise await self._refusal(answer)
                    yield answer
                    return
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise Unavailable(0, "NoAnswer", f"GET {url}: {error or type(error).__name__}") from error

    async def _refusal(self, answer: aiohttp.ClientResponse) -> ApiError:
        if answer.status == 401:
            # The token was replaced before we thought it would be.
            self._authorized_at = float("-inf")
        text = await answer.content.read(_LONGEST_EVENT)
        quoted = {"message": plain(text[:_LONGEST_QUOTE].decode(errors="replace")).strip()}
        return _error(answer.status, _object(text) or quoted)

    async def _authorized(self) -> dict[str, str]:
        if time.monotonic() - self._authorized_at > _TOKEN_LIFETIME:
            self._authorization = await asyncio.to_thread(self._credentials.authorization)
            self._authorized_at = time.monotonic()
        return {"Authorization": self._authorization} if self._authorization else {}


@asynccontextmanager
async def connect_reader(credentials: Credentials) -> AsyncIterator[ClusterReader]:
    """A reader with its own connections, closed at the end."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=_CONNECTIONS)) as session:
        yield ClusterReader(session, credentials)


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The whole lines of the body. A rest without a newline is what a cut connection leaves, and is dropped."""
    held = bytearray()
    async for chunk in answer.content.iter_any():
        searched = len(held)
        held += chunk
        while (end := held.find(b"\n", searched)) >= 0:
            line = bytes(held[:end])
            del held[: end + 1]
            searched = 0
            if line:
                yield line
        if len(held) > _LONGEST_EVENT:
            raise Unavailable(0, "TooLong", f"the watch sent an event of more than {_LONGEST_EVENT} bytes")


def _object(text: bytes) -> Object | None:
    """The JSON object in the text, fit to be shown on a terminal; None where the text holds none."""
    try:
        parsed: Any = json.loads(text)
    except ValueError:
        return None
    return plain_json(parsed) if isinstance(parsed, dict) else None


def _retry_after(headers: Mapping[str, str]) -> float:
    text = headers.get("Retry-After", "")
    return min(float(text) if text.isdigit() else 1.0, _LONGEST_RETRY_AFTER)


def _error(status: int, answer: Object) -> ApiError:
    kinds: dict[int, type[ApiError]] = {400: Invalid, 403: Forbidden, 404: NotFound}
    return kinds.get(status, Unavailable)(status, str(answer.get("reason", "")), str(answer.get("message", "")))
