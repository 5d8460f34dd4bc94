"""Finds nodes for the pods of a `ModelCluster`: one worker per node, as with slices of Cloud TPU."""

from collections.abc import Iterable, Sequence

from tests.planner import kubelet
from tests.planner.model_cluster import ModelCluster
from tpu_training_operator.kube.cluster import Object


def place_all(cluster: ModelCluster, nodes: Sequence[str], pods: Iterable[Object] | None = None) -> None:
    """Places as many pods as there is room for, none on a lost node. A node is taken until its pod has ended or is
    gone, even while the pod is being deleted."""
    for pod in cluster.pods.values() if pods is None else pods:
        if "nodeName" in pod["spec"]:
            continue
        taken = {other["spec"].get("nodeName") for other in cluster.pods.values() if not has_ended(other)}
        free = [node for node in nodes if node not in taken | cluster.lost | avoided(pod)]
        if free:
            kubelet.place(cluster, pod, free[0])


def has_ended(pod: Object) -> bool:
    return pod["status"]["phase"] in ("Succeeded", "Failed")


def avoided(pod: Object) -> set[str]:
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", ())
    return {value for term in terms for field in term["matchFields"] for value in field["values"]}
