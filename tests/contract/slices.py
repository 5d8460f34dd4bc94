"""What a worker of a slice finds in its environment from its pod. `device_plugin` has what GKE adds."""

from collections.abc import Mapping
from typing import Any

from tpu_training_operator.api.catalogue import Shape
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.validation import parse_job
from tpu_training_operator.domain.job.naming import WorkerId
from tpu_training_operator.domain.job.recipe.resolve import Resolution
from tpu_training_operator.domain.objects.worker_env import shared_env
from tpu_training_operator.domain.objects.worker_pod import worker_pod


def job_on(shape: Shape, formation: str = "NodePool", **trainer: Any) -> TPUTrainingJob:
    """A job on all of a slice; `trainer`: further fields of spec.trainer."""
    where: dict[str, Any] = {"formation": formation}
    where |= {"generation": shape.generation, "topology": shape.topology, "machineType": shape.machine_type.name}
    recipe = {"globalBatchSize": shape.devices, "trainSteps": 1, "optimizer": {"name": "sgd", "learningRate": "0.1"}}
    return parse_job(
        {
            "apiVersion": "tpu-operator.dev/v1alpha1",
            "kind": "TPUTrainingJob",
            "metadata": {"name": "shape", "namespace": "default", "uid": "0"},
            "spec": {"slice": where, "trainer": {"image": "i", "entrypoint": "m:f", **trainer}, "recipe": recipe},
        }
    )


def pod_env(job: TPUTrainingJob, resolution: Resolution, worker: WorkerId, data: Mapping[str, str]) -> dict[str, str]:
    """The container's variables as its kubelet would resolve them."""
    variables: list[dict[str, Any]] = worker_pod(job, resolution, worker)["spec"]["containers"][0]["env"]
    # The node's name is known only there.
    known = (variable for variable in variables if "fieldRef" not in variable.get("valueFrom", {}))
    return shared_env(job, resolution, worker.attempt) | {
        variable["name"]: variable["value"]
        if "value" in variable
        else data[variable["valueFrom"]["configMapKeyRef"]["key"]]
        for variable in known
    }
