"""Finds the job that an object belongs to, and the worker that a pod is.

Anyone who may create pods in the namespace can copy labels and owner references, and labels change. A name is unique
and permanent, so a pod is the worker whose name it has.
"""

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

from tpu_training_operator.api import constants
from tpu_training_operator.domain.job.naming import WorkerId

Object = Mapping[str, Any]


class Claim(Enum):
    """Who owns an object whose name the job needs."""

    OURS = auto()
    GOING = auto()
    """The object is being deleted, or its owner is a deleted job of the same name."""
    FOREIGN = auto()


def claim(existing: Object, job: Object) -> Claim:
    if "deletionTimestamp" in existing["metadata"]:
        return Claim.GOING
    if is_ours(existing, job):
        return Claim.OURS
    return Claim.GOING if job_of(existing) == job["metadata"]["name"] else Claim.FOREIGN


def is_ours(raw: Object, job: Object) -> bool:
    """Tells whether the job controls the object."""
    return job_of(raw) is not None and controller(raw).get("uid") == job["metadata"]["uid"]


def job_of(raw: Object) -> str | None:
    """Returns the name of the job that controls the object; None if no job does. Any version of the API counts: a
    worker keeps the version it was created with."""
    owner = controller(raw)
    group = str(owner.get("apiVersion", "")).partition("/")[0]
    is_job = (group, owner.get("kind")) == (constants.GROUP, constants.KIND)
    return str(owner.get("name", "")) if is_job else None


def controller(raw: Object) -> Object:
    """Returns the owner reference to the object's controller; empty if it has none."""
    references: Sequence[Object] = raw["metadata"].get("ownerReferences") or ()
    return next((reference for reference in references if reference.get("controller")), {})


def worker_of(pod: Object, job: str) -> WorkerId | None:
    """Returns which worker of the named job the pod is; None if its name is not that of a worker."""
    name = pod["metadata"]["name"]
    worker = WorkerId.of_pod(name)
    return worker if worker is not None and name == worker.pod_name(job) else None
