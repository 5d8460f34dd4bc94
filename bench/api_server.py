"""A small API server in memory: enough of Kubernetes to run the operator with the largest jobs.

It has paged lists, watches, uids and resource versions, and pods as large as real ones.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

Object = dict[str, Any]

POD_BYTES = 7400
_BATCH = 500


class Cluster:
    """Objects by plural, namespace and name, each with its JSON text."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[tuple[str, str], Object]] = {}
        self._texts: dict[str, str] = {}
        self._version = 0
        self._watchers: dict[str, set[asyncio.Queue[str | None]]] = {}

    def all(self, plural: str) -> list[Object]:
        return [found for _, found in sorted(self.objects.get(plural, {}).items())]

    def put(self, plural: str, body: Object, what: str = "MODIFIED") -> Object:
        metadata = body["metadata"]
        self._version += 1
        metadata["resourceVersion"] = str(self._version)
        self.objects.setdefault(plural, {})[metadata["namespace"], metadata["name"]] = body
        self._texts[metadata["uid"]] = text = json.dumps(body)
        self._tell(plural, what, text)
        return body

    def add(self, plural: str, body: Object) -> Object:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body["metadata"] |= {"uid": str(uuid.uuid4()), "generation": 1, "creationTimestamp": now}
        body["metadata"].setdefault("namespace", "default")
        if plural == "pods":
            body["status"] = {"phase": "Pending"}
            managed = {"manager": "kubelet", "fieldsV1": "x" * max(0, POD_BYTES - len(json.dumps(body)))}
            body["metadata"]["managedFields"] = [managed]
        return self.put(plural, body, "ADDED")

    def remove(self, plural: str, body: Object) -> None:
        metadata = body["metadata"]
        del self.objects[plural][metadata["namespace"], metadata["name"]]
        self._version += 1
        self._tell(plural, "DELETED", self._texts.pop(metadata["uid"]))

    def _tell(self, plural: str, what: str, text: str) -> None:
        for watcher in self._watchers.get(plural, ()):
            watcher.put_nowait(f'{{"type": "{what}", "object": {text}}}\n')

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path in _DISCOVERY:
            return web.json_response(_DISCOVERY[request.path])
        parts = request.path.strip("/").split("/")
        rest = parts[2:] if parts[0] == "api" else parts[3:]
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 1:
            namespace, rest = rest[1], rest[2:]
        plural, name = rest[0], rest[1] if len(rest) > 1 else ""
        if request.method == "POST":
            return self._create(plural, namespace, await request.json())
        if not name:
            if request.query.get("watch"):
                return await self._watch(request, plural)
            return self._list(request, plural, namespace)
        found = self.objects.get(plural, {}).get((namespace, name))
        if found is None:
            return refusal(404, "NotFound")
        if request.method == "PUT":
            return self._replace(plural, found, await request.json(), status="status" in rest[2:])
        if request.method == "DELETE":
            self.remove(plural, found)
        return web.Response(text=self._texts.get(found["metadata"]["uid"], '{"kind": "Status"}'), content_type=_JSON)

    def _create(self, plural: str, namespace: str, body: Object) -> web.Response:
        body["metadata"].setdefault("namespace", namespace)
        if (namespace, body["metadata"].get("name")) in self.objects.get(plural, {}):
            return refusal(409, "AlreadyExists")
        if plural == "events":
            return web.json_response(body)
        return web.json_response(self.add(plural, body), status=201)

    def _replace(self, plural: str, found: Object, body: Object, *, status: bool) -> web.Response:
        if body["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
            return refusal(409, "Conflict")
        return web.json_response(self.put(plural, {**found, "status": body["status"]} if status else body))

    def _list(self, request: web.Request, plural: str, namespace: str) -> web.Response:
        selector = request.query.get("labelSelector", "")
        wanted = dict(part.split("=") for part in selector.split(",") if "=" in part)
        keys = [
            key
            for key, found in sorted(self.objects.get(plural, {}).items())
            if namespace in ("", key[0]) and wanted.items() <= (found["metadata"].get("labels") or {}).items()
        ]
        start, size = int(request.query.get("continue") or 0), int(request.query.get("limit") or 10**9)
        page = keys[start : start + size]
        metadata = {"resourceVersion": str(self._version)}
        if start + size < len(keys):
            metadata["continue"] = str(start + size)
        items = ",".join(self._texts[self.objects[plural][key]["metadata"]["uid"]] for key in page)
        text = f'{{"kind": "List", "apiVersion": "v1", "metadata": {json.dumps(metadata)}, "items": [{items}]}}'
        return web.Response(text=text, content_type=_JSON)

    async def _watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        watchers = self._watchers.setdefault(plural, set())
        watchers.add(queue)
        response = web.StreamResponse(headers={"Content-Type": _JSON})
        try:
            await response.prepare(request)
            while line := await queue.get():
                lines = [line]
                while not queue.empty() and len(lines) < _BATCH and (line := queue.get_nowait()):
                    lines.append(line)
                await response.write("".join(lines).encode())
        except ConnectionError:
            pass
        finally:
            watchers.discard(queue)
        return response

    def close(self) -> None:
        """End the watches."""
        for watcher in (queue for watchers in self._watchers.values() for queue in watchers):
            watcher.put_nowait(None)


_JSON = "application/json"
_JOBS = "tpu-operator.dev/v1alpha1"


_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


def _resources(version: str, kinds: dict[str, str]) -> Object:
    described = [
        {"name": name, "singularName": "", "kind": kind, "namespaced": kind not in _CLUSTER_WIDE, "verbs": _VERBS}
        for name, kind in kinds.items()
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": described}


def _group(name: str, version: str) -> Object:
    known = {"groupVersion": f"{name}/{version}", "version": version}
    return {"name": name, "versions": [known], "preferredVersion": known}


_CLUSTER_WIDE = ("Namespace", "CustomResourceDefinition")
# What kopf looks up before it watches anything, including kinds that it does not watch here.
_DISCOVERY = {
    "/version": {"major": "1", "minor": "35"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "groups": [_group("tpu-operator.dev", "v1alpha1"), _group("apiextensions.k8s.io", "v1")],
    },
    "/api/v1": _resources("v1", {"pods": "Pod", "pods/status": "Pod", "namespaces": "Namespace"}),
    "/apis/apiextensions.k8s.io/v1": _resources(
        "apiextensions.k8s.io/v1", {"customresourcedefinitions": "CustomResourceDefinition"}
    ),
    f"/apis/{_JOBS}": _resources(
        _JOBS, {"tputrainingjobs": "TPUTrainingJob", "tputrainingjobs/status": "TPUTrainingJob"}
    ),
}


def refusal(status: int, reason: str, message: str = "") -> web.Response:
    body = {"kind": "Status", "code": status, "reason": reason, "message": message or reason}
    return web.json_response(body, status=status)


@asynccontextmanager
async def serve(cluster: Cluster, port: int = 0) -> AsyncIterator[str]:
    """Yields the server's address, while it runs."""
    app = web.Application(client_max_size=2**24)
    app.router.add_route("*", "/{path:.*}", cluster.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        cluster.close()
        await runner.cleanup()
