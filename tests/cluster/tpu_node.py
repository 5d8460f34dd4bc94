"""A real node that looks like a TPU host: it has the labels, the taint and the chips that GKE would give it.

The scheduler and kubelet then treat google.com/tpu as real; there is no device behind it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tests.cluster.api import STRATEGIC_MERGE_PATCH, ApiClient, ApiError
from tests.cluster.kwok import NODE_POOL, TPU_TAINT
from tests.cluster.processes import wait_until

RESOURCE = "google.com/tpu"
LABELS = (
    "cloud.google.com/gke-tpu-accelerator",
    "cloud.google.com/gke-tpu-topology",
    "cloud.google.com/gke-accelerator-count",
    NODE_POOL,
)
WAIT_SECONDS = 30.0


@dataclass(frozen=True)
class TpuHost:
    """See `RealCluster.make_tpu_node`."""

    node: str
    accelerator: str
    topology: str
    chips: int
    pool: str


def mark_tpu_host(api: ApiClient, host: TpuHost) -> None:
    """Returns when the chips can be allocated. A starting kubelet sets them to zero; call this again then."""
    labels = dict(zip(LABELS, (host.accelerator, host.topology, str(host.chips), host.pool), strict=True))
    _dress(api, host.node, labels, [TPU_TAINT])

    def allocatable() -> bool:
        return _set_chips(api, host.node, str(host.chips)) == str(host.chips)

    wait_until(allocatable, timeout=WAIT_SECONDS, what=f"{host.node} has {host.chips} {RESOURCE}")


def unmark_tpu_host(api: ApiClient, node: str) -> None:
    """Makes it a plain node again."""
    _dress(api, node, dict.fromkeys(LABELS), [])
    _set_chips(api, node, None)


def _dress(api: ApiClient, node: str, labels: Mapping[str, str | None], taints: list[dict[str, str]]) -> None:
    """Sets labels (None removes one) and the TPU taint, and leaves the controller manager's taints alone."""
    path = f"/api/v1/nodes/{node}"

    def written() -> bool:
        found = api.call("GET", path)
        others = [taint for taint in found["spec"].get("taints", []) if taint["key"] != TPU_TAINT["key"]]
        version = found["metadata"]["resourceVersion"]
        patch = {"metadata": {"labels": labels, "resourceVersion": version}, "spec": {"taints": others + taints}}
        try:
            api.call("PATCH", path, patch, content_type=STRATEGIC_MERGE_PATCH)
        except ApiError as error:
            if error.status != 409:
                raise
            return False
        return True

    wait_until(written, timeout=WAIT_SECONDS, what=f"{node} has its labels and taints")


def _set_chips(api: ApiClient, node: str, chips: str | None) -> str | None:
    """Returns the allocatable resources after that."""
    equipped = {"status": {"capacity": {RESOURCE: chips}, "allocatable": {RESOURCE: chips}}}
    answer = api.call("PATCH", f"/api/v1/nodes/{node}/status", equipped, content_type=STRATEGIC_MERGE_PATCH)
    allocatable: str | None = answer["status"]["allocatable"].get(RESOURCE)
    return allocatable
