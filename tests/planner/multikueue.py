"""What Kueue does for MultiKueue, as far as this operator meets it.

In the cluster where the job was created, `dispatch` and `sync` write what its generic adapter writes. In the other
cluster, `copy_of` is the job as that creates it, beside the Workload that it has made before.
"""

from typing import Any

from tests.planner import kueue
from tests.planner.model_cluster import ModelCluster, copied
from tpu_training_operator.domain.cluster_state.workload import Workload
from tpu_training_operator.kube.cluster import Object

MANAGED = {"spec.managedBy": "kueue.x-k8s.io/multikueue"}


def copy_of(there: ModelCluster, *, changes: dict[str, Any] | None = None) -> ModelCluster:
    """Another cluster with a copy of the job of `there`, whose Workload Kueue admits."""
    template = kueue.seen(there).raw
    other = ModelCluster(changes)
    kueue.put_in_queue(other)
    other.job["spec"] = copied({key: value for key, value in there.job["spec"].items() if key != "managedBy"})
    name, labels = template["metadata"]["name"], {"kueue.x-k8s.io/multikueue-origin": "here"}
    other.job["metadata"]["labels"] |= labels | {"kueue.x-k8s.io/prebuilt-workload-name": name}
    other.job["metadata"]["uid"] = "uid-of-the-copy"
    meta = {"name": name, "namespace": "default", "labels": labels, "resourceVersion": "1"}
    other.create({**template, "metadata": meta})
    return other


def dispatch(cluster: ModelCluster) -> None:
    """Another cluster has admitted the job."""
    kueue.admit(cluster, clusterName="other")


def sync(cluster: ModelCluster, status: Object) -> None:
    """Kueue copies the status of the copy."""
    cluster.job["status"] = copied(status)
    cluster.job["metadata"]["generation"] = cluster.job["metadata"].get("generation", 1)


def copy_is_to_go(cluster: ModelCluster) -> bool:
    """Whether Kueue deletes the copy now."""
    found = kueue.workload(cluster)
    return found is None or not Workload(found).holds_quota or not Workload(found).is_active
