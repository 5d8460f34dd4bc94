"""A namespace for one test, for the layers that have an API server."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.cluster.api import ApiClient, ApiError
from tests.cluster.processes import wait_until

READY_SECONDS = 30
PREFIX = "test-"
in_use: set[str] = set()
"""The namespaces of the tests and stories that run now."""


@contextmanager
def fresh_namespace(api: ApiClient, labels: Mapping[str, str] | None = None) -> Iterator[str]:
    """A namespace that is ready for pods. Its deletion is not awaited; its name is not reused."""
    metadata = {"generateName": PREFIX, "labels": dict(labels or {})}
    created = api.call("POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    name: str = created["metadata"]["name"]
    in_use.add(name)

    def pods_are_admitted() -> bool:
        try:
            api.call("GET", f"/api/v1/namespaces/{name}/serviceaccounts/default")
        except ApiError as error:
            if error.status != 404:
                raise
            return False
        return True

    try:
        wait_until(pods_are_admitted, timeout=READY_SECONDS, what=f"namespace {name} has its default service account")
        yield name
    finally:
        in_use.discard(name)
        api.call("DELETE", f"/api/v1/namespaces/{name}")
