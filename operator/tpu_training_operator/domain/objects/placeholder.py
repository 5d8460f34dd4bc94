"""Builds placeholder pods, which find out whether a better slice is available and hold its nodes until the gang comes.

A placeholder requests what a worker requests, and does nothing. It has the workers' image, which its node therefore
pulls in advance. It has no volumes, no environment and no token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from tpu_training_operator.api import constants
from tpu_training_operator.domain.job import naming
from tpu_training_operator.domain.job.naming import WorkerId
from tpu_training_operator.domain.job.options import SliceOption
from tpu_training_operator.domain.objects.actions import Action, Create
from tpu_training_operator.domain.objects.shared import metadata
from tpu_training_operator.domain.objects.worker_nodes import pool_labels
from tpu_training_operator.domain.objects.worker_pod import worker_pod

Object = dict[str, Any]

# Process 1 ignores signals that it does not handle.
_SLEEP = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit()); signal.pause()"
_COPIED = ("restartPolicy", "securityContext", "nodeSelector", "affinity", "tolerations", "imagePullSecrets")
_OF_CONTAINER = ("name", "image", "imagePullPolicy", "resources", "securityContext")


@dataclass(frozen=True)
class PlaceholderCreations(Sequence[Action]):
    """The batch that asks for the nodes of a better slice. Each pod is built only when it is asked for, like those of a
    gang. Part of a slice is of no use, so the first refusal ends the batch."""

    option: SliceOption
    workers: tuple[WorkerId, ...]

    def __len__(self) -> int:
        return len(self.workers)

    @overload
    def __getitem__(self, index: int) -> Action: ...

    @overload
    def __getitem__(self, index: slice) -> "PlaceholderCreations": ...

    def __getitem__(self, index: int | slice) -> "Action | PlaceholderCreations":
        if isinstance(index, slice):
            return replace(self, workers=self.workers[index])
        return Create(_placeholder(self.option, self.workers[index]), optional=True, for_better_slice=True)


def missing_placeholders(option: SliceOption, first: int, existing: Sequence[str]) -> PlaceholderCreations:
    """Returns the creations of the missing placeholders for the slices from `first` on; earlier slices already run.
    `existing`: the names of the placeholders that exist."""
    known, name = set(existing), option.job.name
    wanted = (worker for worker in naming.workers(option.layout, 0) if worker.slice >= first)
    missing = (worker for worker in wanted if naming.placeholder_name(name, option.number, worker) not in known)
    return PlaceholderCreations(option, tuple(missing))


def _placeholder(option: SliceOption, worker: WorkerId) -> Object:
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
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata(job, name, labels), "spec": spec}
