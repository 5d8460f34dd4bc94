"""What kubelets and people do to the pods of a `ModelCluster`."""

from typing import Any

from tests.planner.model_cluster import ModelCluster
from tpu_training_operator.domain.observed import format_time

Object = dict[str, Any]


def place(cluster: ModelCluster, pod: Object) -> None:
    """The scheduler has found a node; nothing runs there yet."""
    if "nodeName" not in pod["spec"]:
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": format_time(cluster.now)}
        pod["spec"]["nodeName"] = "node-of-" + pod["metadata"]["name"]
        pod["status"] = {"phase": "Pending", "conditions": [scheduled]}


def start(cluster: ModelCluster, pod: Object) -> None:
    """Bound to a node and running; not ready yet."""
    if pod["status"]["phase"] == "Pending":
        place(cluster, pod)
        pod["status"] |= {
            "phase": "Running",
            "conditions": [*pod["status"]["conditions"], {"type": "Ready", "status": "False"}],
        }


def make_ready(cluster: ModelCluster, pod: Object) -> None:
    start(cluster, pod)
    if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]:
        others = [condition for condition in pod["status"]["conditions"] if condition["type"] != "Ready"]
        pod["status"]["conditions"] = [*others, {"type": "Ready", "status": "True"}]


def end(cluster: ModelCluster, pod: Object, code: int = 0, *, reason: str = "", message: str = "") -> None:
    """The container exits, if it ever ran and has not already."""
    if pod["status"]["phase"] != "Running":
        return
    terminated = {
        "exitCode": code,
        "reason": reason or ("Error" if code else "Completed"),
        "message": message,
        "finishedAt": format_time(cluster.now),
    }
    pod["status"] = {
        "phase": "Failed" if code else "Succeeded",
        "containerStatuses": [{"name": "trainer", "state": {"terminated": terminated}}],
    }


def refuse(_: ModelCluster, pod: Object) -> None:
    """The kubelet has no room for it: no container ever runs."""
    if pod["status"]["phase"] == "Pending":
        pod["spec"]["nodeName"] = "node-of-" + pod["metadata"]["name"]
        pod["status"] = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no chips are free"}


def delete_by_hand(cluster: ModelCluster, pod: Object) -> None:
    cluster.delete_pod(pod["metadata"]["name"], pod["metadata"]["uid"])


def vanish(cluster: ModelCluster, pod: Object) -> None:
    """Deleted by force: gone at once, whatever it was doing."""
    del cluster.pods[pod["metadata"]["name"]]


def sweep(cluster: ModelCluster) -> None:
    """Every deleted pod stops and goes."""
    for name in [name for name, pod in cluster.pods.items() if "deletionTimestamp" in pod["metadata"]]:
        del cluster.pods[name]


def is_going(pod: Object) -> bool:
    """Being deleted, or ended: it computes nothing any more."""
    return "deletionTimestamp" in pod["metadata"] or pod["status"]["phase"] in ("Succeeded", "Failed")


def stranger(name: str, *, attempt: int) -> Object:
    """A pod that carries the job's labels and is nobody's worker."""
    labels = {
        "tpu-operator.dev/job-name": "digits",
        "tpu-operator.dev/attempt": str(attempt),
        "tpu-operator.dev/slice-index": "0",
        "tpu-operator.dev/host-index": "0",
    }
    metadata = {"name": name, "namespace": "default", "uid": f"stranger-{name}", "labels": labels}
    return {"metadata": metadata, "spec": {"nodeName": "elsewhere"}, "status": {"phase": "Running"}}
