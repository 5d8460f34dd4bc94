"""What kubelets, nodes, workers and users do to the pods of a `ModelCluster`.

A lost node does nothing: its pods stay as they were last seen, deleted or not, until the node is back.
"""

import json
from typing import Any

from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import KEY
from tpu_contract.protocol import ReportPhase
from tpu_training_operator.domain.cluster_state.observed import format_time
from tpu_training_operator.domain.cluster_state.worker_reports import WorkerReport
from tpu_training_operator.kube.cluster import Object
from tpu_training_operator.runtime.inbox import Inboxes

# Why the control plane gives up a pod: its node is lost, about to go, or needed for a more important job.
NODE_LOST = "DeletionByTaintManager"
TERMINATED_BY_KUBELET = "TerminationByKubelet"


def place(cluster: ModelCluster, pod: Object, node: str | None = None) -> None:
    """Assigns the pod to a node; nothing runs there yet."""
    if "nodeName" not in pod["spec"] and not _is_deleted(pod):
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": format_time(cluster.now)}
        pod["spec"]["nodeName"] = node or "node-of-" + pod["metadata"]["name"]
        pod["status"] = {"phase": "Pending", "conditions": [scheduled]}


def give_address(cluster: ModelCluster, pod: Object) -> None:
    """The pod's sandbox gets an address; a new sandbox, another one."""
    if pod["status"]["phase"] == "Pending" and not _is_deleted(pod):
        place(cluster, pod)
        if not is_lost(cluster, pod):
            pod["status"]["podIPs"] = [{"ip": cluster.new_address()}]


def start(cluster: ModelCluster, pod: Object) -> None:
    """The pod runs on its node and is not ready yet."""
    if pod["status"]["phase"] == "Pending" and not _is_deleted(pod):
        place(cluster, pod)
        if is_lost(cluster, pod):
            return
        if "podIPs" not in pod["status"]:
            give_address(cluster, pod)
        pod["status"] |= {
            "phase": "Running",
            "containerStatuses": [{"name": "trainer", "state": {"running": {"startedAt": format_time(cluster.now)}}}],
            "conditions": [*pod["status"]["conditions"], {"type": "Ready", "status": "False"}],
        }


def make_ready(cluster: ModelCluster, pod: Object) -> None:
    start(cluster, pod)
    runs = pod["status"]["phase"] == "Running" and _exit_code(pod) is None
    if runs and not _is_deleted(pod) and not is_lost(cluster, pod):
        others = [condition for condition in pod["status"]["conditions"] if condition["type"] != "Ready"]
        pod["status"]["conditions"] = [*others, {"type": "Ready", "status": "True"}]


def end(cluster: ModelCluster, pod: Object, code: int = 0, *, reason: str = "", message: str | None = None) -> None:
    """The container exits, if it runs, and the pod has ended. `message`: by default the trainer's."""
    leave(cluster, pod, code, reason=reason, message=message)
    _tell_end(cluster, pod)


def leave(cluster: ModelCluster, pod: Object, code: int = 0, *, reason: str = "", message: str | None = None) -> None:
    """The container exits, if it runs; a real kubelet reports this a moment before the end of the pod."""
    if pod["status"]["phase"] != "Running" or is_lost(cluster, pod) or _exit_code(pod) is not None:
        return
    terminated = {
        "exitCode": code,
        "reason": reason or ("Error" if code else "Completed"),
        "message": message if message is not None else "" if code else '{"outcome": "Succeeded", "message": ""}',
        "startedAt": pod["status"]["containerStatuses"][0]["state"]["running"]["startedAt"],
        "finishedAt": format_time(cluster.now),
    }
    pod["status"] |= {
        "containerStatuses": [{"name": "trainer", "state": {"terminated": terminated}}],
        "conditions": [condition for condition in pod["status"]["conditions"] if condition["type"] != "Ready"],
    }


def _exit_code(pod: Object) -> int | None:
    """Of the worker's container; None if it has not exited."""
    containers = pod["status"].get("containerStatuses") or [{"state": {}}]
    code: int | None = containers[0]["state"].get("terminated", {}).get("exitCode")
    return code


def _tell_end(cluster: ModelCluster, pod: Object) -> None:
    if pod["status"]["phase"] == "Running" and not is_lost(cluster, pod) and (code := _exit_code(pod)) is not None:
        pod["status"]["phase"] = "Failed" if code else "Succeeded"


def refuse(cluster: ModelCluster, pod: Object) -> None:
    """The kubelet has no room for the pod, so no container ever runs."""
    if pod["status"]["phase"] == "Pending":
        place(cluster, pod)
        pod["status"] |= {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no chips are free"}


def find_no_image(cluster: ModelCluster, pod: Object) -> None:
    """The pod has its node, but its image does not exist."""
    if pod["status"]["phase"] == "Pending":
        place(cluster, pod)
        waiting = {"reason": "ImagePullBackOff", "message": "localhost/tpu-examples:1: not found"}
        pod["status"]["containerStatuses"] = [{"name": "trainer", "state": {"waiting": waiting}}]


def find_chips_busy(cluster: ModelCluster, pod: Object) -> None:
    """Another process holds the chips of the node."""
    end(cluster, pod, 1, message="open /dev/vfio/0: Device or resource busy")


def find_host_unfit(cluster: ModelCluster, pod: Object) -> None:
    """The slice check measures that the worker's host cannot train."""
    _find_unfit(cluster, pod, pod["metadata"]["name"])


def find_chip_missing(cluster: ModelCluster, pod: Object) -> None:
    """The slice check finds fewer chips than there should be."""
    _find_unfit(cluster, pod, pod["metadata"]["name"], "device files: No such device for 1 of 4 chips: /dev/vfio")


def find_chips_held(cluster: ModelCluster, pod: Object) -> None:
    """The slice check finds chips that another process holds, perhaps one that is ending."""
    _find_unfit(cluster, pod, pod["metadata"]["name"], "device files: /dev/vfio/0: Device or resource busy")


def find_slice_unfit(cluster: ModelCluster, pod: Object) -> None:
    """The slice check finds a fault of the slice, for which it can blame no host."""
    _find_unfit(cluster, pod, "")


def _find_unfit(cluster: ModelCluster, pod: Object, host: str, message: str = "sum: 3, expected 4") -> None:
    words = {"outcome": "SliceUnfit", "message": message, "sliceCheck": {"host": host}}
    end(cluster, pod, 72, message=json.dumps(words))


def delete_by_hand(cluster: ModelCluster, pod: Object) -> None:
    cluster.delete_pod(pod["metadata"]["name"], pod["metadata"]["uid"])


def vanish(cluster: ModelCluster, pod: Object) -> None:
    """Deletes the pod by force: it is gone at once, whatever it was doing."""
    del cluster.pods[pod["metadata"]["name"]]


def sweep(cluster: ModelCluster) -> None:
    """Every pod that is being deleted stops and goes, if its node is alive; of the others, the ends are told."""
    for pod in cluster.pods.values():
        _tell_end(cluster, pod)
    gone = [name for name, pod in cluster.pods.items() if _is_deleted(pod) and not is_lost(cluster, pod)]
    for name in gone:
        del cluster.pods[name]


# Nodes.


def is_lost(cluster: ModelCluster, pod: Object) -> bool:
    return pod["spec"].get("nodeName") in cluster.lost


def lose_node(cluster: ModelCluster, pod: Object) -> None:
    """The pod's node falls silent."""
    if "nodeName" in pod["spec"]:
        cluster.lost.add(pod["spec"]["nodeName"])


def give_up(cluster: ModelCluster, pod: Object) -> None:
    """The control plane deletes a pod on a silent node. Only the node could release it."""
    if is_lost(cluster, pod) and not _has_ended(pod):
        if ready := [condition for condition in pod["status"]["conditions"] if condition["type"] == "Ready"]:
            ready[0]["status"] = "False"
        _disrupt(cluster, pod, NODE_LOST, "Taint manager: deleting due to NoExecute taint")
        delete_by_hand(cluster, pod)


def taint_node(cluster: ModelCluster, pod: Object) -> None:
    """A NoExecute taint: a pod that runs on the node gets its grace period."""
    if not is_lost(cluster, pod) and not _has_ended(pod):
        _disrupt(cluster, pod, NODE_LOST, "Taint manager: deleting due to NoExecute taint")
        delete_by_hand(cluster, pod)


def lose_node_for_good(cluster: ModelCluster, pod: Object) -> None:
    """The node is lost, and the control plane knows it."""
    lose_node(cluster, pod)
    give_up(cluster, pod)


def shut_down(cluster: ModelCluster, pod: Object) -> None:
    """The pod's node shuts down for maintenance: its kubelet stops the worker."""
    if pod["status"]["phase"] == "Running" and not is_lost(cluster, pod):
        _disrupt(cluster, pod, TERMINATED_BY_KUBELET, "Pod was terminated in response to imminent node shutdown.")
        end(cluster, pod, 143)


def preempt(cluster: ModelCluster, pod: Object) -> None:
    """The scheduler gives the pod's node to another, and the worker ends in time."""
    _disrupt(
        cluster, pod, "PreemptionByScheduler", "default-scheduler: preempting to accommodate a higher priority pod"
    )
    delete_by_hand(cluster, pod)
    end(cluster, pod, 143)


def nodes_come_back(cluster: ModelCluster) -> None:
    """Lost nodes come back and stop the pods deleted meanwhile; other workers kept running."""
    cluster.lost.clear()


def _disrupt(cluster: ModelCluster, pod: Object, reason: str, message: str) -> None:
    condition = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": reason,
        "message": message,
        "lastTransitionTime": format_time(cluster.now),
    }
    others = [known for known in pod["status"].get("conditions", ()) if known["type"] != "DisruptionTarget"]
    pod["status"]["conditions"] = [*others, condition]


# Reports of workers.


def report(
    cluster: ModelCluster,
    step: int,
    phase: ReportPhase = ReportPhase.TRAINING,
    *,
    to: Inboxes | None = None,
    **fields: Any,
) -> None:
    """Worker 0 of the current attempt reports to an operator, if it runs."""
    inboxes = cluster.inboxes if to is None else to
    assert inboxes is not None, "nobody listens"
    if (pod := reporter(cluster)) is not None:
        uid, attempt = pod["metadata"]["uid"], cluster.status.attempt
        inboxes.put(KEY, WorkerReport(attempt, uid, cluster.now, phase, step, **fields))


def reporter(cluster: ModelCluster) -> Object | None:
    """The pod of worker 0, while it runs and its node is reachable."""
    pod = cluster.pods.get(f"digits-{cluster.status.attempt}-0-0")
    if pod is None or pod["status"]["phase"] != "Running" or is_lost(cluster, pod):
        return None
    return pod


def _is_deleted(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _has_ended(pod: Object) -> bool:
    return pod["status"]["phase"] in ("Succeeded", "Failed")


def is_going(pod: Object) -> bool:
    """The pod is being deleted or has ended, so it computes nothing."""
    return _is_deleted(pod) or _has_ended(pod)


def runs(pod: Object) -> bool:
    return bool(pod["status"]["phase"] == "Running")


def stranger(name: str, *, attempt: int) -> Object:
    """A pod with the job's labels that is not a worker."""
    labels = {
        "tpu-operator.dev/job-name": "digits",
        "tpu-operator.dev/attempt": str(attempt),
        "tpu-operator.dev/slice-index": "0",
        "tpu-operator.dev/host-index": "0",
    }
    metadata = {"name": name, "namespace": "default", "uid": f"stranger-{name}", "labels": labels}
    return {"metadata": metadata, "spec": {"nodeName": "elsewhere"}, "status": {"phase": "Running"}}
