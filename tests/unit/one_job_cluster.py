"""An API server on loopback that knows jobs, their pods and the pods' logs, and breaks off when it is told to.

For the tests of `tpujob watch`, `status` and `logs`: the answers have the form and the codes of a real one, which
tests/controlplane and tests/e2e ask the same questions.
"""

import asyncio
import json
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.client import Configuration

from tpu_training_operator.kube.cluster import JOBS, PODS, Resource
from tpu_training_operator.kube.credentials import Credentials

Object = dict[str, Any]
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]

_GROUP, _VERSION = JOBS.api_version.split("/")
_VERBS = ["get", "list", "watch"]
# What kopf looks up before it watches.
DISCOVERY: dict[str, Object] = {
    "/api": {"versions": ["v1"]},
    "/api/v1": {"resources": [{"name": "namespaces", "singularName": "", "kind": "Namespace", "namespaced": False}]},
    "/apis": {
        "groups": [{"name": _GROUP, "versions": [{"version": _VERSION}], "preferredVersion": {"version": _VERSION}}]
    },
    f"/apis/{JOBS.api_version}": {
        "resources": [{"name": JOBS.plural, "singularName": "", "kind": JOBS.kind, "namespaced": True, "verbs": _VERBS}]
    },
}
_NAMESPACED = "/{api:apis?/.+}/namespaces/{namespace}"


@dataclass
class OneJobCluster:
    """`logs`: by pod, what its container has written; None: it has not started. `faults`: by what is asked for ("list
    pods", "watch jobs", "get job", "log digits-1-0-0"), the answers that come before the right one."""

    jobs: dict[str, Object] = field(default_factory=dict)
    pods: dict[str, Object] = field(default_factory=dict)
    logs: dict[str, bytes | None] = field(default_factory=dict)
    faults: dict[str, list[Answer]] = field(default_factory=lambda: defaultdict(list))
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    url: str = ""
    version: int = 100
    _watches: dict[str, list["asyncio.Queue[Object | None]"]] = field(default_factory=lambda: defaultdict(list))

    def show(self, *bodies: Object) -> None:
        """The objects are like this from now on."""
        for body in bodies:
            self._store(body, "ADDED")

    def remove(self, kind: str, name: str) -> None:
        self._store(self._all(kind)[name], "DELETED")

    def tell(self, plural: str, event: Object | None) -> None:
        """Every watch of that kind gets the event as it is; None ends it."""
        for queue in self._watches[plural]:
            queue.put_nowait(event)

    def queries(self, what: str) -> list[dict[str, str]]:
        return [query for asked, query in self.asked if asked == what]

    def application(self) -> web.Application:
        app = web.Application()
        for path, answer in DISCOVERY.items():
            app.router.add_get(path, partial(_discovered, answer))
        for resource in (JOBS, PODS):
            app.router.add_get(resource.path("{namespace}"), self._of_many(resource))
            app.router.add_get(resource.path(None), self._of_many(resource))
            app.router.add_get(resource.path("{namespace}") + "/{name}", self._of_one(resource))
        app.router.add_get(PODS.path("{namespace}") + "/{name}/log", self._log)
        return app

    def _store(self, body: Object, event: str) -> None:
        self.version += 1
        body = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}
        plural = JOBS.plural if body["kind"] == JOBS.kind else PODS.plural
        name = body["metadata"]["name"]
        if event == "DELETED":
            del self._all(plural)[name]
        else:
            self._all(plural)[name] = body
        self.tell(plural, {"type": event, "object": body})

    def _all(self, plural: str) -> dict[str, Object]:
        return self.jobs if plural == JOBS.plural else self.pods

    async def _fault(self, what: str, request: web.Request) -> web.StreamResponse | None:
        self.asked.append((what, dict(request.query)))
        waiting = self.faults[what]
        return await waiting.pop(0)(request) if waiting else None

    def _of_one(self, resource: Resource) -> Answer:
        async def answer(request: web.Request) -> web.StreamResponse:
            if fault := await self._fault(f"get {resource.kind}", request):
                return fault
            found = self._all(resource.plural).get(request.match_info["name"])
            return web.json_response(found) if found else status(404, "NotFound", "not found")

        return answer

    def _of_many(self, resource: Resource) -> Answer:
        async def answer(request: web.Request) -> web.StreamResponse:
            watches = request.query.get("watch") == "true"
            if fault := await self._fault(f"{'watch' if watches else 'list'} {resource.plural}", request):
                return fault
            if watches:
                return await self._watch(resource.plural, request)
            items = list(self._all(resource.plural).values())
            return web.json_response(
                {"kind": f"{resource.kind}List", "metadata": {"resourceVersion": str(self.version)}, "items": items}
            )

        return answer

    async def _watch(self, plural: str, request: web.Request) -> web.StreamResponse:
        queue: asyncio.Queue[Object | None] = asyncio.Queue()
        known = int(request.query["resourceVersion"])
        for body in self._all(plural).values():
            if int(body["metadata"]["resourceVersion"]) > known:
                queue.put_nowait({"type": "ADDED", "object": body})
        self._watches[plural].append(queue)
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while (event := await queue.get()) is not None:
                await response.write(json.dumps(event).encode() + b"\n")
        finally:
            self._watches[plural].remove(queue)
        return response

    async def _log(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if fault := await self._fault(f"log {name}", request):
            return fault
        if name not in self.logs:
            return status(404, "NotFound", f'pods "{name}" not found')
        log = self.logs[name]
        if log is None:
            message = f'container "trainer" in pod "{name}" is waiting to start: ContainerCreating'
            return status(400, "BadRequest", message)
        return web.Response(body=selected(log, request.query))


async def _discovered(answer: Object, _: web.Request) -> web.Response:
    return web.json_response(answer)


def selected(log: bytes, query: Any) -> bytes:
    """What a kubelet sends of it: lines since a time in whole seconds, or the last ones."""
    lines = log.splitlines(keepends=True)
    if since := query.get("sinceTime"):
        lines = [line for line in lines if line[:19] >= since[:19].encode()]
    elif tail := query.get("tailLines"):
        lines = lines[len(lines) - int(tail) :]
    return b"".join(lines)


def status(code: int, reason: str, message: str, **headers: str) -> web.Response:
    body = {"kind": "Status", "code": code, "reason": reason, "message": message}
    return web.json_response(body, status=code, headers=headers)


def refuses(code: int, reason: str = "", message: str = "", **headers: str) -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return status(code, reason, message, **headers)

    return answer


def breaks_off(*pieces: bytes) -> Answer:
    """The beginning of a good answer, and then a reset connection."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        assert request.transport is not None
        request.transport.abort()
        return response

    return answer


def says(*pieces: bytes) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        return response

    return answer


def credentials_for(url: str) -> Credentials:
    configuration = Configuration()
    configuration.host = url
    return Credentials(configuration)


def kubeconfig_for(url: str, path: Path, namespace: str = "default") -> Path:
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
                "clusters": [{"name": "c", "cluster": {"server": url}}],
                "users": [{"name": "u", "user": {}}],
            }
        )
    )
    return path


@asynccontextmanager
async def served(cluster: OneJobCluster) -> AsyncIterator[OneJobCluster]:
    async with TestServer(cluster.application(), host="127.0.0.1") as started:
        cluster.url = str(started.make_url("/"))
        yield cluster


@contextmanager
def served_in_thread(cluster: OneJobCluster) -> Iterator[OneJobCluster]:
    """For a test that runs the command itself, in a loop of its own."""
    is_up, loop, over = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with served(cluster):
            is_up.set()
            await over.wait()

    def run() -> None:
        loop.run_until_complete(serve())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    is_up.wait()
    try:
        yield cluster
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
