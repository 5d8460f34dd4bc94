"""The cluster for tests of everything that makes requests: the product's own store, with faults and a record."""

import copy
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from tests.fakes.held_requests import HeldRequests
from tpu_training_operator.kube.cluster import Object, Resource, resource_of
from tpu_training_operator.kube.errors import ApiError, NotFound
from tpu_training_operator.local.store import LocalStore


class FakeCluster(LocalStore):
    """A request is named by its method and kind, such as "get Pod" or "update_status TPUTrainingJob".

    `requests`: what was asked, in order; `paths`: where. `faults`: the requests that fail until the test removes them;
    "*" is any, and "list Pod in team" only that of one namespace. `hooks`: awaited before a request is answered, by the
    same names. `stale_lists`: by kind, what its lists return. `missing`: the versions of APIs that the cluster lacks.
    `reviews`: by token, the status of its TokenReview. `held`: creations and deletions wait there, and change nothing.
    """

    def __init__(self, *bodies: Object, held: HeldRequests | None = None) -> None:
        super().__init__()
        self.requests: list[str] = []
        self.paths: list[str] = []
        self.faults: dict[str, ApiError] = {}
        self.hooks: dict[str, Callable[[], Awaitable[object]]] = {}
        self.stale_lists: dict[str, list[Object]] = {}
        self.missing: set[str] = set()
        self.reviews: dict[str, Object] = {}
        self._held = held
        self._once: dict[str, tuple[ApiError, bool]] = {}
        self.put(*bodies)

    @property
    def version(self) -> int:
        """The resourceVersion of the last change."""
        return self._version

    def put(self, *bodies: Object, resource: Resource | None = None) -> None:
        """Stores objects as they are, by none of an API server's rules; one with the same name is replaced."""
        for body in bodies:
            metadata = body["metadata"]
            key = (resource or resource_of(body)).plural, metadata.get("namespace", ""), metadata["name"]
            self._write(key, body | {"metadata": dict(metadata)})

    def body(self, resource: Resource, name: str, namespace: str = "default") -> Object:
        """Returns the object without a request."""
        return copy.deepcopy(self._find(resource, namespace, name))

    def drop(self, resource: Resource, name: str, namespace: str = "default") -> Object:
        """Removes the object by none of an API server's rules, and returns its last state."""
        body = self._objects.pop((resource.plural, namespace, name))
        return body | {"metadata": body["metadata"] | {"resourceVersion": str(self.advance())}}

    def advance(self) -> int:
        """Returns the next resourceVersion, as if something else in the cluster had changed."""
        self._version += 1
        return self._version

    def fail_once(self, request: str, error: ApiError, *, takes_effect: bool = False) -> None:
        """`takes_effect`: the request is carried out, and only its answer is lost."""
        self._once[request] = error, takes_effect

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        async with self._request("get", resource, namespace, name):
            return await super().get(resource, namespace, name)

    async def list(
        self,
        resource: Resource,
        namespace: str | None,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> list[Object]:
        async with self._request("list", resource, namespace):
            if resource.kind in self.stale_lists:
                return self.stale_lists[resource.kind]
            return await super().list(resource, namespace, labels, fields)

    async def create(self, body: Object) -> Object:
        async with self._request_about(body, "create"):
            if self._held:
                await self._held.send(body["metadata"]["name"])
                return body
            return await super().create(body)

    async def update(self, body: Object) -> Object:
        async with self._request_about(body, "update"):
            return await super().update(body)

    async def update_status(self, body: Object) -> Object:
        async with self._request_about(body, "update_status"):
            return await super().update_status(body)

    async def delete(
        self, resource: Resource, namespace: str, name: str, uid: str, *, grace_seconds: int | None = None
    ) -> Object | None:
        async with self._request("delete", resource, namespace, name):
            if self._held:
                await self._held.send(name)
                return None
            return await super().delete(resource, namespace, name, uid, grace_seconds=grace_seconds)

    def count(self) -> Counter[str]:
        """Returns how often each request was made."""
        return Counter(self.requests)

    @asynccontextmanager
    async def _request(
        self, method: str, resource: Resource, namespace: str | None, name: str = ""
    ) -> AsyncIterator[None]:
        request = f"{method} {resource.kind}"
        self.requests.append(request)
        self.paths.append(resource.path(namespace) + (name and f"/{name}"))
        names = ("*", request, f"{request} in {namespace}")
        for hook in (self.hooks[name] for name in names if name in self.hooks):
            await hook()
        for error in (self.faults[name] for name in names if name in self.faults):
            raise error
        if resource.api_version in self.missing:
            # Without a reason: the API server does not know the kind.
            raise NotFound(404, "", "404 page not found")
        lost, takes_effect = self._once.pop(request, (None, True))
        if takes_effect:
            yield
        if lost is not None:
            raise lost

    def _request_about(self, body: Object, method: str) -> AbstractAsyncContextManager[None]:
        metadata = body.get("metadata") or {}
        return self._request(method, resource_of(body), metadata.get("namespace", ""), metadata.get("name", ""))

    def _review(self, token: str, audiences: Sequence[str]) -> Object:
        return self.reviews.get(token) or super()._review(token, audiences)
