"""What a worker of a slice finds in its environment: the pod's variables, and those of GKE's device plugin."""

from collections.abc import Mapping
from typing import Any

from tpu_training_operator.api.catalogue import HOST_BLOCKS, Shape
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.validation import parse_job
from tpu_training_operator.domain.job.naming import WorkerId
from tpu_training_operator.domain.job.recipe.resolve import Resolution
from tpu_training_operator.domain.objects.worker_pod import worker_pod


def job_on(shape: Shape, **trainer: Any) -> TPUTrainingJob:
    """A job on all of a slice; `trainer`: further fields of spec.trainer."""
    where = {"generation": shape.generation, "topology": shape.topology, "machineType": shape.machine_type.name}
    recipe = {"globalBatchSize": shape.devices, "trainSteps": 1, "optimizer": {"name": "sgd", "learningRate": "0.1"}}
    return parse_job(
        {
            "apiVersion": "tpu-operator.dev/v1alpha1",
            "kind": "TPUTrainingJob",
            "metadata": {"name": "shape", "namespace": "default", "uid": "0"},
            "spec": {"slice": where, "trainer": {"image": "i", "entrypoint": "m:f", **trainer}, "recipe": recipe},
        }
    )


def device_plugin(shape: Shape) -> dict[str, str]:
    """What GKE's plugin sets in every container with google.com/tpu; the old `-device` labels give no bounds."""
    values = {
        "TPU_SKIP_MDS_QUERY": "true",
        "TPU_TOPOLOGY": shape.topology,
        "TPU_ACCELERATOR_TYPE": shape.accelerator_type,
    }
    if not shape.machine_type.label.endswith("-device"):
        values["TPU_HOST_BOUNDS"] = ",".join(map(str, shape.host_bounds))
        values["TPU_CHIPS_PER_HOST_BOUNDS"] = ",".join(map(str, HOST_BLOCKS[shape.chips_per_host]))
    return values


def pod_env(job: TPUTrainingJob, resolution: Resolution, worker: WorkerId, data: Mapping[str, str]) -> dict[str, str]:
    """The container's variables as its kubelet would resolve them."""
    variables: list[dict[str, Any]] = worker_pod(job, resolution, worker)["spec"]["containers"][0]["env"]
    return {
        variable["name"]: variable["value"]
        if "value" in variable
        else data[variable["valueFrom"]["configMapKeyRef"]["key"]]
        for variable in variables
    }
