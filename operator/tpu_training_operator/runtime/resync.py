"""Finds the jobs that the resync requeues without a hint."""

import logging
from collections.abc import Callable, Sequence
from datetime import datetime

from tpu_training_operator.api.conditions import ConditionType
from tpu_training_operator.api.constants import LABEL_QUEUE
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.domain.cluster_state.multikueue import is_managed_elsewhere
from tpu_training_operator.domain.cluster_state.observed import only
from tpu_training_operator.domain.plan.at_rest import may_need_a_pass
from tpu_training_operator.kube.cluster import JOBS, Cluster, JobKey, Object
from tpu_training_operator.kube.errors import ApiError
from tpu_training_operator.runtime.metrics import Metrics

log = logging.getLogger(__name__)

RESYNC_SECONDS = 300.0
"""The time between two resyncs. They only make up for lost hints, so this is a constant and not an option."""

_METADATA = ("namespace", "name", "generation", "deletionTimestamp")
_POLICY = ("ttlSecondsAfterFinished", "suspend")
_STATUS = ("state", "attempt", "completionTime", "observedGeneration")
# Conditions that show whether the job's Workload must still be finished, and whether a suspended job still waits.
_ALWAYS = (ConditionType.ADMITTED,)
_SUSPENDED = (*_ALWAYS, ConditionType.READY, ConditionType.RECONCILING)


async def jobs_to_reconcile(
    cluster: Cluster, namespaces: Sequence[str], clock: Callable[[], datetime], metrics: Metrics | None = None
) -> list[JobKey]:
    """Returns the jobs that may need a pass, and those whose time to live is over; without `namespaces`, in the whole
    cluster. A namespace that cannot be listed does not affect the others."""
    jobs: list[Object] = []
    complete = True
    for namespace in namespaces or (None,):
        try:
            jobs += await cluster.list(JOBS, namespace)
        except ApiError as error:
            complete = False
            where = "the cluster" if namespace is None else f"namespace {namespace}"
            log.warning("the jobs of %s could not be listed: %s", where, error)
    if complete and metrics:
        ours = (job for job in jobs if not is_managed_elsewhere(job))
        metrics.jobs_listed({_key(job): Status.read(job.get("status")).state for job in ours})
    now = clock()
    return [_key(job) for job in jobs if _may_need_a_pass(job, now)]


def slim_job(job: Object) -> Object:
    """Returns the job with only the fields that are read here."""
    metadata, spec, status = job["metadata"], job.get("spec") or {}, job.get("status") or {}
    policy, labels = spec.get("runPolicy") or {}, metadata.get("labels") or {}
    kinds = _SUSPENDED if status.get("state") == State.SUSPENDED else _ALWAYS
    conditions = [condition for condition in status.get("conditions") or () if condition.get("type") in kinds]
    slim: Object = {
        "metadata": only(metadata, _METADATA) | {"labels": only(labels, (LABEL_QUEUE,))},
        "spec": {"runPolicy": only(policy, _POLICY)} | only(spec, ("managedBy",)),
        "status": only(status, _STATUS),
    }
    if conditions:
        slim["status"]["conditions"] = conditions
    return slim


def _key(job: Object) -> JobKey:
    return JobKey(job["metadata"]["namespace"], job["metadata"]["name"])


def _may_need_a_pass(job: Object, now: datetime) -> bool:
    try:
        return may_need_a_pass(job, now)
    except Exception as error:
        log.warning("the job's status cannot be read: %s", error, extra={"job": str(_key(job))})
        return True
