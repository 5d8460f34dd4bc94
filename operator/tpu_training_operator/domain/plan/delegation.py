"""A job that another controller runs: `spec.managedBy`.

With MultiKueue, Kueue runs the job in another cluster. The job here has a Workload and no workers. When Kueue has
reserved quota here and found a cluster that admits the job, it creates a copy there, without managedBy. The operator
there does the work, and Kueue copies that job's status over the status here. So the status has one writer at a time:

- This operator while no copy exists. It says why the job waits.
- Kueue while the Workload here is admitted. This operator keeps the Workload here up to date with the copy's status.

When the Workload here holds no quota or is not active, Kueue deletes the copy (pkg/controller/admissionchecks of Kueue
0.19: multikueue/workload.go and externalframeworks/adapter.go).
"""

from datetime import timedelta

from tpu_training_operator.api import constants
from tpu_training_operator.api.conditions import ConditionType, EventReason, Reason, find, is_true
from tpu_training_operator.api.constants import MAX_HOSTS
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.api.validation import InvalidJob
from tpu_training_operator.domain.cluster_state.multikueue import manager_of
from tpu_training_operator.domain.cluster_state.observed import format_time, parse_time
from tpu_training_operator.domain.cluster_state.workload import Queue, Workload
from tpu_training_operator.domain.objects.actions import Event, UpdateWorkload, WriteWorkloadStatus
from tpu_training_operator.domain.objects.workload import is_for_other_workers
from tpu_training_operator.domain.plan.common.conditions import JobState, ReadyState
from tpu_training_operator.domain.plan.invalid import plan_invalid
from tpu_training_operator.domain.plan.parse_cache import read_job
from tpu_training_operator.domain.plan.plan import LOOK_AGAIN, Batch, Batches, Plan
from tpu_training_operator.domain.plan.queue.queueing import (
    ask_for,
    deactivate,
    delete_workloads,
    describe_wait,
    pass_on_labels,
    release_quota,
)
from tpu_training_operator.domain.plan.startable import check_options
from tpu_training_operator.domain.plan.stopping.departure import delete_when_due, stop_remaining_pods

# A lost cluster never says that its workers have stopped.
_LONGEST_STOP = timedelta(minutes=10)
_SHOWN_HERE = (ConditionType.READY, ConditionType.RECONCILING, ConditionType.STALLED, ConditionType.SUSPENDED)


def plan_delegated(look: JobState, max_hosts: int = MAX_HOSTS) -> Plan | None:
    """Plans for a job that this operator does not run, and which has no worker here; None if it does run it."""
    queue, status, manager = look.observed.queue, look.status, manager_of(look.observed.job)
    if not manager:
        return None
    if manager != constants.MULTIKUEUE or "deletionTimestamp" in look.observed.job["metadata"]:
        return Plan()
    if status.completion_time is not None:
        # Kueue itself marks the Workload as finished.
        return delete_when_due(look) or stop_remaining_pods(look)
    if queue is None:
        return _wait_without_queue(look)
    workload = queue.workload
    try:
        batches = _create(look, queue, max_hosts) if workload is None else _next_step(look, queue, workload)
    except InvalidJob as error:
        return plan_invalid(replace(look, status=Status()), error)
    if workload is not None and (workload.is_true("Admitted") or (workload.is_evicted and workload.holds_quota)):
        # Kueue may write the job's status.
        return Plan(batches, again=LOOK_AGAIN)
    # Kueue copies the whole status. What an earlier copy has left here no longer describes this job.
    kept = [condition for condition in status.conditions if condition.type in _SHOWN_HERE]
    own_status = replace(Status(), conditions=kept)
    ready = _describe(look, queue)
    is_new = find(own_status.conditions, ConditionType.READY) is None
    events = (Event(EventReason.QUEUED, ready.message),) if is_new and ready.state is State.QUEUED else ()
    suspends = _is_to_be_suspended(look)
    if suspends or is_true(own_status.conditions, ConditionType.SUSPENDED):
        reason = Reason.SUSPENDED if suspends else Reason.RESUMED
        own_status = look.with_condition(own_status, ConditionType.SUSPENDED, suspends, reason, ready.message)
    return Plan(batches, look.present(own_status, ready), events, again=LOOK_AGAIN)


def _wait_without_queue(look: JobState) -> Plan:
    """Blocks a job that names no queue, so that Kueue does not know it. The status of an earlier copy stays as it
    is."""
    if look.attempt:
        return Plan()
    message = (
        "spec.managedBy gives the job to MultiKueue, which takes it from a queue: name a LocalQueue of this cluster in"
        f" the job's label {constants.LABEL_QUEUE}"
    )
    ready = ReadyState(State.BLOCKED, Reason.QUEUE_UNUSABLE, message)
    is_new = find(look.status.conditions, ConditionType.READY) is None
    events = (Event(EventReason.BLOCKED, message, warning=True),) if is_new else ()
    return Plan(status=look.present(look.status, ready), events=events)


def _is_to_be_suspended(look: JobState) -> bool:
    policy = look.observed.job["spec"].get("runPolicy")
    return isinstance(policy, dict) and policy.get("suspend") is True


def _create(look: JobState, queue: Queue, max_hosts: int) -> Batches:
    """Checks the job and creates its Workload. From then on the operator of the other cluster checks it. Raises
    InvalidJob."""
    job = look.observed.job
    options, lower_rungs = read_job(job)
    check_options((*options, *lower_rungs), job, max_hosts)
    if queue.problem or _is_to_be_suspended(look):
        return ()
    return (Batch((ask_for(options[0], queue),)),)


def _next_step(look: JobState, queue: Queue, workload: Workload) -> Batches:
    """Returns the next change of the Workload. Raises InvalidJob."""
    suspends = _is_to_be_suspended(look)
    if workload.is_going or workload.is_finished:
        return ()
    if suspends and workload.is_active:
        return (deactivate(workload),)
    if workload.is_evicted and workload.holds_quota:
        has_stopped = not workload.is_active or _copy_has_stopped(look, workload)
        return (release_quota(workload, look.now),) if has_stopped else ()
    if not suspends and not workload.is_active and is_true(look.status.conditions, ConditionType.SUSPENDED):
        if is_for_other_workers(dict(workload.raw), ask_for(read_job(look.observed.job)[0][0], queue).body):
            return delete_workloads([workload])
        return (Batch((UpdateWorkload(workload.with_active(True)),)),)
    if workload.is_admitted:
        is_running = is_true(look.status.conditions, ConditionType.GANG_READY)
        report = workload.with_pods_ready(is_running, format_time(look.now))
        return () if report is None else (Batch((WriteWorkloadStatus(report),)),)
    return pass_on_labels(queue)


def _copy_has_stopped(look: JobState, workload: Workload) -> bool:
    """Returns whether the copy says that no worker runs, or has had enough time to stop them."""
    ready = find(look.status.conditions, ConditionType.READY)
    if not look.attempt or (look.is_held and (ready is None or ready.reason != Reason.EVICTED)):
        return True
    since = workload.condition("Evicted").get("lastTransitionTime")
    return since is None or look.now >= parse_time(str(since)) + _LONGEST_STOP


def _describe(look: JobState, queue: Queue) -> ReadyState:
    if _is_to_be_suspended(look):
        message = "suspended by spec.runPolicy.suspend; no other cluster runs the job"
        return ReadyState(State.SUSPENDED, Reason.SUSPENDED, message)
    ready = describe_wait(queue, 0)
    return replace(ready, message=f"{ready.message} (for another cluster: MultiKueue runs the job)")
