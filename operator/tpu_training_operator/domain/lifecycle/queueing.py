"""A job in a queue: when it may have workers, and what Kueue is told about them.

The condition Admitted of the job decides, not that of its Workload, as the attempt in the status does (ADR 2):

- Admitted becomes True in the write that begins an attempt. Workers are created by later passes.
- Admitted becomes False before any worker is stopped: without it, a worker that stops would be taken for a failure.
- The quota is given back when no worker is active, and never by a pass that has not read that afresh.

So a crash between any two of these effects loses nothing, and the chips of a job are counted as long as it uses them.
Restarts keep the Workload and its quota.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from tpu_training_operator.api import constants
from tpu_training_operator.api.conditions import ConditionType, EventReason, Reason, find, is_true, without_condition
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.status import Activity, State, Status
from tpu_training_operator.api.validation import InvalidJob, Problem
from tpu_training_operator.domain.actions import (
    AT_ONCE,
    Action,
    Create,
    DeleteJob,
    Event,
    Plan,
    UpdateWorkload,
    WriteWorkloadStatus,
)
from tpu_training_operator.domain.lifecycle.blocked import Obstacle
from tpu_training_operator.domain.lifecycle.conditions import Kind, ReadyState, Snapshot
from tpu_training_operator.domain.lifecycle.context import Context
from tpu_training_operator.domain.lifecycle.goodput import charge
from tpu_training_operator.domain.lifecycle.pod_cleanup import deletions, look_again
from tpu_training_operator.domain.naming import WorkerId
from tpu_training_operator.domain.objects.worker_pod import worker_pod
from tpu_training_operator.domain.objects.workload import conflicts, workload
from tpu_training_operator.domain.observed import Object, WorkerPod, format_time
from tpu_training_operator.domain.words import count
from tpu_training_operator.domain.workload import Placement, Queue, placement_of, queue_of

# A watch tells what Kueue does, sooner than this. These looks make up for one that is broken or not allowed.
_LOOK_AGAIN = timedelta(seconds=15)
_LOOK_AT_RUNNING = timedelta(seconds=30)

Stages = tuple[Sequence[Action], ...]


def check_queue(raw: Object, job: TPUTrainingJob) -> None:
    """Raises InvalidJob for what only a queue can give, and for what keeps a queue from working."""
    trainer, provisioning = job.spec.trainer, job.spec.slice.provisioning
    if queue_of(raw):
        both = sorted({constants.LABEL_QUEUE, constants.LABEL_POD_GROUP} & (trainer.pod_labels or {}).keys())
        if both:
            message = (
                f"leave {' and '.join(both)} out: the job itself is in queue {queue_of(raw)}, and with these labels"
                " Kueue would count each worker again"
            )
            raise InvalidJob([Problem("spec.trainer.podLabels", message)])
    elif (
        provisioning
        and provisioning.queued
        and constants.ANNOTATION_PROVISIONING not in (trainer.pod_annotations or {})
    ):
        message = (
            f"queued provisioning needs a queue: name a LocalQueue in the job's label {constants.LABEL_QUEUE}, and its"
            " admission check makes the ProvisioningRequest (docs/kueue.md); or name a ProvisioningRequest of your own"
            f" in spec.trainer.podAnnotations, as {constants.ANNOTATION_PROVISIONING}"
        )
        raise InvalidJob([Problem("spec.slice.provisioning.queued", message)])


# Whether there may be workers.


def gate(ctx: Context) -> Plan | None:
    """The plan for a job that may not have workers now; None if it may."""
    queue = ctx.queue
    if queue is None:
        return None
    is_admitted = queue.workload is not None and queue.workload.is_admitted
    if ctx.attempt and not ctx.is_suspended and not ctx.is_held:
        if is_admitted:
            return None if is_true(ctx.status.conditions, ConditionType.ADMITTED) else _adopt(ctx, queue)
        # What cannot be read is no reason to stop a training.
        return _evict(ctx, queue) if queue.version else None
    if is_admitted and not queue.problem:
        return None
    return _return_to_queue(ctx, queue) if ctx.is_suspended else _wait(ctx, queue)


def admitted(ctx: Context, status: Status) -> Status:
    """The status that begins an attempt of an admitted job. A job that has left its queue loses the condition."""
    if ctx.queue is None:
        return replace(status, conditions=without_condition(status.conditions, ConditionType.ADMITTED))
    return ctx.with_condition(status, ConditionType.ADMITTED, True, Reason.ADMITTED, _admission(ctx.queue))


def _admission(queue: Queue) -> str:
    found = queue.workload
    if found is None:
        return ""
    flavors = f" with {', '.join(found.flavors)}" if found.flavors else ""
    return f"admitted by ClusterQueue {found.cluster_queue}{flavors}"


def _adopt(ctx: Context, queue: Queue) -> Plan:
    """A gang that runs with quota, whose status was lost, or whose job was given its queue by hand."""
    message = _admission(queue)
    status = ctx.with_condition(ctx.status, ConditionType.ADMITTED, True, Reason.ADMITTED, message)
    return Plan(status=status, again=AT_ONCE)


def _evict(ctx: Context, queue: Queue) -> Plan:
    """Kueue wants the chips back, or never gave them. No failure class is charged."""
    why = queue.workload.waits_for() if queue.workload else "its Workload is gone"
    message = f"queue {_name(queue)}: {why}; the workers save and stop"
    ready = ReadyState(State.QUEUED, Kind.IN_PROGRESS, Reason.EVICTED, message)
    status = replace(ctx.status, goodput=charge(ctx.goodput_at_end(ctx.now), ctx.now, Activity.QUEUE))
    for kind in (ConditionType.ADMITTED, ConditionType.GANG_READY):
        status = ctx.with_condition(status, kind, False, ready.reason, message)
    event = Event(EventReason.EVICTED, message, warning=True)
    return Plan(status=ctx.present(status, ready), events=(event,), again=AT_ONCE)


def _return_to_queue(ctx: Context, queue: Queue) -> Plan:
    """After a suspension."""
    stages: Stages = ()
    if queue.workload is not None and not queue.workload.is_active:
        stages = ((UpdateWorkload(queue.workload.with_active(True)),),)
    goodput = charge(ctx.goodput_of_stopped() or ctx.settled_goodput(), ctx.now, Activity.QUEUE)
    message = f"queue {_name(queue)}: resumed, waiting for admission"
    ready = ReadyState(State.QUEUED, Kind.IN_PROGRESS, Reason.QUEUED, message)
    status = replace(ctx.status, goodput=goodput)
    status = ctx.with_condition(status, ConditionType.SUSPENDED, False, Reason.RESUMED, message)
    status = ctx.with_condition(status, ConditionType.ADMITTED, False, ready.reason, message)
    events = (Event(EventReason.RESUMED, message),)
    return Plan(stages=stages, status=ctx.present(status, ready), events=events, again=AT_ONCE)


def _wait(ctx: Context, queue: Queue) -> Plan:
    """Stops what still runs, then asks for admission."""
    workers = ctx.all_workers
    active = [pod for pod in workers if not pod.has_ended]
    step = None if active or queue.problem else _step(ctx, queue)
    stages = (*deletions(workers, ctx.now), *(((step,),) if step else ()))
    ready = _shown(queue, len(active))
    status = replace(ctx.status, resolved=ctx.resolution.resolved)
    if ctx.attempt and not active:
        status = replace(status, goodput=ctx.goodput_of_stopped())
    status = ctx.with_condition(status, ConditionType.ADMITTED, False, ready.reason, ready.message)
    is_new = find(ctx.status.conditions, ConditionType.ADMITTED) is None
    events = (Event(EventReason.QUEUED, ready.message),) if is_new else ()
    wanted = Plan(stages=stages, status=ctx.present(status, ready), events=events, again=_LOOK_AGAIN)
    return wanted.due_within(look_again(workers, ctx.now))


def _step(ctx: Context, queue: Queue) -> Action | None:
    """What the job's controller does next, now that no worker is active."""
    found = queue.workload
    if found is None:
        worker = worker_pod(ctx.job, ctx.resolution, WorkerId(1, 0, 0))
        return Create(workload(ctx.job, ctx.resolution, queue, worker))
    if found.is_going or found.is_finished:
        return None
    if found.is_evicted and found.holds_quota:
        return WriteWorkloadStatus(found.without_quota(format_time(ctx.now)), frees_quota=True)
    if queue.name and queue.name != found.queue and not found.holds_quota:
        return UpdateWorkload(found.with_queue(queue.name))
    return None


def _shown(queue: Queue, active: int) -> ReadyState:
    found, name = queue.workload, _name(queue)
    if queue.problem:
        return ReadyState(State.BLOCKED, Kind.STUCK, Reason.QUEUE_UNUSABLE, queue.problem)
    if found is None:
        why = f"waiting for {count(active, 'worker')} to stop" if active else "waiting for Kueue to consider the job"
        return ReadyState(State.QUEUED, Kind.IN_PROGRESS, Reason.QUEUED, f"queue {name}: {why}")
    if active:
        why = f"{found.waits_for()}; waiting for {count(active, 'worker')} to stop"
        return ReadyState(State.QUEUED, Kind.IN_PROGRESS, Reason.EVICTED, f"queue {name}: {why}")
    if found.is_finished:
        message = f"Workload {found.name} says that it has finished, and the job has not; delete the Workload"
        return ReadyState(State.BLOCKED, Kind.STUCK, Reason.DEACTIVATED, message)
    if not found.is_active:
        message = (
            f"queue {name}: {found.waits_for()}; Workload {found.name} is not active: suspend and resume the job, or"
            " set the Workload's spec.active to true"
        )
        return ReadyState(State.BLOCKED, Kind.STUCK, Reason.DEACTIVATED, message)
    return ReadyState(State.QUEUED, Kind.IN_PROGRESS, Reason.QUEUED, f"queue {name}: {found.waits_for()}")


def _name(queue: Queue) -> str:
    return queue.name or (queue.workload.queue if queue.workload else "")


def suspended(ctx: Context, status: Status, message: str) -> Status:
    """The status that begins a suspension: what has no workers is not admitted."""
    if find(status.conditions, ConditionType.ADMITTED) is None:
        return status
    return ctx.with_condition(status, ConditionType.ADMITTED, False, Reason.SUSPENDED, message)


def while_suspended(ctx: Context, workers: Sequence[WorkerPod]) -> Stages:
    """Takes the job out of the queue: a Workload that stays active would be admitted, and hold quota for nothing."""
    found = ctx.queue.workload if ctx.queue else None
    if found is None or found.is_going or found.is_finished:
        return ()
    if found.is_active:
        return ((UpdateWorkload(found.with_active(False)),),)
    if found.is_evicted and found.holds_quota and all(pod.has_ended for pod in workers):
        return ((WriteWorkloadStatus(found.without_quota(format_time(ctx.now)), frees_quota=True),),)
    return ()


def look_at_suspended(ctx: Context) -> timedelta | None:
    """When to look at a suspended job, if nothing is heard of its Workload; None once that holds no quota."""
    found = ctx.queue.workload if ctx.queue else None
    is_over = found is None or found.is_finished or (not found.is_active and not found.holds_quota)
    return None if is_over else _LOOK_AGAIN


def look_at_queue(ctx: Context) -> timedelta | None:
    """When to look at a job that runs, if nothing is heard of its Workload."""
    return None if ctx.queue is None else _LOOK_AT_RUNNING


# Where the workers go.


def placement(ctx: Context) -> Placement | Obstacle | None:
    """What Kueue adds to the workers' pods; None for a job without a queue. An Obstacle if it does not go together with
    what the job asks for: nothing is overwritten."""
    queue = ctx.queue
    if queue is None:
        return None
    if queue.problem:
        return Obstacle(Reason.QUEUE_UNUSABLE, queue.problem)
    wanted = placement_of(queue)
    if found := conflicts(worker_pod(ctx.job, ctx.resolution, WorkerId(1, 0, 0)), wanted):
        message = f"the workers cannot be placed as Kueue has decided: {'; '.join(found)}"
        return Obstacle(Reason.PLACEMENT_CONFLICT, message)
    return wanted


# What Kueue is told.


def with_pods_ready(decided: Plan, ctx: Context) -> Plan:
    """The plan; with whether the workers run, if Kueue does not know. It evicts a job that never says so."""
    found = ctx.queue.workload if ctx.queue else None
    if found is None or not found.is_admitted or ctx.is_held or ctx.is_suspended or not ctx.attempt:
        return decided
    if decided.status is not None and _changes_course(ctx.status, decided.status):
        # Such a status is written by a pass that does nothing else.
        return decided
    told = found.with_pods_ready(ctx.is_running, format_time(ctx.now))
    # First, because a refusal ends the pass, and Kueue must hear of a gang that cannot start.
    return decided if told is None else replace(decided, stages=((WriteWorkloadStatus(told),), *decided.stages))


def _changes_course(before: Status, after: Status) -> bool:
    held = [is_true(status.conditions, ConditionType.ADMITTED) for status in (before, after)]
    return before.attempt != after.attempt or after.completion_time is not None or held[0] != held[1]


def with_end_told(decided: Plan, observed_by: Snapshot) -> Plan:
    """The plan for a job that has finished; with the end of its Workload, once no worker is active. That gives the
    quota back, so it comes after the workers' end and not with the job's."""
    observed, status = observed_by.observed, observed_by.status
    queue = observed.queue
    if queue is None or not queue.version:
        return decided
    if any(not pod.has_ended for pod in observed.pods):
        return decided.due_within(_LOOK_AGAIN)
    if any(isinstance(action, DeleteJob) for stage in decided.stages for action in stage):
        return decided
    stages: Stages = decided.stages
    found = queue.workload
    if found is not None and not found.is_finished and not found.is_going:
        has_succeeded = is_true(status.conditions, ConditionType.SUCCEEDED)
        ready = find(status.conditions, ConditionType.READY)
        body = found.finished(has_succeeded, ready.message if ready else "", format_time(observed_by.now))
        stages = (*stages, (WriteWorkloadStatus(body, frees_quota=True),))
    left = observed_by.with_condition(
        status, ConditionType.ADMITTED, False, Reason.QUEUE_LEFT, "the job has finished and uses no quota"
    )
    return replace(decided, stages=stages, status=left)
