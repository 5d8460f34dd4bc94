"""Worker pods as an API server shows them."""

from datetime import UTC, datetime, timedelta
from typing import Any

from tests.unit.jobs import job_body
from tpu_training_operator.domain.cluster_state.observed import WorkerPod, format_time
from tpu_training_operator.domain.job.naming import WorkerId, worker_labels

UID = job_body()["metadata"]["uid"]
NOON = datetime(2026, 1, 15, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def time_at(seconds: float) -> str:
    return format_time(at(seconds))


def pod(host: int = 0, *, attempt: int = 1, slice_index: int = 0, owner: str = UID, node: str = "") -> dict[str, Any]:
    """A worker's pod that waits for a node."""
    worker = WorkerId(attempt, slice_index, host)
    name = worker.pod_name("digits")
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-of-{name}",
            "labels": worker_labels("digits", worker),
            "ownerReferences": [
                {
                    "apiVersion": "tpu-operator.dev/v1alpha1",
                    "kind": "TPUTrainingJob",
                    "name": "digits",
                    "uid": owner,
                    "controller": True,
                }
            ],
        },
        "spec": {"nodeName": node} if node else {},
        "status": {"phase": "Pending"},
    }


def with_status(body: dict[str, Any], **status: Any) -> dict[str, Any]:
    return {**body, "status": {**body["status"], **status}}


def ready(body: dict[str, Any]) -> dict[str, Any]:
    return with_status(body, phase="Running", conditions=[{"type": "Ready", "status": "True"}])


def ended(
    body: dict[str, Any], code: int = 0, *, after: float = 0, message: str = "", reason: str = ""
) -> dict[str, Any]:
    """The container has exited with `code`, `after` seconds past noon."""
    terminated = {
        "exitCode": code,
        "reason": reason or ("Error" if code else "Completed"),
        "message": message,
        "finishedAt": time_at(after),
    }
    statuses = [{"name": "trainer", "state": {"terminated": terminated}}]
    return with_status(body, phase="Failed" if code else "Succeeded", containerStatuses=statuses)


def deleted(body: dict[str, Any], *, after: float = 0, grace: int = 30) -> dict[str, Any]:
    """Deletion was asked for `after` seconds past noon; the timestamp is when the grace period ends."""
    marks = {"deletionTimestamp": time_at(after + grace), "deletionGracePeriodSeconds": grace}
    return {**body, "metadata": {**body["metadata"], **marks}}


def disrupted(
    body: dict[str, Any], reason: str, *, after: float = 0, message: str = "", kind: str = "DisruptionTarget"
) -> dict[str, Any]:
    condition = {
        "type": kind,
        "status": "True",
        "reason": reason,
        "message": message,
        "lastTransitionTime": time_at(after),
    }
    conditions = [*body["status"].get("conditions", ()), condition]
    return with_status(body, conditions=conditions)


def seen(*bodies: dict[str, Any]) -> list[WorkerPod]:
    return [WorkerPod(body) for body in bodies]
