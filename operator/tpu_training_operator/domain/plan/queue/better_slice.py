"""The Workloads of a job's other slices: one that proves a better slice, and those that are no longer needed.

In a queue, a second Workload proves the capacity. While the gang trains on an alternative, it asks for a better slice,
and costs nothing as long as it waits. Once Kueue admits it, the gang moves. The quota of the slice that it leaves goes
back when its last worker there has stopped. So the quota always covers the workers, and counts for both slices only
from the admission until then. The second Workload has the queue and the priority of the first, even if the job's labels
have changed: else Kueue might evict the gang to make room for its own better slice, again and again.

Any other Workload is deleted before the job asks for the present slice, so that one at a time holds quota for the gang.
"""

from collections.abc import Sequence
from datetime import timedelta

from tpu_training_operator.api.status import PlacementReason
from tpu_training_operator.domain.cluster_state.observed import parse_time
from tpu_training_operator.domain.cluster_state.obstacles import Obstacle
from tpu_training_operator.domain.cluster_state.workload import Queue, Workload
from tpu_training_operator.domain.job.naming import config_map_name
from tpu_training_operator.domain.job.options import SliceOption
from tpu_training_operator.domain.objects.actions import AT_ONCE, Create, Delete, UpdateWorkload
from tpu_training_operator.domain.objects.workload import with_queue_of
from tpu_training_operator.domain.plan.common.context import Context
from tpu_training_operator.domain.plan.placement.return_to_preferred import count_turns, turn_length, until_next_turn
from tpu_training_operator.domain.plan.placement.search import move
from tpu_training_operator.domain.plan.plan import LOOK_AGAIN, Batch, Batches, Plan
from tpu_training_operator.domain.plan.queue.queueing import (
    ask_for,
    deactivate,
    delete_workloads,
    read_placement,
    release_quota,
)


def move_once_admitted(ctx: Context) -> Plan | None:
    """Plans the move to a better slice, if Kueue has admitted the job there; None if not."""
    target = _find_target(ctx)
    if target is None or not _is_proven(ctx, target):
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
    batches = () if target is None else _next_step(ctx, target)
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
    """Whether Kueue has reserved quota for the slice. An admission check that brings its nodes takes a while."""
    queue = ctx.queue_on(option)
    workload = queue.workload if queue else None
    return workload is not None and workload.holds_quota and workload.is_active and not _is_late(ctx, workload)


def _is_late(ctx: Context, workload: Workload) -> bool:
    """Whether the Workload has held quota for as long as a gang may take to start, without being admitted."""
    if workload.is_admitted or workload.reserved_since is None:
        return False
    patience = timedelta(seconds=ctx.job.spec.run_policy.start_deadline_seconds)
    return ctx.now >= parse_time(workload.reserved_since) + patience


def _may_ask_again(ctx: Context, workload: Workload) -> bool:
    """Whether Kueue gave the Workload up at least a turn ago, so that the job may ask for the slice again."""
    if not workload.is_given_up:
        return False
    return ctx.now >= parse_time(str(workload.condition("Evicted")["lastTransitionTime"])) + turn_length(ctx)


def _is_proven(ctx: Context, target: SliceOption) -> bool:
    queue = ctx.queue_on(target)
    is_admitted = queue is not None and queue.workload is not None and queue.workload.is_admitted
    return is_admitted and not isinstance(read_placement(ctx, target), Obstacle)


def _find_unneeded(ctx: Context, queue: Queue, target: SliceOption | None) -> Sequence[Workload]:
    """Returns the Workloads that the job does not need; none while they may cover workers, and none if the job no
    longer names a queue in which it could ask again."""
    covered = all(not pod.may_use_chips or pod.option_number == ctx.option.number for pod in ctx.observed.pods)
    if not covered or (queue.workload is None and not queue.name):
        return ()
    wanted = ctx.queue_on(target) if target is not None else None
    target_workload = wanted.workload if wanted else None
    needed = (
        target_workload.name
        if target_workload and not _is_late(ctx, target_workload) and not _may_ask_again(ctx, target_workload)
        else ""
    )
    others = (other.workload for other in queue.others if other.workload is not None)
    return [workload for workload in others if workload.name != needed and not workload.is_going]


def _delete_left_behind(ctx: Context) -> Batches:
    """Deletes the ConfigMap of the attempt before one that only waits: a later attempt deletes only that of the attempt
    right before it."""
    name = config_map_name(ctx.job.name, ctx.attempt - 1)
    return (Batch((Delete("ConfigMap", name),)),) if ctx.is_held and ctx.attempt > 1 else ()


def _next_step(ctx: Context, target: SliceOption) -> Batches:
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
