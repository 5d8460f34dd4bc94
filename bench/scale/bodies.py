"""What the contenders create: a job, the pods the operator would make of it, and an Indexed Job or a JobSet of them."""

import copy
from typing import Any

from tpu_training_operator.api.constants import GROUP
from tpu_training_operator.api.validation import parse_job
from tpu_training_operator.domain.job.naming import workers
from tpu_training_operator.domain.job.recipe.resolve import resolve
from tpu_training_operator.domain.objects.worker_pod import worker_pod

Object = dict[str, Any]

TOPOLOGIES = {4: "2x2x4", 8: "2x4x4", 32: "4x4x8", 64: "4x8x8", 256: "8x8x16", 1024: "16x16x16", 2304: "16x24x24"}
"""Slices of one generation, tpu7x, by their hosts; the last is the largest slice there is."""


def training_job(name: str, hosts: int, namespace: str = "") -> Object:
    spec = {
        "slice": {"generation": "tpu7x", "topology": TOPOLOGIES[hosts], "hardware": "CPU"},
        "trainer": {"image": "localhost/tpu-examples:1", "entrypoint": "examples.digits:task"},
        "recipe": {
            # tpu7x has eight replicas on a host.
            "globalBatchSize": 8 * hosts,
            "trainSteps": 300,
            "optimizer": {"name": "sgd", "learningRate": 0.1},
        },
    }
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    kind = {"apiVersion": f"{GROUP}/v1alpha1", "kind": "TPUTrainingJob"}
    return {**kind, "metadata": metadata, "spec": spec}


def worker_pods(name: str, hosts: int, namespace: str, owner: Object, attempt: int = 1) -> list[Object]:
    """Returns the same bodies as the operator's. Other label names keep the operator from them, and `owner` keeps the
    garbage collector from them."""
    body = training_job(name, hosts, namespace)
    body["metadata"]["uid"] = owner["metadata"]["uid"]
    job = parse_job(body)
    resolution = resolve(job.spec)
    return [_disowned(worker_pod(job, resolution, each), owner) for each in workers(resolution.layout, attempt)]


def bare_pods(name: str, hosts: int, namespace: str, owner: Object, attempt: int = 1) -> list[Object]:
    """Returns pods as small as those of other controllers, with an owner, a host name and the worker's own
    variables."""
    return [_smallest(pod) for pod in worker_pods(name, hosts, namespace, owner, attempt)]


def _smallest(pod: Object) -> Object:
    meta, spec = pod["metadata"], pod["spec"]
    (container,) = spec["containers"]
    kept = {key: container[key] for key in ("name", "image", "command")} | {"env": container["env"][:2]}
    return {
        **pod,
        "metadata": {key: meta[key] for key in ("name", "namespace", "labels", "ownerReferences")},
        "spec": {key: spec[key] for key in ("hostname", "subdomain", "restartPolicy")} | {"containers": [kept]},
    }


def _disowned(pod: Object, owner: Object) -> Object:
    [reference] = pod["metadata"]["ownerReferences"]
    reference |= {"apiVersion": "v1", "kind": "ConfigMap", "name": owner["metadata"]["name"]}
    return pod | {"metadata": pod["metadata"] | {"labels": _foreign(pod["metadata"]["labels"])}}


def _foreign(labels: Object) -> Object:
    return {key.replace(GROUP, "tpu-of-nobody.dev"): value for key, value in labels.items()}


def indexed_job(name: str, pods: list[Object]) -> Object:
    """Pods like the first of these, which the controller manager creates."""
    first = copy.deepcopy(pods[0])
    # The controller gives every pod its own.
    del first["spec"]["hostname"]
    template = {"metadata": {"labels": first["metadata"]["labels"]}, "spec": first["spec"]}
    spec = {"completionMode": "Indexed", "completions": len(pods), "parallelism": len(pods), "template": template}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


def job_set(name: str, pods: list[Object]) -> Object:
    """Makes a JobSet of the same Indexed Job, which it replaces whole once it has failed; a Job fails with its first
    pod."""
    job = indexed_job(name, pods)["spec"] | {"backoffLimit": 0}
    spec = {
        "replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": job}}],
        "failurePolicy": {"maxRestarts": 1},
    }
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": name}, "spec": spec}
