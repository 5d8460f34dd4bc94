"""A worker's pod as a kubelet of Kubernetes 1.35 leaves it when something went wrong."""

from dataclasses import dataclass, field
from typing import Any

from tests.unit.pods import deleted, disrupted, pod, time_at, with_status
from tpu_training_operator.api import constants

Object = dict[str, Any]
IMAGE = "registry.example/team/digits:v9"
NODE = "tpu-node-7"


@dataclass(frozen=True)
class FailedPod:
    """`body`: what the API server has. `at`: seconds past noon at which it is a failure; its node was found at noon."""

    name: str
    body: Object = field(repr=False)
    failure_class: str
    reason: str
    message: str
    at: float = 60


def placed(**status: Any) -> Object:
    """A pod that has had its node since noon."""
    conditions = [
        {
            "type": "PodReadyToStartContainers",
            "status": "True",
            "lastProbeTime": None,
            "lastTransitionTime": time_at(1),
        },
        {"type": "Initialized", "status": "True", "lastProbeTime": None, "lastTransitionTime": time_at(0)},
        {"type": "Ready", "status": "False", "lastProbeTime": None, "lastTransitionTime": time_at(9)},
        {"type": "ContainersReady", "status": "False", "lastProbeTime": None, "lastTransitionTime": time_at(9)},
        {"type": "PodScheduled", "status": "True", "lastProbeTime": None, "lastTransitionTime": time_at(0)},
    ]
    body = with_status(
        pod(node=NODE),
        conditions=conditions,
        hostIP="10.0.0.7",
        podIP="10.1.0.7",
        qosClass="Burstable",
        startTime=time_at(0),
        **status,
    )
    body["metadata"]["creationTimestamp"] = time_at(-5)
    return body


def container(state: Object, name: str = "trainer") -> Object:
    return {
        "name": name,
        "image": IMAGE,
        "imageID": "",
        "lastState": {},
        "ready": False,
        "restartCount": 0,
        "started": False,
        "state": state,
    }


def of_entrypoint(body: Object, command: list[str] = constants.TRAINER_COMMAND) -> Object:
    """The same, of a worker that runs `trainer.entrypoint`."""
    containers = [{"name": "trainer", "command": command}]
    return {**body, "spec": {**body["spec"], "containers": containers}}


def of_host(host: int, body: Object) -> Object:
    """The same, of another worker of the gang."""
    return {**body, "metadata": {**pod(host)["metadata"], "creationTimestamp": time_at(-5)}}


def exited(code: int, message: str = "", reason: str = "Error") -> Object:
    """The container ended nine seconds past noon. One that could not be started began in 1970, says containerd."""
    terminated = {
        "containerID": "containerd://5f0c",
        "exitCode": code,
        "finishedAt": time_at(9),
        "message": message,
        "reason": reason,
        "startedAt": "1970-01-01T00:00:00Z" if reason == "StartError" else time_at(2),
    }
    return placed(phase="Failed", containerStatuses=[container({"terminated": terminated})])


def by_kubelet(body: Object, reason: str, message: str, condition: str = "") -> Object:
    """The kubelet ended the pod; with `condition`, it announced that at five seconds past noon."""
    ended = with_status(body, reason=reason, message=message)
    return disrupted(ended, "TerminationByKubelet", after=5, message=condition) if condition else ended


def held_up(reason: str, message: str, name: str = "trainer") -> Object:
    """The container waits; a webhook's init container keeps the worker's waiting too."""
    waits = container({"waiting": {"reason": reason, "message": message}}, name)
    if name == "trainer":
        return placed(phase="Pending", containerStatuses=[waits])
    behind = container({"waiting": {"reason": "PodInitializing"}})
    return placed(phase="Pending", initContainerStatuses=[waits], containerStatuses=[behind])


def refused(reason: str, message: str) -> Object:
    """Not admitted by the kubelet: no container, and no conditions but the scheduler's."""
    body = placed(phase="Failed", reason=reason, message=f"Pod was rejected: {message}")
    scheduled = [condition for condition in body["status"]["conditions"] if condition["type"] == "PodScheduled"]
    return with_status(body, conditions=scheduled)


def running() -> Object:
    return placed(phase="Running", containerStatuses=[container({"running": {"startedAt": time_at(2)}})])


def lost(reason: str, message: str) -> Object:
    """On a node that does not answer: the container still counts as running, the pod is on its way out."""
    return deleted(disrupted(running(), reason, after=5, message=message), after=5)


def runc(message: str) -> str:
    return (
        "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: "
        f"{message}: unknown"
    )
