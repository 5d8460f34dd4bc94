"""Every slice shape, as the API server sees it: the job is admitted, and so is each kind of object made for it."""

import uuid
from typing import Any

import pytest

from tests.cluster.control_plane import ControlPlane
from tests.controlplane.jobs import digits
from tpu_training_operator.api.catalogue import Generation, Shape, generations
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.validation import parse_job
from tpu_training_operator.domain.cluster_state.observed import WorkerPod
from tpu_training_operator.domain.job.naming import workers
from tpu_training_operator.domain.job.recipe.resolve import Resolution, resolve
from tpu_training_operator.domain.objects.endpoints import publication
from tpu_training_operator.domain.objects.shared import config_map, service
from tpu_training_operator.domain.objects.worker_pod import worker_pod

Object = dict[str, Any]

ON_GKE = [generation for generation in generations().values() if generation.on_gke]


def jobs_on(shape: Shape) -> list[Object]:
    """The shape by topology, and by accelerator type if one stands for this shape."""
    by_topology = {"generation": shape.generation, "topology": shape.topology, "machineType": shape.machine_type.name}
    ways: list[Object] = [by_topology, {"acceleratorType": shape.accelerator_type}] if shape.default else [by_topology]
    jobs = [digits(recipe={"globalBatchSize": shape.devices, "tunedOn": way}) for way in ways]
    for job, way in zip(jobs, ways, strict=True):
        job["spec"]["slice"] = way
    return jobs


@pytest.mark.parametrize("generation", ON_GKE, ids=lambda g: g.name)
def test_every_shape_is_admitted_with_its_objects(
    control_plane: ControlPlane, job_definition: None, namespace: str, generation: Generation
) -> None:
    def dry_run(path: str, body: Object) -> None:
        control_plane.api.call("POST", f"{path}/namespaces/{namespace}/{_plural(body)}?dryRun=All", body)

    with_addresses = sizes(generation)
    for shape in generation.shapes:
        for job in jobs_on(shape):
            dry_run("/apis/tpu-operator.dev/v1alpha1", job)
            job["metadata"] |= {"namespace": namespace, "uid": "00000000-0000-0000-0000-000000000000"}
            parsed = parse_job(job)
            resolution = resolve(parsed.spec)
            assert resolution.resolved.hosts == shape.hosts
        # However the slice was named, it is the same one.
        last = workers(resolution.layout, 1)[-1]
        for body in (service(parsed), config_map(parsed, resolution, 1), worker_pod(parsed, resolution, last)):
            dry_run("/api/v1", body)
        if shape.hosts in with_addresses:
            for body in addresses(parsed, resolution):
                dry_run("/api/v1" if body["kind"] == "Endpoints" else "/apis/discovery.k8s.io/v1", body)


def sizes(generation: Generation) -> set[int]:
    """Of the gangs whose addresses are tried. Nothing but their number differs, and up to 1000 go into one object."""
    hosts = [shape.hosts for shape in generation.shapes]
    return {min(hosts), max(hosts), max(n for n in hosts if n <= 1000), min((n for n in hosts if n > 1000), default=1)}


def addresses(job: TPUTrainingJob, resolution: Resolution) -> tuple[Object, ...]:
    """What makes the workers' names resolve once all have started."""
    pods = []
    for number, worker in enumerate(workers(resolution.layout, 1)):
        metadata = {"name": worker.pod_name(job.name), "uid": str(uuid.UUID(int=number))}
        address = {"ip": f"10.0.{number // 256}.{number % 256}"}
        status = {"podIPs": [address]}
        pods.append(WorkerPod({"metadata": metadata, "spec": {"nodeName": f"node-{number}"}, "status": status}))
    made = publication(job, resolution.layout, pods, None)
    return () if made is None else made.bodies


def _plural(body: Object) -> str:
    return {
        "TPUTrainingJob": "tputrainingjobs",
        "Service": "services",
        "ConfigMap": "configmaps",
        "Pod": "pods",
        "EndpointSlice": "endpointslices",
        "Endpoints": "endpoints",
    }[body["kind"]]
