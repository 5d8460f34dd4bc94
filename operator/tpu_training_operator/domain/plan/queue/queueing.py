"""A job in a queue: when it may have workers, and the reports to Kueue about them.

Like the attempt in the status (ADR 2), the job's own condition Admitted decides, not that of its Workload:

- Admitted becomes True in the write that begins an attempt. Later passes create the workers.
- Admitted becomes False before any worker is stopped. Otherwise a worker that stops would look like a failure.
- The quota is given back once no worker is active, and only by a pass that has read this afresh.

So a crash between any two of these effects loses nothing, and the chips of a job count as long as it uses them.
Restarts keep the Workload and its quota.

A second Workload proves the capacity of a better slice. While the gang trains on an alternative, it asks for one, and
costs nothing as long as it waits. Once Kueue admits it, the gang moves. The quota of the slice that it leaves goes back
when its last worker there has stopped. So the quota always covers the workers, and counts for both slices only from the
admission until then. The second Workload has the queue and the priority of the first, even if the job's labels have
changed: else Kueue might evict the gang to make room for its own better slice, again and again. Any other Workload is
deleted before the job asks for the present slice, so that one at a time holds quota for the gang.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from tpu_training_operator.api import constants
from tpu_training_operator.api.conditions import ConditionType, EventReason, Reason, find, is_true
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.status import Activity, PlacementReason, State
from tpu_training_operator.api.words import count
from tpu_training_operator.domain.cluster_state.observed import Observed, WorkerPod, format_time, parse_time
from tpu_training_operator.domain.cluster_state.obstacles import Obstacle
from tpu_training_operator.domain.cluster_state.workload import (
    PodSettings,
    Queue,
    Workload,
    pod_settings,
    workload_name,
)
from tpu_training_operator.domain.job.naming import WorkerId, config_map_names
from tpu_training_operator.domain.job.options import SliceOption
from tpu_training_operator.domain.objects.actions import (
    AT_ONCE,
    Create,
    Delete,
    Event,
    UpdateWorkload,
    WriteWorkloadStatus,
)
from tpu_training_operator.domain.objects.worker_pod import worker_pod
from tpu_training_operator.domain.objects.workload import (
    adopt,
    conflicts,
    explain_misfit,
    is_for_other_workers,
    with_priority,
    with_queue_of,
    workload,
)
from tpu_training_operator.domain.plan.common.attempt import describe_admission
from tpu_training_operator.domain.plan.common.conditions import JobState, ReadyState
from tpu_training_operator.domain.plan.common.context import Context
from tpu_training_operator.domain.plan.common.pod_cleanup import delete_pods, look_again
from tpu_training_operator.domain.plan.placement.return_to_preferred import count_turns, turn_length, until_next_turn
from tpu_training_operator.domain.plan.placement.search import carry_out, move, next_slice
from tpu_training_operator.domain.plan.plan import LOOK_AGAIN, Batch, Batches, Freshness, Plan, Turn

# Usually a watch reports sooner what Kueue does. These looks are for a watch that is broken or not allowed.
LOOK_AT_RUNNING = timedelta(seconds=30)


# Whether there may be workers.


def wait_for_admission(ctx: Context, queue: Queue) -> Plan | None:
    """Plans for a job that may not have workers now; None if it may."""
    if queue.workload is not None and queue.workload.is_unowned:
        # Once the job owns it, it is deleted with the job, and the watch reports at once what Kueue does to it.
        adopted = UpdateWorkload(adopt(ctx.job, dict(queue.workload.raw)))
        return Plan((Batch((adopted,)),), again=AT_ONCE)
    is_admitted = queue.workload is not None and queue.workload.is_admitted
    if ctx.may_have_workers:
        if is_admitted and is_true(ctx.status.conditions, ConditionType.ADMITTED):
            return None
        if is_admitted:
            # The gang runs with quota, and its status was lost or its job was given a queue by hand.
            message = describe_admission(queue)
            status = ctx.with_condition(ctx.status, ConditionType.ADMITTED, True, Reason.ADMITTED, message)
            return Plan(status=status, again=AT_ONCE)
        # If the Workload cannot be read, the training goes on.
        return _evict(ctx, queue) if queue.version else None
    queue = _check_fit(ctx, queue)
    is_outdated = _is_outdated(ctx, queue)
    if is_admitted and not queue.problem and not is_outdated:
        return None
    if is_outdated and (active := sum(pod.may_use_chips for pod in ctx.all_workers)):
        # They use the quota of the outdated Workload, so they stop before it is replaced.
        status = ctx.present(ctx.status, describe_wait(queue, active))
        return Plan(delete_pods(ctx.all_workers, ctx.now), status).due_within(
            look_again(ctx.all_workers, ctx.now), LOOK_AGAIN
        )
    return _return_to_queue(ctx, queue) if ctx.is_suspended else _wait(ctx, queue)


def _check_fit(ctx: Context, queue: Queue) -> Queue:
    """Returns the queue, with a problem if its prebuilt Workload is not for this job."""
    if not queue.is_prebuilt or queue.workload is None or queue.problem:
        return queue
    worker = worker_pod(ctx.job, ctx.resolution, WorkerId(1, 0, 0))
    why = explain_misfit(ctx.job, ctx.resolution, dict(queue.workload.raw), worker)
    return replace(queue, problem=f"{why}; the operators of both clusters must have the same version") if why else queue


def _is_outdated(ctx: Context, queue: Queue) -> bool:
    """Returns whether the workers have changed since the operator created the Workload, as they may during a
    suspension. The pod sets of a Workload cannot follow."""
    if not ctx.is_suspended or queue.workload is None or queue.workload.is_going or queue.is_prebuilt:
        return False
    return is_for_other_workers(dict(queue.workload.raw), ask_for(ctx.option, queue).body)


def _evict(ctx: Context, queue: Queue) -> Plan:
    """Stops a gang whose chips Kueue wants back, or has never given. No failure class is charged."""
    why = queue.workload.waits_for() if queue.workload else "its Workload is gone"
    message = f"queue {_queue_name(queue)}: {why}; the workers save and stop"
    ready = ReadyState(State.QUEUED, Reason.EVICTED, message)
    status = replace(ctx.status, goodput=ctx.charge(ctx.goodput_at_end(ctx.now), ctx.now, Activity.QUEUE))
    for kind in (ConditionType.ADMITTED, ConditionType.GANG_READY):
        status = ctx.with_condition(status, kind, False, ready.reason, message)
    event = Event(EventReason.EVICTED, message, warning=True)
    return Plan(status=ctx.present(status, ready), events=(event,), again=AT_ONCE, turn=Turn.SUSPEND)


def _return_to_queue(ctx: Context, queue: Queue) -> Plan:
    """Ends a suspension: the job waits for admission again."""
    batches: Batches = ()
    workload = queue.workload
    if workload is not None and _is_outdated(ctx, queue):
        batches = delete_workloads([workload])
    elif workload is not None and not workload.is_active:
        batches = (Batch((UpdateWorkload(workload.with_active(True)),)),)
    goodput = ctx.charge(ctx.goodput_of_stopped() or ctx.settled_goodput(), ctx.now, Activity.QUEUE)
    message = f"queue {_queue_name(queue)}: resumed, waiting for admission"
    ready = ReadyState(State.QUEUED, Reason.QUEUED, message)
    status = replace(ctx.status, goodput=goodput)
    status = ctx.with_condition(status, ConditionType.SUSPENDED, False, Reason.RESUMED, message)
    status = ctx.with_condition(status, ConditionType.ADMITTED, False, ready.reason, message)
    events = (Event(EventReason.RESUMED, message),)
    return Plan(batches, ctx.present(status, ready), events, again=AT_ONCE)


def _wait(ctx: Context, queue: Queue) -> Plan:
    """Stops workers that still run, then asks for admission."""
    workers = ctx.all_workers
    active = [pod for pod in workers if pod.may_use_chips]
    if queue.workload is None and not queue.name and not queue.problem:
        problem = "the job now asks Kueue for another slice, but its label"
        queue = replace(queue, problem=f"{problem} {constants.LABEL_QUEUE} is gone: name the queue again")
    batches = delete_pods(workers, ctx.now)
    if not active:
        batches = (*batches, *(_release_left_behind(ctx, queue) if queue.problem else _next_step(ctx, queue)))
    ready = describe_wait(queue, len(active))
    status = replace(ctx.status, resolved=ctx.resolution.resolved)
    if ctx.attempt and not active:
        status = replace(status, goodput=ctx.goodput_of_stopped())
    due = None if active else next_slice(ctx)
    if due is not None and ctx.now >= due.at:
        return carry_out(replace(ctx, status=status), due)
    if due is not None:
        ready = replace(ready, message=f"{ready.message}; {due.words()}")
    status = ctx.with_condition(status, ConditionType.ADMITTED, False, ready.reason, ready.message)
    is_new = find(ctx.status.conditions, ConditionType.ADMITTED) is None
    events = (Event(EventReason.QUEUED, ready.message),) if is_new else ()
    wanted = Plan(batches, ctx.present(status, ready), events, again=LOOK_AGAIN)
    return wanted.due_within(look_again(workers, ctx.now), due.at - ctx.now if due else None)


def _next_step(ctx: Context, queue: Queue) -> Batches:
    """Returns the next step of the job's controller, now that no worker is active."""
    workload = queue.workload
    if workload is None:
        # The Workloads of other slices go first (`_find_unneeded`).
        return () if queue.others else (Batch((ask_for(ctx.option, queue),)),)
    if workload.is_going or workload.is_finished:
        return ()
    if workload.is_evicted and workload.holds_quota:
        return (release_quota(workload, ctx.now),)
    return () if queue.is_prebuilt else pass_on_labels(queue)


def _release_left_behind(ctx: Context, queue: Queue) -> Batches:
    """Gives back what Kueue wants back of the quota of slices that the job has left. Their Workloads stay while the job
    names no queue (`_find_unneeded`)."""
    left = [entry.workload for entry in queue.others if entry.workload is not None]
    return tuple(release_quota(workload, ctx.now) for workload in left if workload.is_evicted and workload.holds_quota)


def release_quota(workload: Workload, now: datetime) -> Batch:
    """Tells Kueue that no worker uses the quota of an evicted Workload any longer."""
    return Batch(
        (WriteWorkloadStatus(workload.without_quota(format_time(now)), frees_quota=True),), Freshness.FRESH_ALL
    )


def deactivate(workload: Workload) -> Batch:
    """Takes the Workload out of its queue. Kueue frees the quota of an inactive Workload at once."""
    return Batch((UpdateWorkload(workload.with_active(False)),), Freshness.FRESH_ALL)


def delete_workloads(workloads: Iterable[Workload]) -> Batches:
    """Returns one batch that deletes these Workloads, and with them the quota that they hold; none without any."""
    actions = [Delete("Workload", workload.name, workload.uid, api_version=workload.version) for workload in workloads]
    return (Batch(actions, Freshness.FRESH_ALL),) if actions else ()


def ask_for(option: SliceOption, queue: Queue) -> Create:
    worker = worker_pod(option.job, option.resolution, WorkerId(1, 0, 0))
    return Create(workload(option.job, option.resolution, queue, worker, option.number))


def pass_on_labels(queue: Queue) -> Batches:
    """Passes on the queue or the priority that the job's labels have been given since its Workload was created. Kueue
    allows that until quota is reserved."""
    workload = queue.workload
    if workload is None or workload.holds_quota:
        return ()
    if queue.name and queue.name != workload.queue:
        return (Batch((UpdateWorkload(workload.with_queue(queue.name)),)),)
    if queue.priority is None:
        return ()
    return (Batch((UpdateWorkload(with_priority(dict(workload.raw), queue.priority)),)),)


def describe_wait(queue: Queue, active: int) -> ReadyState:
    """Returns what a waiting job shows. `active`: workers that still run."""
    workload, name = queue.workload, _queue_name(queue)
    if queue.problem:
        return ReadyState(State.BLOCKED, Reason.QUEUE_UNUSABLE, queue.problem)
    if workload is None:
        why = f"waiting for {count(active, 'worker')} to stop" if active else "waiting for Kueue to consider the job"
        return ReadyState(State.QUEUED, Reason.QUEUED, f"queue {name}: {why}")
    if active:
        why = f"{workload.waits_for()}; waiting for {count(active, 'worker')} to stop"
        return ReadyState(State.QUEUED, Reason.EVICTED, f"queue {name}: {why}")
    if workload.is_finished:
        message = f"Workload {workload.name} is finished, but the job is not; delete the Workload"
        return ReadyState(State.BLOCKED, Reason.DEACTIVATED, message)
    if not workload.is_active:
        message = (
            f"queue {name}: {workload.waits_for()}; Workload {workload.name} is not active: suspend and resume the job,"
            " or set the Workload's spec.active to true"
        )
        return ReadyState(State.BLOCKED, Reason.DEACTIVATED, message)
    return ReadyState(State.QUEUED, Reason.QUEUED, f"queue {name}: {workload.waits_for()}")


def _queue_name(queue: Queue) -> str:
    return queue.name or (queue.workload.queue if queue.workload else "")


def leave_queue(ctx: Context, workers: Sequence[WorkerPod]) -> Batches:
    """Takes a suspended job out of the queue once its workers have stopped: a Workload that stays active would be
    admitted, and hold quota for nothing."""
    workload = ctx.queue.workload if ctx.queue else None
    if workload is None or workload.is_going or workload.is_finished or any(pod.may_use_chips for pod in workers):
        return ()
    if workload.is_active:
        return (deactivate(workload),)
    return (release_quota(workload, ctx.now),) if workload.is_evicted and workload.holds_quota else ()


def explain_eviction(look: JobState) -> str | None:
    """Says why a job that has begun may not keep its workers, whatever its spec; None if it may, or if its Workload
    cannot be read."""
    if look.observed.queue is None:
        return None
    metadata, placement = look.observed.job["metadata"], look.status.placement
    number = placement.option_index if placement else 0
    queue = look.observed.queue.at(workload_name(str(metadata["name"]), str(metadata["uid"]), number))
    if not queue.version or (queue.workload is not None and queue.workload.is_admitted):
        return None
    return f"queue {_queue_name(queue)}: {queue.workload.waits_for() if queue.workload else 'its Workload is gone'}"


def give_up_quota(observed: Observed) -> Batches:
    """Takes a job that cannot continue out of its queue, once none of its workers is active. If it can continue later,
    it asks again. A prebuilt Workload stays, and only its quota goes."""
    queue = observed.queue
    if queue is None or not queue.version or any(pod.may_use_chips for pod in observed.pods):
        return ()
    workloads = [entry.workload for entry in (queue, *queue.others) if entry.workload is not None]
    active = [workload for workload in workloads if not workload.is_going and not workload.is_finished]
    if not queue.is_prebuilt:
        return delete_workloads(active)
    return tuple(deactivate(workload) for workload in active if workload.is_active)


def look_at_suspended(ctx: Context) -> timedelta | None:
    """Returns the time until the next look at a suspended job, if its watch reports nothing before; None once its
    Workload holds no quota."""
    workload = ctx.queue.workload if ctx.queue else None
    if ctx.queue and ctx.queue.others:
        return LOOK_AGAIN
    is_over = workload is None or workload.is_finished or (not workload.is_active and not workload.holds_quota)
    return None if is_over else LOOK_AGAIN


# Where the workers go.


def read_placement(ctx: Context, option: SliceOption | None = None) -> PodSettings | Obstacle | None:
    """Returns what Kueue adds to the workers' pods on that slice, by default the present one; None for a job without a
    queue. Returns an Obstacle if that contradicts what the job asks for: nothing is overwritten."""
    option = option or ctx.option
    queue = ctx.queue_on(option)
    if queue is None:
        return None
    if queue.problem:
        return Obstacle(Reason.QUEUE_UNUSABLE, queue.problem)
    wanted = pod_settings(queue)
    if contradictions := conflicts(worker_pod(option.job, option.resolution, WorkerId(1, 0, 0)), wanted):
        message = f"the workers cannot be placed as Kueue has decided: {'; '.join(contradictions)}"
        return Obstacle(Reason.PLACEMENT_CONFLICT, message)
    return wanted


# Reports to Kueue.


def tell_pods_ready(ctx: Context) -> Plan:
    """Tells Kueue whether the workers run, unless it knows. Kueue evicts jobs that never report it."""
    workload = ctx.queue.workload if ctx.queue else None
    if workload is None or not workload.is_admitted or not ctx.may_have_workers:
        return Plan()
    report = workload.with_pods_ready(ctx.is_running, format_time(ctx.now))
    return Plan() if report is None else Plan((Batch((WriteWorkloadStatus(report),)),))


def end_workloads(look: JobState) -> Plan:
    """Ends the Workloads of a finished job once no worker is active. That gives the quota back, so it waits for the end
    of the workers, not of the job."""
    observed, status = look.observed, look.status
    queue = observed.queue
    if queue is None or not queue.version:
        return Plan()
    if any(pod.may_use_chips for pod in observed.pods):
        return Plan(again=LOOK_AGAIN)
    has_succeeded = is_true(status.conditions, ConditionType.SUCCEEDED)
    ready = find(status.conditions, ConditionType.READY)
    # On all slices: the job may have asked for a better one.
    workloads = [entry.workload for entry in (queue, *queue.others) if entry.workload is not None]
    message, now = ready.message if ready else "", format_time(look.now)
    ends = [
        WriteWorkloadStatus(workload.finished(has_succeeded, message, now), frees_quota=True)
        for workload in workloads
        if not workload.is_finished and not workload.is_going
    ]
    batches = tuple(Batch((end,), Freshness.FRESH_ALL) for end in ends)
    left = look.with_condition(
        status, ConditionType.ADMITTED, False, Reason.QUOTA_RELEASED, "the job has finished and uses no quota"
    )
    return Plan(batches, left)


# A better slice.


def move_once_admitted(ctx: Context) -> Plan | None:
    """Plans the move to a better slice, if Kueue has admitted the job there; None if not."""
    target = _find_target(ctx)
    queue = ctx.queue_on(target) if target else None
    if target is None or queue is None or queue.workload is None or not queue.workload.is_admitted:
        return None
    if isinstance(read_placement(ctx, target), Obstacle):
        return None
    return move(ctx, target, PlacementReason.BETTER, "Kueue has admitted the job there; the workers save and stop")


def ask_for_better_slice(ctx: Context) -> Plan:
    """Asks Kueue for a better slice, and deletes the Workloads of slices that the job does not need."""
    queue = ctx.queue
    if queue is None or not queue.version:
        return Plan()
    target = _find_target(ctx)
    if unneeded := delete_workloads(_find_unneeded(ctx, queue, target)):
        return Plan((*_delete_left_behind(ctx), *unneeded), again=AT_ONCE)
    batches = () if target is None else _ask_or_release(ctx, target)
    return Plan(batches, again=LOOK_AGAIN if batches else None).due_within(until_next_turn(ctx))


def _find_target(ctx: Context) -> SliceOption | None:
    """Returns the better slice whose turn it is; None if the job should stay where it is for now."""
    queue, turns = ctx.queue, count_turns(ctx)
    if queue is None or not queue.version or queue.is_prebuilt or turns is None or turns < 0:
        return None
    better = [option for option in ctx.options if option.number < ctx.option.number]
    coming = (option for option in better if _is_coming(ctx, option))
    return next(coming, better[turns % len(better)])


def _is_coming(ctx: Context, option: SliceOption) -> bool:
    """Returns whether Kueue has reserved quota for the slice. An admission check that brings its nodes takes a
    while."""
    queue = ctx.queue_on(option)
    workload = queue.workload if queue else None
    return workload is not None and workload.holds_quota and workload.is_active and not _is_late(ctx, workload)


def _is_late(ctx: Context, workload: Workload) -> bool:
    """Returns whether the Workload has held quota for as long as a gang may take to start, without being admitted."""
    if workload.is_admitted or workload.reserved_since is None:
        return False
    patience = timedelta(seconds=ctx.job.spec.run_policy.start_deadline_seconds)
    return ctx.now >= parse_time(workload.reserved_since) + patience


def _may_ask_again(ctx: Context, workload: Workload) -> bool:
    """Returns whether Kueue gave the Workload up at least a turn ago, so that the job may ask for the slice again."""
    evicted_at = workload.condition("Evicted").get("lastTransitionTime")
    return workload.is_given_up and ctx.now >= parse_time(str(evicted_at)) + turn_length(ctx)


def _find_unneeded(ctx: Context, queue: Queue, target: SliceOption | None) -> Sequence[Workload]:
    """Returns the Workloads that the job does not need; none while they may cover workers, and none if the job no
    longer names a queue in which it could ask again."""
    covered = all(not pod.may_use_chips or pod.option_number == ctx.option.number for pod in ctx.observed.pods)
    if not covered or (queue.workload is None and not queue.name):
        return ()
    wanted = ctx.queue_on(target) if target is not None else None
    needed = wanted.workload if wanted else None
    if needed is not None and (_is_late(ctx, needed) or _may_ask_again(ctx, needed)):
        needed = None
    others = (other.workload for other in queue.others if other.workload is not None)
    return [workload for workload in others if not workload.is_going and (not needed or workload.name != needed.name)]


def _delete_left_behind(ctx: Context) -> Batches:
    """Deletes the ConfigMaps of the attempt before one that only waits: a later attempt deletes only those of the
    attempt right before it."""
    names = config_map_names(ctx.job.name, ctx.attempt - 1)
    return (Batch([Delete("ConfigMap", name) for name in names]),) if ctx.is_held and ctx.attempt > 1 else ()


def _ask_or_release(ctx: Context, target: SliceOption) -> Batches:
    """Returns the next step for the Workload of a better slice that is not proven yet."""
    queue, present = ctx.queue_on(target), ctx.queue.workload if ctx.queue else None
    if queue is None or present is None:
        return ()
    workload = queue.workload
    if workload is None and (not queue.name or queue.problem):
        return ()
    if workload is None:
        body = with_queue_of(ask_for(target, queue).body, dict(present.raw))
        return (Batch((Create(body, optional=True, for_better_slice=True),)),)
    if workload.is_going:
        return ()
    if workload.is_evicted and workload.holds_quota:
        return (release_quota(workload, ctx.now),)
    if workload.is_admitted:
        # The workers cannot go where Kueue would place them, so the quota is free for other jobs.
        return (deactivate(workload),)
    wanted = with_queue_of(dict(workload.raw), dict(present.raw))
    is_as_wanted = workload.holds_quota or not workload.is_active or wanted["spec"] == workload.raw["spec"]
    return () if is_as_wanted else (Batch((UpdateWorkload(wanted),)),)
