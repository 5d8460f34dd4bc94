"""A namespace with node pools of its own, for stories about where the real scheduler puts slices."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tests.cluster.api import MERGE_PATCH, ApiError
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kwok import NODES, TPU_TAINT, NodePool, SimulatedSlice, add_tpu_nodes, remove_nodes
from tests.cluster.namespaces import emptied_namespace
from tests.controlplane.jobs import Namespace, Object, digits

TWO_HOSTS = SimulatedSlice("tpu-v5-lite-podslice", "2x4", 2, 4)
FOUR_HOSTS = SimulatedSlice("tpu-v5-lite-podslice", "4x4", 4, 4)
V4 = SimulatedSlice("tpu-v4-podslice", "2x2x2", 2, 4)
V5P = SimulatedSlice("tpu-v5p-slice", "2x2x4", 4, 4)
V6E = SimulatedSlice("tpu-v6e-slice", "4x4", 4, 4)
HALF_V7 = SimulatedSlice("tpu7x", "2x2x4", 2, 4)


@dataclass
class Place:
    """A namespace of one story, and its node pools, where its jobs alone can run: the nodes have a label of their own,
    which its jobs select."""

    space: Namespace

    @property
    def _cluster(self) -> ControlPlane:
        return self.space.cluster

    @property
    def own(self) -> dict[str, str]:
        """The label of its nodes, and the node selector of its jobs."""
        return {"story": self.space.name}

    def apply(self, job: Object) -> None:
        trainer = job["spec"]["trainer"] | {"nodeSelector": self.own}
        self.space.apply(job | {"spec": job["spec"] | {"trainer": trainer}})

    def add(self, shape: SimulatedSlice) -> NodePool:
        return add_tpu_nodes(self._cluster, shape, self.own)

    def remove_all(self) -> None:
        """Also those of a pool that was not ready in time."""
        self._cluster.api.call("DELETE", f"{NODES}?labelSelector=story%3D{self.space.name}")

    def taint(self, pool: NodePool, *taints: Object) -> None:
        """The pool's taints besides GKE's own for TPUs."""
        for node in pool.nodes:
            patch = {"spec": {"taints": [TPU_TAINT, *taints]}}
            self._cluster.api.call("PATCH", f"{NODES}/{node}", patch, content_type=MERGE_PATCH)

    def label(self, nodes: Sequence[str], labels: dict[str, str]) -> None:
        for node in nodes:
            patch = {"metadata": {"labels": labels}}
            self._cluster.api.call("PATCH", f"{NODES}/{node}", patch, content_type=MERGE_PATCH)

    def priority(self, value: int) -> Object:
        """What gives a job's workers this priority; they stop as slowly as with a kubelet."""
        name = f"{self.space.name}{value}"
        body = {"metadata": {"name": name}, "value": value}
        with suppress(ApiError):
            self._cluster.api.call("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", body)
        return {"priorityClassName": name, "podAnnotations": {"stops-slowly": "true"}}

    def cordon(self, pool: NodePool, host: int, cordoned: bool = True) -> None:
        patch = {"spec": {"unschedulable": cordoned}}
        path = f"{NODES}/{pool.nodes[host]}"
        self._cluster.api.call("PATCH", path, patch, content_type=MERGE_PATCH)

    def lose(self, pool: NodePool) -> None:
        """With its pods, which the pod garbage collector would delete after 40 s."""
        remove_nodes(self._cluster, pool)
        for pod in self._cluster.api.call("GET", "/api/v1/pods")["items"]:
            if pod["spec"].get("nodeName") in pool.nodes:
                path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
                self._delete(f"{path}?gracePeriodSeconds=0")

    def _delete(self, path: str) -> None:
        try:
            self._cluster.api.call("DELETE", path)
        except ApiError as error:
            # Somebody else may be faster.
            if error.status != 404:
                raise


@contextmanager
def a_place(cluster: ControlPlane) -> Iterator[Place]:
    with emptied_namespace(cluster.api) as name:
        place = Place(Namespace(cluster, name))
        try:
            yield place
        finally:
            place.remove_all()


def tpu_job(name: str, accelerator_type: str, count: int = 1, *, formation: str = "NodePool", **spec: Object) -> Object:
    wanted = {"acceleratorType": accelerator_type, "count": count, "hardware": "TPU", "formation": formation}
    # Several slices need it on TPUs.
    trainer = {"backend": "XLASPMD"} | spec.pop("trainer", {})
    return digits(slice=wanted, trainer=trainer, **spec) | {"metadata": {"name": name}}


def nodes_by_slice(space: Namespace, name: str) -> list[set[str]]:
    """The nodes that every slice of the job has found; slice 0 first."""
    nodes: dict[str, set[str]] = defaultdict(set)
    for pod in space.pods(name):
        found = nodes[pod["metadata"]["labels"]["tpu-operator.dev/slice-index"]]
        if "nodeName" in pod["spec"]:
            found.add(pod["spec"]["nodeName"])
    return [nodes[index] for index in sorted(nodes)]


def finish(space: Namespace, name: str) -> None:
    for pod in space.pods(name):
        space.finish(pod["metadata"]["name"])
    space.wait_for_state("Succeeded", name=name)
