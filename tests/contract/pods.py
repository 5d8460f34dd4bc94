"""Worker pods as an API server has them, for the tests of what operator and trainer tell each other."""

from collections.abc import Mapping
from typing import Any

from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.domain.cluster_state.observed import WorkerPod
from tpu_training_operator.domain.cluster_state.worker_reports import Reporting
from tpu_training_operator.domain.job.naming import WorkerId, workers
from tpu_training_operator.domain.job.recipe.resolve import resolve
from tpu_training_operator.domain.objects.shared import config_map
from tpu_training_operator.domain.objects.worker_env import shared_env
from tpu_training_operator.domain.objects.worker_pod import worker_pod

ATTEMPT = 2

REPORTING = Reporting("https://operator.tpu-system.svc:8443", "-----BEGIN CERTIFICATE-----\n")


def worker_environments(job: TPUTrainingJob, reporting: Reporting | None = None) -> list[dict[str, str]]:
    """The environment of every container of the gang, in the order of the hosts, with ConfigMap references resolved."""
    resolution = resolve(job.spec)
    data = config_map(job, resolution, ATTEMPT, reporting)
    pods = [worker_pod(job, resolution, worker, reporting) for worker in workers(resolution.layout, ATTEMPT)]
    shared = shared_env(job, resolution, ATTEMPT)
    return [shared | _environment(pod, data) for pod in pods]


def _environment(pod: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, str]:
    def value(variable: Mapping[str, Any]) -> str:
        if "value" in variable:
            return str(variable["value"])
        if "fieldRef" in variable["valueFrom"]:
            assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"
            return "node-1"
        reference = variable["valueFrom"]["configMapKeyRef"]
        assert reference["name"] == data["metadata"]["name"]
        return str(data["data"][reference["key"]])

    (container,) = pod["spec"]["containers"]
    return {variable["name"]: value(variable) for variable in container["env"]}


def ended_pod(exit_code: int, message: str) -> WorkerPod:
    """Worker 0 after its end, with its termination message as read by the kubelet."""
    terminated = {"exitCode": exit_code, "message": message, "finishedAt": "2026-01-01T00:00:00Z"}
    worker = WorkerId(ATTEMPT, 0, 0)
    labels = {"attempt": worker.attempt, "slice-index": worker.slice, "host-index": worker.host}
    return WorkerPod(
        {
            "metadata": {
                "name": worker.pod_name("digits"),
                "uid": "4d5f",
                "labels": {f"tpu-operator.dev/{name}": str(value) for name, value in labels.items()},
            },
            "status": {
                "phase": "Failed" if exit_code else "Succeeded",
                "containerStatuses": [{"name": "trainer", "state": {"terminated": terminated}}],
            },
        }
    )
