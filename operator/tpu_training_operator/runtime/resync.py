"""Which jobs to look at although nothing was heard of them."""

import logging
from collections.abc import Sequence
from datetime import datetime

from pydantic import ValidationError

from tpu_training_operator.api.status import State, Status
from tpu_training_operator.domain.lifecycle.completion import may_need_a_pass
from tpu_training_operator.kube.cluster import JOBS, Cluster, JobKey, Object
from tpu_training_operator.kube.errors import ApiError
from tpu_training_operator.runtime.metrics import Metrics

log = logging.getLogger(__name__)

_POLICY = ("ttlSecondsAfterFinished",)
_STATUS = ("state", "attempt", "completionTime")


async def jobs_to_look_at(
    cluster: Cluster, namespaces: Sequence[str], now: datetime, metrics: Metrics | None = None
) -> list[JobKey]:
    """Those that have not finished, and those whose time to live is over; in `namespaces`, or everywhere where that is
    empty. A namespace that cannot be listed keeps nothing from the others."""
    found: list[Object] = []
    complete = True
    for scope in namespaces or (None,):
        try:
            found += await cluster.list(JOBS, scope)
        except ApiError as error:
            complete = False
            where = "the cluster" if scope is None else f"namespace {scope}"
            log.warning("the jobs of %s could not be listed: %s", where, error)
    if complete and metrics:
        metrics.jobs_listed({_key(job): _state(job) for job in found})
    return [_key(job) for job in found if _may_need_a_pass(job, now)]


def slim_job(job: Object) -> Object:
    """The job with what is read here."""
    metadata, status = job["metadata"], job.get("status") or {}
    policy = (job.get("spec") or {}).get("runPolicy") or {}
    return {
        "metadata": {name: metadata[name] for name in ("namespace", "name")},
        "spec": {"runPolicy": {name: policy[name] for name in _POLICY if name in policy}},
        "status": {name: status[name] for name in _STATUS if name in status},
    }


def _key(job: Object) -> JobKey:
    return JobKey(job["metadata"]["namespace"], job["metadata"]["name"])


def _state(job: Object) -> State | None:
    try:
        return Status.read(job.get("status")).state
    except ValidationError:
        # Its own pass says what is wrong; the others' must not wait for it.
        return None


def _may_need_a_pass(job: Object, now: datetime) -> bool:
    try:
        return may_need_a_pass(job, now)
    except Exception as error:
        # One job that cannot be read must not keep the others from their passes; its own pass says what is wrong.
        log.warning("its status cannot be read: %s", error, extra={"job": str(_key(job))})
        return True
