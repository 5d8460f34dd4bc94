"""A proxy between an operator and the API server that misbehaves on command, and keeps a journal.

The operator talks TLS to it as if to the API server. Requests without a fault pass through unchanged, with the
operator's own token. Every fault that strikes is counted, so that a test can prove that it did. The journal says what
the API server really accepted, which the operator may never have heard.
"""

import asyncio
import json
import random
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from tests.cluster.control_plane import ControlPlane
from tests.cluster.deadlines import deadline
from tests.cluster.ports import LOOPBACK, free_port
from tests.cluster.processes import wait_until
from tests.controlplane.faults import Answer, Call, Entry, Fault, Hold, Reset, Say, Silence

# Hop-by-hop (RFC 9110 7.6.1), or recomputed for the body that is sent.
_NOT_PASSED_ON = ("Connection", "Keep-Alive", "Transfer-Encoding", "Content-Length", "Host")
_STOP_SECONDS = 10.0
_WAIT_SECONDS = 120.0


@dataclass
class _Armed:
    fault: Fault
    left: float
    off: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class _OpenWatch:
    call: Call
    request: web.BaseRequest
    response: web.StreamResponse
    relay: asyncio.Task[None]
    is_silent: bool = False


@dataclass(frozen=True)
class _Upstream:
    status: int
    headers: CIMultiDict[str]
    body: bytes


class FaultyProxy:
    """`with FaultyProxy(cluster, seed=0) as proxy:`; its own thread serves until the end."""

    def __init__(self, cluster: ControlPlane, seed: int) -> None:
        self._server = cluster.server
        self._to_server = ssl.create_default_context(cafile=str(cluster.ca_file))
        self._to_operator = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._to_operator.load_cert_chain(cluster.directory / "serving.crt", cluster.directory / "serving.key")
        self._random = random.Random(seed)
        self._armed: list[_Armed] = []
        self._watches: set[_OpenWatch] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-proxy", daemon=True)
        self._session: aiohttp.ClientSession
        self._runner: web.ServerRunner
        self.host = LOOPBACK
        self.port = free_port()
        self.fired: Counter[str] = Counter()
        self.journal: list[Entry] = []

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(deadline(_STOP_SECONDS))
        self._loop.close()

    @contextmanager
    def misbehaving(self, *faults: Fault) -> Iterator[None]:
        """The faults are on inside the block. At its end, delayed requests and answers continue."""
        armed = [_Armed(fault, fault.times) for fault in faults]
        self._do(self._arm(armed))
        try:
            yield
        finally:
            self._do(self._disarm(armed))

    def taken(self, verb: str, resource: str) -> list[Entry]:
        """The requests of this kind that the API server carried out."""
        return [
            entry
            for entry in list(self.journal)
            if (entry.call.verb, entry.call.resource) == (verb, resource) and 200 <= entry.taken < 300
        ]

    def wait_until_fired(self, name: str, times: int, timeout: float = _WAIT_SECONDS) -> None:
        wait_until(lambda: self.fired[name] >= times, timeout=timeout, what=f"{name} has struck {times} times")

    def wait_until_told(self, status: int) -> None:
        """Waits until a request that arrived after this call gets this answer."""
        before = len(self.journal)
        wait_until(
            lambda: any(entry.told == status for entry in self.journal[before:]),
            timeout=_WAIT_SECONDS,
            what=f"{status} is answered",
        )

    def number_taken(self, status: int, concerns: Callable[[Call], bool]) -> int:
        """How many such calls the API server has answered with this status."""
        return sum(entry.taken == status and concerns(entry.call) for entry in list(self.journal))

    def wait_until_taken(self, status: int, concerns: Callable[[Call], bool], times: int) -> None:
        wait_until(
            lambda: self.number_taken(status, concerns) >= times,
            timeout=_WAIT_SECONDS,
            what=f"the API server has answered {status} {times} times",
        )

    @contextmanager
    def until_requests(self, number: int) -> Iterator[None]:
        """Stays at the end of the block until so many requests have been made since its start."""
        until = len(self.journal) + number
        yield
        wait_until(lambda: len(self.journal) >= until, timeout=_WAIT_SECONDS, what=f"{number} further requests")

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(deadline(_STOP_SECONDS))

    async def _start(self) -> None:
        # No limits on time or size: the tests are about the operator's own limits.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._to_server),
            timeout=aiohttp.ClientTimeout(),
            auto_decompress=False,
        )
        self._runner = web.ServerRunner(web.Server(self._serve, access_log=None), shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port, ssl_context=self._to_operator).start()

    async def _stop(self) -> None:
        await self._runner.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._session.close()

    async def _arm(self, armed: list[_Armed]) -> None:
        self._armed += armed
        for watch in list(self._watches):
            if (struck := self._strike(watch.call, Reset, Say, Silence)) is not None:
                await _strike_watch(watch, struck.fault.effect)

    async def _disarm(self, armed: list[_Armed]) -> None:
        for one in armed:
            one.off.set()
        self._armed = [one for one in self._armed if one not in armed]

    def _strike(self, call: Call, *effects: type) -> _Armed | None:
        """The first fault with one of the effects that strikes this call, now counted."""
        for one in self._armed:
            fits = one.left > 0 and isinstance(one.fault.effect, effects) and one.fault.concerns(call)
            if fits and self._random.random() < one.fault.share:
                one.left -= 1
                self.fired[one.fault.name] += 1
                return one
        return None

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        at = time.monotonic()
        body = await request.read()
        call = _call(request, body)
        told, taken, uid, told_to_wait = 0, 0, "", 0
        try:
            struck = self._strike(call, Answer, Reset, Hold)
            effect = struck.fault.effect if struck else None
            if isinstance(effect, Answer):
                told, told_to_wait = effect.status, effect.retry_after or 0
                return web.Response(status=told, text=effect.body, headers=_headers(effect))
            if effect == Reset(None):
                return _reset(request)
            await _held_back(struck)
            try:
                if call.verb == "watch":
                    response = await self._relay_watch(request, call)
                    told = taken = response.status
                    return response
                upstream = await self._forward(request, body)
            except aiohttp.ClientError:
                # If the API server is down, it looks the same from here.
                return _reset(request)
            taken, uid = upstream.status, _uid(upstream)
            await _held_back(struck)
            if isinstance(effect, Reset):
                return await _part(request, upstream, effect.after or 0)
            told = taken
            return web.Response(status=told, body=upstream.body, headers=upstream.headers)
        finally:
            self.journal.append(Entry(call, at, time.monotonic(), taken, told, uid, told_to_wait))

    async def _forward(self, request: web.BaseRequest, body: bytes) -> _Upstream:
        url = self._server + request.raw_path
        async with self._session.request(
            request.method, url, data=body or None, headers=_passed_on(request.headers)
        ) as answer:
            return _Upstream(answer.status, _passed_on(answer.headers), await answer.read())

    async def _relay_watch(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        url = self._server + request.raw_path
        async with self._session.get(url, headers=_passed_on(request.headers)) as answer:
            response = web.StreamResponse(status=answer.status, headers=_passed_on(answer.headers))
            await response.prepare(request)
            watch = _OpenWatch(call, request, response, asyncio.create_task(_relay(answer.content, response)))
            self._watches.add(watch)
            try:
                if (struck := self._strike(call, Say, Silence)) is not None:
                    await _strike_watch(watch, struck.fault.effect)
                await asyncio.wait({watch.relay})
            finally:
                self._watches.discard(watch)
                # Closed, it would wait for the API server to say goodbye, for longer than this loop may run.
                if answer.connection is not None and answer.connection.transport is not None:
                    answer.connection.transport.abort()
            if watch.is_silent:
                # It does not even end.
                await asyncio.Event().wait()
            return response


async def _strike_watch(watch: _OpenWatch, effect: object) -> None:
    watch.relay.cancel()
    if isinstance(effect, Silence):
        watch.is_silent = True
    elif isinstance(effect, Say):
        await watch.response.write(effect.line.encode() + b"\n")
        await watch.response.write_eof()
    elif isinstance(effect, Reset):
        _reset(watch.request)


async def _relay(content: aiohttp.StreamReader, response: web.StreamResponse) -> None:
    """Copies whole lines, so that an injected line never splits one. Ends with either side."""
    rest = b""
    with suppress(aiohttp.ClientError, ConnectionError):
        async for piece in content.iter_any():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                await response.write(line + b"\n")


_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def _call(request: web.BaseRequest, body: bytes) -> Call:
    # /api/v1/... or /apis/GROUP/VERSION/..., then [namespaces/NAMESPACE/]RESOURCE[/NAME[/PART]].
    words = request.path.strip("/").split("/")
    words = words[2:] if words[0] == "api" else words[3:]
    if words[:1] == ["namespaces"] and len(words) > 2:
        words = words[2:]
    resource, name, part = [*words, "", "", ""][:3]
    verb = _VERBS.get(request.method, "get" if name else "list")
    if request.query.get("watch") == "true":
        verb = "watch"
    if verb == "create":
        name = json.loads(body)["metadata"]["name"]
    return Call(verb, f"{resource}/{part}" if part else resource, name, request.raw_path)


async def _held_back(struck: _Armed | None) -> None:
    if struck is None or not isinstance(struck.fault.effect, Hold):
        return
    try:
        await asyncio.wait_for(struck.off.wait(), struck.fault.effect.seconds)
    except TimeoutError:
        return


def _reset(request: web.BaseRequest) -> web.StreamResponse:
    if request.transport is not None:
        connection: socket.socket = request.transport.get_extra_info("socket")
        # SO_LINGER on with a timeout of 0: close(2) then sends RST (socket(7)).
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.transport.abort()
    return web.Response()


async def _part(request: web.BaseRequest, upstream: _Upstream, length: int) -> web.StreamResponse:
    response = web.StreamResponse(status=upstream.status, headers=upstream.headers)
    response.content_length = len(upstream.body)
    await response.prepare(request)
    await response.write(upstream.body[:length])
    return _reset(request)


def _passed_on(headers: Any) -> CIMultiDict[str]:
    copy = CIMultiDict(headers)
    for name in _NOT_PASSED_ON:
        copy.popall(name, None)
    return copy


def _headers(answer: Answer) -> dict[str, str]:
    retry_after = {} if answer.retry_after is None else {"Retry-After": str(answer.retry_after)}
    return {"Content-Type": "application/json"} | retry_after


def _uid(upstream: _Upstream) -> str:
    if upstream.status != 201:
        return ""
    return str(json.loads(upstream.body).get("metadata", {}).get("uid", ""))
