"""Builds placeholder pods, which find out whether a better slice is available and hold its nodes until the gang comes.

A placeholder requests what a worker requests, and does nothing. It has the workers' image, which its node therefore
pulls in advance. It has no volumes, no environment and no token.
"""

from collections.abc import Sequence
from typing import Any

from tpu_training_operator.api import constants
from tpu_training_operator.domain.job import naming
from tpu_training_operator.domain.job.naming import WorkerId
from tpu_training_operator.domain.job.options import SliceOption
from tpu_training_operator.domain.objects.actions import Create, Creations
from tpu_training_operator.domain.objects.shared import metadata
from tpu_training_operator.domain.objects.worker_nodes import pool_labels
from tpu_training_operator.domain.objects.worker_pod import container_security, worker_pod

Object = dict[str, Any]

# Process 1 ignores signals that it does not handle.
_SLEEP = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit()); signal.pause()"
_COPIED = (
    "restartPolicy",
    "runtimeClassName",
    "securityContext",
    "nodeSelector",
    "affinity",
    "tolerations",
    "imagePullSecrets",
)
_OF_CONTAINER = ("name", "image", "imagePullPolicy", "resources")


def missing_placeholders(option: SliceOption, first: int, existing: Sequence[str]) -> Creations:
    """Returns the creations of the missing placeholders for the slices from `first` on; earlier slices already run.
    Part of a slice is of no use, so the first refusal ends the batch. `existing`: the names of the placeholders that
    exist."""
    known, name = set(existing), option.job.name
    wanted = (worker for worker in naming.workers(option.layout, 0) if worker.slice >= first)
    missing = (worker for worker in wanted if naming.placeholder_name(name, option.number, worker) not in known)
    return Creations(tuple(missing), _create, (option,))


def _create(worker: WorkerId, option: SliceOption) -> Create:
    job = option.job
    worker_body = worker_pod(job, option.resolution, worker)
    spec = {name: worker_body["spec"][name] for name in _COPIED if name in worker_body["spec"]}
    container = worker_body["spec"]["containers"][0]
    policy = job.spec.placement
    spec |= {
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [
            {name: container[name] for name in _OF_CONTAINER if name in container}
            | {"command": ["python", "-c", _SLEEP]}
            | {"securityContext": container_security(job.spec.trainer, may_be_privileged=False)}
        ],
    }
    if policy is not None and policy.placeholder_priority_class is not None:
        spec["priorityClassName"] = policy.placeholder_priority_class
    labels = {
        **naming.worker_labels(job.name, worker),
        **pool_labels(job, option.resolution, worker),
        "app.kubernetes.io/component": "placeholder",
        constants.LABEL_ALTERNATIVE: str(option.number),
    }
    name = naming.placeholder_name(job.name, option.number, worker)
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata(job, name, labels), "spec": spec}
    return Create(body, optional=True, for_better_slice=True)
