"""What the reconciler needs of a cluster, and how a cluster says no.

Two things speak this protocol, and one set of contract tests holds them to it: `runtime.kubernetes_cluster` (an API
server) and `local.store` (this machine). Objects are plain JSON: typed models would drop the fields they don't know.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tpu_training_operator.api import constants

Object = dict[str, Any]


@dataclass(frozen=True)
class Resource:
    """A kind of object and where the API server keeps it."""

    api_version: str
    kind: str
    plural: str

    def path(self, namespace: str | None) -> str:
        root = "/api/" if "/" not in self.api_version else "/apis/"
        scope = f"/namespaces/{namespace}" if namespace is not None else ""
        return f"{root}{self.api_version}{scope}/{self.plural}"


JOBS = Resource(constants.API_VERSION, constants.KIND, constants.PLURAL)
PODS = Resource("v1", "Pod", "pods")
SERVICES = Resource("v1", "Service", "services")
CONFIG_MAPS = Resource("v1", "ConfigMap", "configmaps")
SECRETS = Resource("v1", "Secret", "secrets")
NETWORK_POLICIES = Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
EVENTS = Resource("events.k8s.io/v1", "Event", "events")
# A question rather than an object: the answer to `create` is not kept.
TOKEN_REVIEWS = Resource("authentication.k8s.io/v1", "TokenReview", "tokenreviews")

_BY_KIND = {
    resource.kind: resource
    for resource in (JOBS, PODS, SERVICES, CONFIG_MAPS, SECRETS, NETWORK_POLICIES, EVENTS, TOKEN_REVIEWS)
}


def resource_of(body: Mapping[str, Any]) -> Resource:
    return _BY_KIND[body["kind"]]


class ApiError(Exception):
    """The cluster refused a request or could not be reached; `status` is HTTP's, 0 without an answer. `retry_after`:
    for how many seconds the cluster asks not to be asked again; 0 where it does not say."""

    def __init__(self, status: int, reason: str, message: str, *, retry_after: float = 0.0) -> None:
        super().__init__(message or reason or f"HTTP {status}")
        self.status = status
        self.reason = reason
        self.retry_after = retry_after


class NotFound(ApiError):
    """404."""


class AlreadyExists(ApiError):
    """409 on create: the name is taken."""


class Conflict(ApiError):
    """409: the object is no longer the one that was read (resourceVersion or uid)."""


class Forbidden(ApiError):
    """403: missing rights, a quota, or Pod Security."""


class Invalid(ApiError):
    """422 or 400: the object itself is wrong, and will be so again."""


class Unavailable(ApiError):
    """Overload, a server error, or no answer at all: worth trying again."""


class Cluster(Protocol):
    """Requests to one cluster. Every method raises the ApiErrors above."""

    async def get(self, resource: Resource, namespace: str, name: str) -> Object: ...

    async def list(
        self,
        resource: Resource,
        namespace: str | None,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> list[Object]:
        """The objects in the namespace (None: everywhere) that carry all the labels and have these values in these
        fields (those that the API server selects by), as they are now. Of events, perhaps only the first hundred."""
        ...

    async def create(self, body: Object) -> Object:
        """Create the object and return it as stored, with its uid."""
        ...

    async def update_status(self, body: Object) -> Object:
        """Replace `status` and nothing else. Conflict unless metadata.resourceVersion is the current one."""
        ...

    async def delete(
        self, resource: Resource, namespace: str, name: str, uid: str, *, grace_seconds: int | None = None
    ) -> None:
        """Ask for deletion of the object with this uid; Conflict if the name belongs to another by now.

        A pod that runs is given its grace period first: it stays, marked with a deletionTimestamp. `grace_seconds`
        replaces that period; with 0 the object goes at once, whatever its node still does.
        """
        ...
