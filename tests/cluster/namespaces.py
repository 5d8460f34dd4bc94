"""A namespace for one test, for the layers that have an API server."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.cluster.api import ApiClient, ApiError
from tests.cluster.processes import wait_until

READY_SECONDS = 30
PREFIX = "test-"
in_use: set[str] = set()
"""The namespaces of the tests and stories that run now, and those that are empty for good."""


@contextmanager
def fresh_namespace(api: ApiClient, labels: Mapping[str, str] | None = None) -> Iterator[str]:
    """A namespace that is ready for pods. Its deletion is not awaited; its name is not reused."""
    name = _create(api, labels)
    try:
        yield name
    finally:
        in_use.discard(name)
        api.call("DELETE", f"/api/v1/namespaces/{name}")


@contextmanager
def emptied_namespace(api: ApiClient, labels: Mapping[str, str] | None = None) -> Iterator[str]:
    """A namespace like `fresh_namespace` that stays, without its jobs and pods, where no kubelet has any of it.

    To delete it, the controller manager would ask for each of forty kinds twice, a fifth of a second of CPU time.
    """
    name = _create(api, labels)
    try:
        yield name
    finally:
        in_use.discard(name)
        # First the jobs: an operator would replace the pods.
        for kind in ("apis/tpu-operator.dev/v1alpha1/namespaces/{}/tputrainingjobs", "api/v1/namespaces/{}/pods"):
            _delete_all(api, f"/{kind.format(name)}")
        in_use.add(name)


def _create(api: ApiClient, labels: Mapping[str, str] | None) -> str:
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

    wait_until(pods_are_admitted, timeout=READY_SECONDS, what=f"namespace {name} has its default service account")
    return name


def _delete_all(api: ApiClient, path: str) -> None:
    try:
        api.call("DELETE", f"{path}?gracePeriodSeconds=0")
    except ApiError as error:
        # The kind is not served.
        if error.status != 404:
            raise
