"""The operator's view of a cluster: kinds of objects, keys of jobs, and requests.

Two classes implement the `Cluster` protocol, and one set of contract tests covers both: `kube.client` (an API server)
and `local.store` (this machine). Objects are plain JSON, because typed models would drop unknown fields.
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
    is_namespaced: bool = True

    def path(self, namespace: str | None) -> str:
        root = "/api/" if "/" not in self.api_version else "/apis/"
        scope = f"/namespaces/{namespace}" if namespace is not None and self.is_namespaced else ""
        return f"{root}{self.api_version}{scope}/{self.plural}"


JOBS = Resource(constants.API_VERSION, constants.KIND, constants.PLURAL)
PODS = Resource("v1", "Pod", "pods")
SERVICES = Resource("v1", "Service", "services")
CONFIG_MAPS = Resource("v1", "ConfigMap", "configmaps")
SECRETS = Resource("v1", "Secret", "secrets")
NETWORK_POLICIES = Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
# The addresses behind a Service: the present kind, and the older one, which kube-dns reads.
ENDPOINT_SLICES = Resource("discovery.k8s.io/v1", "EndpointSlice", "endpointslices")
ENDPOINTS = Resource("v1", "Endpoints", "endpoints")
EVENTS = Resource("events.k8s.io/v1", "Event", "events")
# The Lease of the operator that leads.
LEASES = Resource("coordination.k8s.io/v1", "Lease", "leases")
# A question to the API server, which stores nothing.
TOKEN_REVIEWS = Resource("authentication.k8s.io/v1", "TokenReview", "tokenreviews")

NAMESPACES = Resource("v1", "Namespace", "namespaces", is_namespaced=False)
PRIORITY_CLASSES = Resource("scheduling.k8s.io/v1", "PriorityClass", "priorityclasses", is_namespaced=False)
# Kueue's kinds, by the versions of its API, the newer one first: it has had both since 0.15.
KUEUE_VERSIONS = tuple(f"{constants.KUEUE_GROUP}/{version}" for version in ("v1beta2", "v1beta1"))
WORKLOADS = {version: Resource(version, "Workload", "workloads") for version in KUEUE_VERSIONS}
RESOURCE_FLAVORS = {
    version: Resource(version, "ResourceFlavor", "resourceflavors", is_namespaced=False) for version in KUEUE_VERSIONS
}
WORKLOAD_PRIORITY_CLASSES = {
    version: Resource(version, "WorkloadPriorityClass", "workloadpriorityclasses", is_namespaced=False)
    for version in KUEUE_VERSIONS
}

_BY_KIND = {
    resource.kind: resource
    for resource in (
        *(JOBS, PODS, SERVICES, CONFIG_MAPS, SECRETS, NETWORK_POLICIES),
        *(ENDPOINT_SLICES, ENDPOINTS, EVENTS, LEASES, TOKEN_REVIEWS),
    )
}


def resource_of(body: Mapping[str, Any]) -> Resource:
    kind = body["kind"]
    return WORKLOADS[body["apiVersion"]] if kind == "Workload" else _BY_KIND[kind]


@dataclass(frozen=True)
class JobKey:
    """A job's name in the whole cluster."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class ClusterReader(Protocol):
    """Reads of one cluster. Every method raises an ApiError of `kube.errors`."""

    async def get(self, resource: Resource, namespace: str, name: str) -> Object: ...

    async def list(
        self,
        resource: Resource,
        namespace: str | None,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> list[Object]:
        """Returns the present objects with all these labels and these values of fields.

        `namespace` None means all namespaces. The API server must be able to select by `fields`. A list of events may
        end after the first hundred.
        """
        ...


class Updater(Protocol):
    """Reads and replaces of single objects. Both methods raise an ApiError of `kube.errors`."""

    async def get(self, resource: Resource, namespace: str, name: str) -> Object: ...

    async def update(self, body: Object) -> Object:
        """Replaces the object. Raises Conflict unless metadata.resourceVersion is the current one."""
        ...


class Cluster(ClusterReader, Updater, Protocol):
    """Requests to one cluster. Every method raises an ApiError of `kube.errors`."""

    async def create(self, body: Object) -> Object:
        """Creates the object and returns it as stored, with its uid."""
        ...

    async def update_status(self, body: Object) -> Object:
        """Replaces `status` and nothing else. Raises Conflict unless metadata.resourceVersion is the current one."""
        ...

    async def delete(
        self, resource: Resource, namespace: str, name: str, uid: str, *, grace_seconds: int | None = None
    ) -> Object | None:
        """Requests the deletion of the object with this uid. Raises Conflict if another object has the name now.
        Returns None if the object is gone; otherwise the object, which may stay for a while.

        A running pod stays for its grace period, marked with a deletionTimestamp. `grace_seconds` replaces that
        period; with 0 the object goes at once, even if its node still runs it.
        """
        ...
