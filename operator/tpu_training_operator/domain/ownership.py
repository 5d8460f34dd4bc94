"""Whose an object is, and which worker a pod is. Used by the planner, the reconciler and the progress service.

Labels and owner references are what somebody wrote: whoever may create pods in the namespace can copy both, and labels
change. A name is taken once and stays, so a pod is the worker whose name it has, which the operator gave it.
"""

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

from tpu_training_operator.api import constants
from tpu_training_operator.domain.naming import WorkerId

Object = Mapping[str, Any]


class Claim(Enum):
    """Whose the object is that has a name which the job needs."""

    OURS = auto()
    GOING = auto()
    """It is being deleted, or belongs to a deleted job of the same name and will be."""
    FOREIGN = auto()


def claim(existing: Object, job: Object) -> Claim:
    if "deletionTimestamp" in existing["metadata"]:
        return Claim.GOING
    if is_ours(existing, job):
        return Claim.OURS
    owner = controller(existing)
    is_namesakes = _is_job(owner) and owner.get("name") == job["metadata"]["name"]
    return Claim.GOING if is_namesakes else Claim.FOREIGN


def is_ours(raw: Object, job: Object) -> bool:
    """Whether the job controls the object."""
    owner = controller(raw)
    return _is_job(owner) and owner.get("uid") == job["metadata"]["uid"]


def controller(raw: Object) -> Object:
    """The owner reference of the object's controller; empty where it has none."""
    references: Sequence[Object] = raw["metadata"].get("ownerReferences") or ()
    return next((reference for reference in references if reference.get("controller")), {})


def worker_of(pod: Object, job: str) -> WorkerId | None:
    """The worker of the job of this name that the pod is; None where it has no such worker's name."""
    name = pod["metadata"]["name"]
    worker = WorkerId.of_pod(name)
    return worker if worker is not None and name == worker.pod_name(job) else None


def _is_job(owner: Object) -> bool:
    """Of any version of the API: a worker keeps the one that it was created with."""
    group = str(owner.get("apiVersion", "")).partition("/")[0]
    return (group, owner.get("kind")) == (constants.GROUP, constants.KIND)
