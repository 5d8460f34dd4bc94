"""Plain objects for the tests of a cluster, and common operations on them."""

import asyncio
import copy
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from tpu_training_operator.kube.cluster import Cluster, Object, resource_of
from tpu_training_operator.kube.errors import NotFound

# An API server's garbage collector discovers new kinds of owners every 30 s.
DEADLINE = 120.0
_POLL = 0.1


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Returns once the condition holds; raises TimeoutError after DEADLINE seconds."""
    async with asyncio.timeout(DEADLINE):
        while not await condition():  # noqa: ASYNC110 - a cluster tells nobody when it has cleaned up
            await asyncio.sleep(_POLL)


def config_map(namespace: str, name: str, **metadata: Any) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace, **metadata},
        "data": {"hosts": "a,b"},
    }


def endpoint_slice(namespace: str, name: str, address: str) -> Object:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": namespace},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address]}],
    }


def pod(namespace: str, name: str, **metadata: Any) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, **metadata},
        "spec": {"containers": [{"name": "trainer", "image": "registry.example/none:1"}]},
    }


def owned_by(owner: Object, uid: str | None = None) -> list[Object]:
    return [
        {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": owner["metadata"]["name"],
            "uid": uid or owner["metadata"]["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]


def version(stored: Object) -> str:
    return str(stored["metadata"]["resourceVersion"])


def with_status(stored: Object, **status: Any) -> Object:
    return {**copy.deepcopy(stored), "status": status}


async def is_gone(cluster: Cluster, stored: Object) -> bool:
    metadata = stored["metadata"]
    try:
        found = await cluster.get(resource_of(stored), metadata["namespace"], metadata["name"])
    except NotFound:
        return True
    return bool(found["metadata"]["uid"] != metadata["uid"])


async def delete(cluster: Cluster, stored: Object) -> None:
    metadata = stored["metadata"]
    await cluster.delete(resource_of(stored), metadata["namespace"], metadata["name"], metadata["uid"])


@asynccontextmanager
async def elsewhere(cluster: Cluster, **metadata: Any) -> AsyncIterator[Object]:
    """A ConfigMap in a namespace other than the test's, for the length of the block."""
    created = await cluster.create(config_map("default", f"elsewhere-{uuid.uuid4().hex[:8]}", **metadata))
    try:
        yield created
    finally:
        await delete(cluster, created)
