"""Simulated nodes: kwok plays the kubelets of a control plane, so pods run without machines.

A pod on such a node becomes Ready at once and stays so; only a test ends it, through `finish_pod`. kwok_stages.yaml
defines what kwok does to nodes and pods. It deletes a pod that it has seen stop by the pod's name, and after a forced
deletion that may already be another pod's: `ControlPlane.erase` leaves kwok nothing to do.
"""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tests.cluster import binaries
from tests.cluster.api import STRATEGIC_MERGE_PATCH, Identity, Object, answers_ok
from tests.cluster.control_plane import START_SECONDS, ControlPlane
from tests.cluster.health import SIMULATED
from tests.cluster.ports import LOOPBACK, free_port
from tests.cluster.processes import wait_until

STAGES = Path(__file__).with_name("kwok_stages.yaml")
NODES = "/api/v1/nodes"
NODE_POOL = "cloud.google.com/gke-nodepool"
TPU_TAINT = {"key": "google.com/tpu", "value": "present", "effect": "NoSchedule"}

# kwok renews a Lease after a quarter of its duration. The controller manager gives a node up after 50 s, so 120 s keeps
# a node alive with a third of the writes that the default of 40 s needs; thousands of nodes share 2 cores.
LEASE_SECONDS = 120
POD_CIDR = "10.244.0.0/16"

# More than any worker requests, so that only the chips decide what fits on a host.
ROOMY = {"cpu": "256", "memory": "1Ti", "ephemeral-storage": "1Ti", "pods": "110"}
WAIT_SECONDS = 60.0


@dataclass(frozen=True)
class SimulatedSlice:
    """One TPU node pool as GKE would make it.

    accelerator, topology: the values of the node labels gke-tpu-accelerator and gke-tpu-topology, for example
    "tpu-v5-lite-podslice" and "4x4". chips_per_host: the node's google.com/tpu.
    """

    accelerator: str
    topology: str
    hosts: int
    chips_per_host: int


@dataclass(frozen=True)
class NodePool:
    """Nodes made together; `name` is the value of their label cloud.google.com/gke-nodepool."""

    name: str
    nodes: tuple[str, ...]


def start_kwok(cluster: ControlPlane) -> None:
    """Starts kwok as a child of `cluster`, which stops it. Raises ToolchainMissing, BuildError, ProcessError."""
    address = f"{LOOPBACK}:{free_port()}"
    kwok = cluster.children.start(
        "kwok",
        binaries.ensure("kwok")["kwok"],
        f"--kubeconfig={cluster.user_kubeconfig('kwok')}",
        f"--config={STAGES}",
        "--manage-nodes-with-annotation-selector=" + ",".join(f"{k}={v}" for k, v in SIMULATED.items()),
        f"--node-lease-duration-seconds={LEASE_SECONDS}",
        f"--cidr={POD_CIDR}",
        f"--server-address={address}",
    )
    kwok.wait_ready(lambda: answers_ok(f"http://{address}/healthz"), timeout=START_SECONDS)


def add_tpu_nodes(
    cluster: ControlPlane, tpu_slice: SimulatedSlice, more_labels: Mapping[str, str] | None = None
) -> NodePool:
    """Adds a node pool that is one slice; returns when pods can be scheduled on all its hosts."""
    labels = {
        **(more_labels or {}),
        "cloud.google.com/gke-tpu-accelerator": tpu_slice.accelerator,
        "cloud.google.com/gke-tpu-topology": tpu_slice.topology,
        "cloud.google.com/gke-accelerator-count": str(tpu_slice.chips_per_host),
    }
    return _add_nodes(
        cluster,
        f"{tpu_slice.accelerator}-{tpu_slice.topology}",
        tpu_slice.hosts,
        labels=labels,
        taints=[TPU_TAINT],
        capacity=ROOMY | {"google.com/tpu": str(tpu_slice.chips_per_host)},
    )


def add_cpu_nodes(cluster: ControlPlane, count: int) -> NodePool:
    """Adds a pool of plain nodes; returns when pods can be scheduled on all of them."""
    return _add_nodes(cluster, "cpu", count, labels={}, taints=[], capacity=ROOMY)


@contextmanager
def cpu_nodes_for(cluster: ControlPlane, count: int) -> Iterator[NodePool]:
    """A pool of plain nodes that is gone at the end of the block, whatever happens in it."""
    pool = add_cpu_nodes(cluster, count)
    try:
        yield pool
    finally:
        remove_nodes(cluster, pool)


def remove_nodes(cluster: ControlPlane, pool: NodePool) -> None:
    """Deletes the pool's nodes; the pod garbage collector then deletes the pods that ran there."""
    cluster.api.call("DELETE", f"{NODES}?labelSelector={NODE_POOL}%3D{pool.name}")


def finish_pod(
    cluster: ControlPlane,
    namespace: str,
    name: str,
    exit_code: int,
    message: str = "",
    reason: str | None = None,
) -> None:
    """Ends every container of a running pod with `exit_code`, as its node's kubelet would report it.

    message: the termination message. reason: the containers' reason, for example "OOMKilled"; by default
    "Completed" for exit code 0 and "Error" otherwise. Waits for a pod that is not running yet. Raises ValueError
    unless the pod's restartPolicy is Never: a kubelet would restart its containers.
    """
    path = f"/api/v1/namespaces/{namespace}/pods/{name}"
    wait_until(
        lambda: cluster.api.call("GET", path)["status"]["phase"] == "Running",
        timeout=WAIT_SECONDS,
        what=f"pod {namespace}/{name} is Running",
    )
    pod = cluster.api.call("GET", path)
    policy = pod["spec"]["restartPolicy"]
    if policy != "Never":
        raise ValueError(f"pod {namespace}/{name} has restartPolicy {policy}; only a Never pod ends for good")
    cluster.api.call(
        "PATCH",
        f"{path}/status",
        _ended(pod, exit_code, message, reason),
        content_type=STRATEGIC_MERGE_PATCH,
        identity=Identity.kubelet(pod["spec"]["nodeName"]),
    )


def _ended(pod: Object, exit_code: int, message: str, reason: str | None) -> Object:
    """The strategic merge patch for status; the uid makes it fail on a later pod of the same name.

    kwok does not undo it: its pod-ready stage takes Pending pods only.
    """
    now = _now()
    succeeded = exit_code == 0
    terminated = {
        "exitCode": exit_code,
        "reason": reason or ("Completed" if succeeded else "Error"),
        "message": message,
        "finishedAt": now,
    }
    not_ready = {
        "status": "False",
        "reason": "PodCompleted" if succeeded else "PodFailed",
        "lastTransitionTime": now,
    }
    containers = [
        {
            "name": status["name"],
            "ready": False,
            "started": False,
            "state": {
                "running": None,
                "terminated": terminated | {"startedAt": status["state"]["running"]["startedAt"]},
            },
        }
        for status in pod["status"]["containerStatuses"]
    ]
    return {
        "metadata": {"uid": pod["metadata"]["uid"]},
        "status": {
            "phase": "Succeeded" if succeeded else "Failed",
            "conditions": [{"type": kind} | not_ready for kind in ("Ready", "ContainersReady")],
            "containerStatuses": containers,
        },
    }


def _add_nodes(
    cluster: ControlPlane,
    kind: str,
    count: int,
    *,
    labels: dict[str, str],
    taints: list[dict[str, str]],
    capacity: dict[str, str],
) -> NodePool:
    pool = f"{kind}-{secrets.token_hex(3)}"
    names = tuple(f"{pool}-{index}" for index in range(count))
    cluster.api.create_all(
        NODES,
        (
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {
                    "name": name,
                    "annotations": SIMULATED,
                    "labels": {
                        "kubernetes.io/hostname": name,
                        "kubernetes.io/os": "linux",
                        "kubernetes.io/arch": "amd64",
                        NODE_POOL: pool,
                        **labels,
                    },
                },
                "spec": {"taints": taints},
                "status": {"capacity": capacity, "allocatable": capacity},
            }
            for name in names
        ),
    )

    def schedulable() -> bool:
        nodes = cluster.api.call("GET", f"{NODES}?labelSelector={NODE_POOL}%3D{pool}")["items"]
        # A new node is tainted not-ready; the controller manager takes that away once kwok reports it Ready.
        return len(nodes) == count and all(node["spec"].get("taints", []) == taints for node in nodes)

    wait_until(schedulable, timeout=WAIT_SECONDS, what=f"pods can be scheduled on the nodes of {pool}")
    return NodePool(pool, names)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
