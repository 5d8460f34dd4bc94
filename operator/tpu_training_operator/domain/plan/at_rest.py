"""Which jobs need no pass, and how long a finished job stays."""

from datetime import datetime, timedelta

from tpu_training_operator.api.conditions import ConditionType
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.domain.cluster_state.multikueue import is_copy
from tpu_training_operator.domain.cluster_state.observed import Object, parse_time
from tpu_training_operator.domain.cluster_state.workload import is_in_queue, owes_an_end

# A century. A much longer time could not be added to a date.
_LONGEST_TTL_SECONDS = 100 * 365 * 24 * 3600


def may_need_a_pass(job: Object, now: datetime) -> bool:
    """Returns whether the resync should enqueue the job. A finished job has already asked for the pass that deletes it;
    once that pass is overdue, the request may be lost."""
    status = Status.read(job.get("status"))
    if status.completion_time is None or owes_an_end(job):
        return not is_at_rest(job)
    ttl = time_to_live(job)
    return ttl is not None and parse_time(status.completion_time) + ttl <= now


def is_at_rest(job: Object) -> bool:
    """Returns whether the job is suspended and its status is complete for the present spec. Then only a change of the
    job, or a pod that should not exist, gives a pass something to do. A job in a queue is never at rest: it may still
    have to give back its quota."""
    metadata, spec, status = job["metadata"], job.get("spec") or {}, job.get("status") or {}
    if status.get("state") != State.SUSPENDED or (spec.get("runPolicy") or {}).get("suspend") is not True:
        return False
    if is_in_queue(job) or "deletionTimestamp" in metadata:
        return False
    is_true = {
        condition.get("type") for condition in status.get("conditions") or () if condition.get("status") == "True"
    }
    is_settled = ConditionType.READY in is_true and ConditionType.RECONCILING not in is_true
    return is_settled and status.get("observedGeneration") == metadata.get("generation")


def time_to_live(job: Object) -> timedelta | None:
    """Returns how long a finished job stays; None without a limit. The limit is read from the raw spec, because this
    operator may not accept the spec of a finished job. A copy that MultiKueue made has none: Kueue deletes it once the
    other cluster knows how the job ended, and would create and run it again if it were gone earlier."""
    if is_copy(job):
        return None
    policy = job.get("spec", {}).get("runPolicy") or {}
    seconds = policy.get("ttlSecondsAfterFinished")
    return timedelta(seconds=max(0, min(seconds, _LONGEST_TTL_SECONDS))) if isinstance(seconds, int) else None
