"""Which jobs the resync requeues although nothing was heard of them."""

import logging
from collections.abc import Callable, Sequence
from datetime import datetime

from tpu_training_operator.api.conditions import ConditionType
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.domain.lifecycle.completion import may_need_a_pass
from tpu_training_operator.kube.cluster import JOBS, Cluster, JobKey, Object
from tpu_training_operator.kube.errors import ApiError
from tpu_training_operator.runtime.metrics import Metrics

log = logging.getLogger(__name__)

RESYNC_SECONDS = 300.0
"""Between two resyncs. They only make up for lost events, so this is a constant and not an option."""

_POLICY = ("ttlSecondsAfterFinished",)
_STATUS = ("state", "attempt", "completionTime")


async def jobs_to_reconcile(
    cluster: Cluster, namespaces: Sequence[str], clock: Callable[[], datetime], metrics: Metrics | None = None
) -> list[JobKey]:
    """The jobs that have not finished, and those whose TTL has expired; without `namespaces`, in the whole cluster. A
    namespace that cannot be listed does not affect the others."""
    found: list[Object] = []
    complete = True
    for namespace in namespaces or (None,):
        try:
            found += await cluster.list(JOBS, namespace)
        except ApiError as error:
            complete = False
            where = "the cluster" if namespace is None else f"namespace {namespace}"
            log.warning("the jobs of %s could not be listed: %s", where, error)
    if complete and metrics:
        metrics.jobs_listed({_key(job): _state(job) for job in found})
    now = clock()
    return [_key(job) for job in found if _may_need_a_pass(job, now)]


def slim_job(job: Object) -> Object:
    """The fields of the job that are read here."""
    metadata, status = job["metadata"], job.get("status") or {}
    policy = (job.get("spec") or {}).get("runPolicy") or {}
    return {
        "metadata": {name: metadata[name] for name in ("namespace", "name")},
        "spec": {"runPolicy": {name: policy[name] for name in _POLICY if name in policy}},
        "status": {name: status[name] for name in _STATUS if name in status} | _queued(status),
    }


def _queued(status: Object) -> Object:
    """The condition that says whether the job still owes its Workload an end."""
    found = [each for each in status.get("conditions") or () if each.get("type") == ConditionType.ADMITTED]
    return {"conditions": found} if found else {}


def _key(job: Object) -> JobKey:
    return JobKey(job["metadata"]["namespace"], job["metadata"]["name"])


def _state(job: Object) -> State | None:
    return Status.read(job.get("status")).state


def _may_need_a_pass(job: Object, now: datetime) -> bool:
    try:
        return may_need_a_pass(job, now)
    except Exception as error:
        log.warning("its status cannot be read: %s", error, extra={"job": str(_key(job))})
        return True
