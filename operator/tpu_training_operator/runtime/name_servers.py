"""Finds out whether workers' names need the older form of addresses, Endpoints, beside EndpointSlices.

CoreDNS reads EndpointSlices, kube-dns reads only Endpoints, and what Cloud DNS reads is not documented. So one form is
enough only where CoreDNS is seen, without kube-dns. In doubt the operator writes both.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tpu_training_operator.kube.cluster import PODS, ClusterReader
from tpu_training_operator.kube.errors import ApiError, Forbidden

# Name servers are replaced rarely, and while that lasts, both are seen.
_LOOK_EVERY_SECONDS = 600.0
# Pods of either have this label, and so has their Service.
_NAMESPACE, _LABELS = "kube-system", {"k8s-app": "kube-dns"}


class NameServers:
    """`clock` counts seconds."""

    def __init__(self, cluster: ClusterReader, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._looked_at: float | None = None
        self._need_endpoints = True

    async def need_endpoints(self) -> bool:
        now = self._clock()
        if self._looked_at is None or now - self._looked_at >= _LOOK_EVERY_SECONDS:
            try:
                self._need_endpoints = await self._look()
            except Forbidden:
                # An operator of some namespaces may not look there.
                self._need_endpoints = True
            except ApiError:
                return True
            self._looked_at = now
        return self._need_endpoints

    async def _look(self) -> bool:
        pods = await self._cluster.list(PODS, _NAMESPACE, _LABELS)
        programs = {name for pod in pods for container in pod["spec"]["containers"] for name in _names(container)}
        return "coredns" not in programs or not programs.isdisjoint({"kubedns", "k8s-dns-kube-dns"})


def _names(container: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the names of the container and of its image, without registry and tag."""
    image = str(container.get("image", "")).rsplit("/", 1)[-1]
    return str(container["name"]), image.split("@")[0].split(":")[0]
