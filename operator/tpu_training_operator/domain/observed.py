"""What the cluster holds, as the planner reads it. Built by the reconciler from raw objects, never written back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from tpu_training_operator.api import constants
from tpu_training_operator.domain.naming import WorkerId
from tpu_training_operator.domain.report import NOTHING_HEARD, Inbox, Report

Object = Mapping[str, Any]


@dataclass(frozen=True)
class WorkerPod:
    """One pod of the job, read through its labels; `raw` is the pod as the API server gave it."""

    raw: Object

    @cached_property
    def worker(self) -> WorkerId:
        labels = self.raw["metadata"]["labels"]
        return WorkerId(
            int(labels[constants.LABEL_ATTEMPT]),
            int(labels[constants.LABEL_SLICE_INDEX]),
            int(labels[constants.LABEL_HOST_INDEX]),
        )

    @property
    def name(self) -> str:
        return str(self.raw["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.raw["metadata"]["uid"])

    @property
    def node(self) -> str | None:
        node = self.raw.get("spec", {}).get("nodeName")
        return None if node is None else str(node)

    @property
    def phase(self) -> str:
        return str(self.raw.get("status", {}).get("phase", "Pending"))

    @property
    def is_terminating(self) -> bool:
        return "deletionTimestamp" in self.raw["metadata"]

    @property
    def created(self) -> datetime:
        return parse_time(self.raw["metadata"]["creationTimestamp"])

    @property
    def placed(self) -> datetime | None:
        """When the pod got its node; None before."""
        scheduled = self.condition("PodScheduled")
        at = scheduled.get("lastTransitionTime") if scheduled.get("status") == "True" else None
        return parse_time(at) if at else (self.created if self.node else None)

    @property
    def has_ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def is_ready(self) -> bool:
        return self.condition("Ready").get("status") == "True" and not self.is_terminating

    def condition(self, kind: str) -> Object:
        conditions: Sequence[Object] = self.raw.get("status", {}).get("conditions") or ()
        return next((condition for condition in conditions if condition["type"] == kind), {})

    @cached_property
    def termination(self) -> Object:
        """`state.terminated` of the trainer container (exitCode, reason, message, finishedAt); empty before."""
        statuses: Sequence[Object] = self.raw.get("status", {}).get("containerStatuses") or ()
        for status in statuses:
            if status["name"] == constants.CONTAINER_NAME:
                terminated: Object = status.get("state", {}).get("terminated") or {}
                return terminated
        return {}

    @property
    def exit_code(self) -> int | None:
        return self.termination.get("exitCode")


@dataclass(frozen=True)
class Observed:
    """The job, those pods that it controls (by uid; a label alone proves nothing), and what its workers have said."""

    job: Object
    pods: tuple[WorkerPod, ...]
    inbox: Inbox = NOTHING_HEARD

    @staticmethod
    def of(job: Object, pods: Sequence[Object], inbox: Inbox = NOTHING_HEARD) -> "Observed":
        uid = job["metadata"]["uid"]
        owned = (pod for pod in pods if controller_uid(pod) == uid)
        return Observed(job, tuple(WorkerPod(pod) for pod in owned if _is_worker(pod)), inbox)

    @property
    def report(self) -> Report | None:
        """What a worker has said that is there still: an older job may have had the same name."""
        said = self.inbox.report
        return said if said and any(pod.uid == said.pod_uid for pod in self.pods) else None

    def of_attempt(self, attempt: int) -> list[WorkerPod]:
        return sorted((p for p in self.pods if p.worker.attempt == attempt), key=lambda pod: pod.worker)

    def not_of_attempt(self, attempt: int) -> list[WorkerPod]:
        return sorted((p for p in self.pods if p.worker.attempt != attempt), key=lambda pod: pod.worker)


# What the planner reads of a pod, and what tells a person which one it was. A pod has twice as much in its
# managedFields alone, and the largest gang has five thousand pods.
_METADATA = (
    *("name", "uid", "ownerReferences"),
    *("creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "finalizers"),
)
_SPEC = ("nodeName", "schedulingGates", "terminationGracePeriodSeconds")
_STATUS = ("phase", "reason", "message", "startTime", "conditions", "initContainerStatuses", "containerStatuses")
_LABELS = (constants.LABEL_ATTEMPT, constants.LABEL_SLICE_INDEX, constants.LABEL_HOST_INDEX)
_CONTAINER = ("name", "state", "lastState", "ready", "restartCount")


def slim(pod: Object) -> dict[str, Any]:
    """The pod with the fields that the planner reads: every plan is the same as with all of them."""
    status = _only(pod.get("status") or {}, _STATUS)
    for name in ("initContainerStatuses", "containerStatuses"):
        if containers := status.get(name):
            status[name] = [_only(container, _CONTAINER) for container in containers]
    metadata = _only(pod["metadata"], _METADATA)
    metadata["labels"] = _only(pod["metadata"].get("labels") or {}, _LABELS)
    return {"metadata": metadata, "spec": _only(pod.get("spec") or {}, _SPEC), "status": status}


def _only(fields: Object, names: Sequence[str]) -> dict[str, Any]:
    return {name: fields[name] for name in names if name in fields}


def controller_uid(raw: Object) -> str | None:
    references: Sequence[Object] = raw["metadata"].get("ownerReferences") or ()
    return next((str(reference["uid"]) for reference in references if reference.get("controller")), None)


def _is_worker(pod: Object) -> bool:
    labels: Object = pod["metadata"].get("labels") or {}
    indices = (constants.LABEL_ATTEMPT, constants.LABEL_SLICE_INDEX, constants.LABEL_HOST_INDEX)
    return all(str(labels.get(label, "")).isdigit() for label in indices)


def parse_time(text: str) -> datetime:
    """A Kubernetes timestamp (RFC 3339, UTC)."""
    return datetime.fromisoformat(text)


def format_time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
