"""A job that ends: one that has finished, and one that is being deleted, itself or its namespace.

Kubernetes deletes everything that the job owns, by owner references, but only once the job itself is gone. A finalizer
may keep the job for a long time, and in a namespace that is being deleted jobs go after their pods. So the workers are
stopped here: no failure is charged, and no attempt begins. Only with `kubectl delete --cascade=orphan` do they stay.
"""

from datetime import timedelta

from tpu_training_operator.api import constants
from tpu_training_operator.api.conditions import ConditionType, EventReason, Reason, is_true
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.status import Activity, State
from tpu_training_operator.domain.cluster_state.observed import parse_time
from tpu_training_operator.domain.objects.actions import AT_ONCE, Delete, Event
from tpu_training_operator.domain.plan.at_rest import time_to_live
from tpu_training_operator.domain.plan.common.conditions import JobState, ReadyState
from tpu_training_operator.domain.plan.common.pod_cleanup import delete_by_force, delete_pods, next_force
from tpu_training_operator.domain.plan.plan import Batch, Freshness, Plan
from tpu_training_operator.domain.plan.queue.queueing import give_up_quota

_ORPHANS = "orphan"


def leave(look: JobState) -> Plan:
    """Stops the workers, then gives the quota back."""
    observed, status, now = look.observed, look.status, look.now
    needs = Freshness.FRESH_ALL if look.has_finished else Freshness.CACHED
    finalizers = [str(name) for name in observed.job["metadata"].get("finalizers") or ()]
    if _ORPHANS in finalizers:
        return Plan(delete_by_force(observed.every_pod, now, needs), again=next_force(observed.every_pod, now))
    running = [pod for pod in observed.every_pod if not pod.has_ended]
    batches = (*delete_pods(running, now, needs), *give_up_quota(observed))
    again = next_force(running, now)
    if status.completion_time is not None:
        return Plan(batches, again=again)
    message = "the job is being deleted, and its workers are stopped"
    if observed.is_namespace_going:
        message = "the namespace is being deleted, and the workers of the job are stopped"
    elif finalizers:
        message += f"; the object stays until {', '.join(finalizers)} is removed from metadata.finalizers"
    ready = ReadyState(State.SUSPENDED, Reason.BEING_DELETED, message, is_stopping=True)
    events = () if status.state is State.SUSPENDED else (Event(EventReason.SUSPENDED, message),)
    if is_true(status.conditions, ConditionType.GANG_READY):
        status = look.with_condition(status, ConditionType.GANG_READY, False, ready.reason, message)
        goodput = status.goodput and look.charge(status.goodput, now, Activity.SUSPENDED)
        status = replace(status, goodput=goodput)
    return Plan(batches, look.present(status, ready), events, again)


def delete_when_due(look: JobState) -> Plan | None:
    left, metadata = _time_left(look), look.observed.job["metadata"]
    if left is None or left > AT_ONCE:
        return None
    name, uid = metadata["name"], metadata["uid"]
    deletion = Batch((Delete(constants.KIND, name, uid, api_version=constants.API_VERSION),), Freshness.FRESH_ALL)
    # The status stays as it is, because a job that is gone takes no write.
    return Plan(batches=(deletion,), status=look.status)


def stop_remaining_pods(look: JobState) -> Plan:
    running = [pod for pod in look.observed.every_pod if not pod.has_ended]
    batches = delete_pods(running, look.now, Freshness.FRESH_ALL)
    return Plan(batches).due_within(_time_left(look), next_force(running, look.now))


def _time_left(look: JobState) -> timedelta | None:
    """Returns how long the finished job stays; None if nothing limits that."""
    ttl, end = time_to_live(look.observed.job), look.status.completion_time
    return None if ttl is None or end is None else parse_time(end) + ttl - look.now
