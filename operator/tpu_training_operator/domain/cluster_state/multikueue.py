"""Reads from a job's own body whether MultiKueue has to do with it.

In the cluster of the user, spec.managedBy says that another controller runs the job. In the cluster that runs it, Kueue
has made a copy of the job, and its Workload. A user may name a Workload in the same way.
"""

from collections.abc import Mapping
from typing import Any

from tpu_training_operator.api import constants
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.validation import InvalidJob, Problem

Object = Mapping[str, Any]


def manager_of(job: Object) -> str:
    """Returns who runs the job instead of this operator; empty if this operator does."""
    spec = job.get("spec")
    chosen = spec.get("managedBy") if isinstance(spec, Mapping) else None
    return "" if chosen in (None, "", constants.MANAGED_BY_US) else str(chosen)


def is_managed_elsewhere(job: Object) -> bool:
    """Tells whether another controller writes the job's status. For MultiKueue's jobs this operator does."""
    return manager_of(job) not in ("", constants.MULTIKUEUE)


def is_copy(job: Object) -> bool:
    """Tells whether Kueue has made the job in this cluster for one in another cluster, and will delete it."""
    return constants.LABEL_MULTIKUEUE_ORIGIN in (job["metadata"].get("labels") or {})


def prebuilt_workload(job: Object) -> str:
    """Returns the name of the Workload that Kueue has made for a copy, or that a user has named; empty for any other
    job."""
    metadata = job["metadata"]
    places = (metadata.get("annotations") or {}, metadata.get("labels") or {})
    return next((str(place[key]) for place in places if place.get(key := constants.PREBUILT_WORKLOAD)), "")


def check_one_slice(raw: Object, job: TPUTrainingJob) -> None:
    """Raises InvalidJob for a job under one Workload that asks for several slices. `raw`: the job as the API server has
    it."""
    if not (manager_of(raw) or prebuilt_workload(raw)):
        return
    fields = (("spec.placement", job.spec.placement), ("spec.ladder", job.spec.ladder))
    message = (
        "MultiKueue sends a job to another cluster under one Workload, and a Workload is for one slice; leave this"
        " out, or create the job in that cluster without spec.managedBy"
    )
    if several := [Problem(field, message) for field, value in fields if value is not None]:
        raise InvalidJob(several)
