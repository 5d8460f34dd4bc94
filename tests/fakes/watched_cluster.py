"""An API server on loopback before a fake cluster, with watches and logs, that breaks off when a test wants it.

The answers have the form and the codes of a real one, which
tests/controlplane and tests/e2e ask the same questions.
"""

import asyncio
import json
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.fakes.api_server import Answer, status
from tests.fakes.cluster import FakeCluster
from tpu_training_operator.kube.cluster import JOBS, PODS, WORKLOADS, Object, Resource, resource_of
from tpu_training_operator.kube.errors import NotFound

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
class WatchedCluster:
    """`logs`: by pod, what its container has written; None: it has not started. `react`: called with a job that was
    just created. `faults`: by what is asked for ("list
    pods", "watch jobs", "get job", "log digits-1-0-0"), the answers that come before the right one."""

    store: FakeCluster = field(default_factory=FakeCluster)
    logs: dict[str, bytes | None] = field(default_factory=dict)
    faults: dict[str, list[Answer]] = field(default_factory=lambda: defaultdict(list))
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    react: Callable[[Object], None] = lambda _: None
    url: str = ""
    _watches: dict[str, list["asyncio.Queue[Object | None]"]] = field(default_factory=lambda: defaultdict(list))

    def show(self, *bodies: Object) -> None:
        """The objects are like this from now on."""
        for body in bodies:
            resource, metadata = resource_of(body), body["metadata"]
            self.store.put(body)
            stored = self.store.body(resource, metadata["name"], metadata["namespace"])
            self.tell(resource.plural, {"type": "ADDED", "object": stored})

    def remove(self, resource: Resource, name: str, namespace: str = "default") -> None:
        self.tell(resource.plural, {"type": "DELETED", "object": self.store.drop(resource, name, namespace)})

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
        for resource in (JOBS, PODS, *WORKLOADS.values()):
            app.router.add_get(resource.path("{namespace}"), self._of_many(resource))
            app.router.add_get(resource.path(None), self._of_many(resource))
            app.router.add_get(resource.path("{namespace}") + "/{name}", self._of_one(resource))
        app.router.add_get(PODS.path("{namespace}") + "/{name}/log", self._log)
        app.router.add_post(JOBS.path("{namespace}"), self._create)
        app.router.add_delete(JOBS.path("{namespace}") + "/{name}", self._delete)
        return app

    async def _create(self, request: web.Request) -> web.StreamResponse:
        if fault := await self._fault("create job", request):
            return fault
        created = await self.store.create(await request.json())
        self.show(created)
        self.react(created)
        return web.json_response(created)

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        if fault := await self._fault("delete job", request):
            return fault
        name, namespace = request.match_info["name"], request.match_info["namespace"]
        uid = (await request.json())["preconditions"]["uid"]
        assert self.store.body(JOBS, name, namespace)["metadata"]["uid"] == uid
        self.remove(JOBS, name, namespace)
        return web.json_response({"kind": "Status", "metadata": {}, "status": "Success"})

    async def _fault(self, what: str, request: web.Request) -> web.StreamResponse | None:
        self.asked.append((what, dict(request.query)))
        waiting = self.faults[what]
        return await waiting.pop(0)(request) if waiting else None

    def _of_one(self, resource: Resource) -> Answer:
        async def answer(request: web.Request) -> web.StreamResponse:
            if fault := await self._fault(f"get {resource.kind}", request):
                return fault
            try:
                return web.json_response(await self.store.get(resource, **request.match_info))
            except NotFound as error:
                return status(404, "NotFound", str(error))

        return answer

    def _of_many(self, resource: Resource) -> Answer:
        async def answer(request: web.Request) -> web.StreamResponse:
            watches = request.query.get("watch") == "true"
            if fault := await self._fault(f"{'watch' if watches else 'list'} {resource.plural}", request):
                return fault
            if watches:
                return await self._watch(resource, request)
            items = await self.store.list(resource, request.match_info.get("namespace"))
            metadata = {"resourceVersion": str(self.store.version)}
            return web.json_response({"kind": f"{resource.kind}List", "metadata": metadata, "items": items})

        return answer

    async def _watch(self, resource: Resource, request: web.Request) -> web.StreamResponse:
        queue: asyncio.Queue[Object | None] = asyncio.Queue()
        known = int(request.query["resourceVersion"])
        for body in await self.store.list(resource, request.match_info.get("namespace")):
            if int(body["metadata"]["resourceVersion"]) > known:
                queue.put_nowait({"type": "ADDED", "object": body})
        self._watches[resource.plural].append(queue)
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while (event := await queue.get()) is not None:
                await response.write(json.dumps(event).encode() + b"\n")
        finally:
            self._watches[resource.plural].remove(queue)
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


def breaks_off(*pieces: bytes) -> Answer:
    """The beginning of a good answer, and then a reset connection."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        request.transport.abort()
        return response

    return answer


def streams(*pieces: bytes) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        return response

    return answer


def kubeconfig_for(url: str, path: Path, namespace: str = "default") -> Path:
    """Writes a kubeconfig that trusts any server: reading the system's certificates would take each command 30 ms."""
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
                "clusters": [{"name": "c", "cluster": {"server": url, "insecure-skip-tls-verify": True}}],
                "users": [{"name": "u", "user": {}}],
            }
        )
    )
    return path


@asynccontextmanager
async def served(cluster: WatchedCluster) -> AsyncIterator[WatchedCluster]:
    async with TestServer(cluster.application(), host="127.0.0.1") as started:
        cluster.url = str(started.make_url("/"))
        yield cluster


@contextmanager
def served_in_thread(cluster: WatchedCluster) -> Iterator[WatchedCluster]:
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
