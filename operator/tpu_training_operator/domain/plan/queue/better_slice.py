"""The Workloads of a job's other slices: one that proves a better slice, and those that are no longer needed.

In a queue, a second Workload proves the capacity. While the gang trains on an alternative, it asks for a better slice,
and costs nothing as long as it waits. Once Kueue admits it, the gang moves. The quota of the slice that it leaves goes
back when its last worker there has stopped. So the quota always covers the workers, and counts for both slices only
from the admission until then. It asks in the queue and with the priority of the first, whatever the job's labels say
by now: else Kueue might evict the gang to make room for its own better slice, again and again.

Any other Workload is deleted before the job asks for the present slice, so that one at a time holds quota for the gang.
"""

from dataclasses import replace
from datetime import timedelta

from tpu_training_operator.api.conditions import ConditionType, is_true
from tpu_training_operator.api.status import PlacementReason, Status
from tpu_training_operator.domain.cluster_state.observed import format_time, parse_time
from tpu_training_operator.domain.cluster_state.workload import Queue, Workload
from tpu_training_operator.domain.job.naming import config_map_name
from tpu_training_operator.domain.job.options import Option
from tpu_training_operator.domain.objects.actions import (
    AT_ONCE,
    Action,
    DeleteConfigMap,
    DeleteWorkload,
    Plan,
    UpdateWorkload,
    WriteWorkloadStatus,
)
from tpu_training_operator.domain.objects.workload import beside
from tpu_training_operator.domain.plan.common.blocked import Obstacle
from tpu_training_operator.domain.plan.common.context import Context
from tpu_training_operator.domain.plan.placement.moving import move
from tpu_training_operator.domain.plan.placement.return_to_preferred import turn, turns_taken, until_next_turn
from tpu_training_operator.domain.plan.queue.queueing import asking_for, changes_course, placement

_LOOK_AGAIN = timedelta(seconds=15)


def with_proof(decided: Plan, ctx: Context) -> Plan:
    """The plan, with what happens to the Workloads of other slices; instead of it the move to a better slice, if its
    Workload is admitted."""
    queue, status = ctx.queue, decided.status
    if queue is None or not queue.version or queue.is_prebuilt or (status and _is_another_attempt(ctx, status)):
        return decided
    target = None if status and is_true(status.conditions, ConditionType.SUSPENDED) else _sought(ctx)
    if target is not None and _is_proven(ctx, target):
        why = "Kueue has admitted the job there; the workers save and stop"
        return move(ctx, target, PlacementReason.BETTER, why)
    if status is not None and changes_course(ctx.status, status):
        # A pass that writes such a status does nothing else.
        return decided
    if spared := _spared(ctx, queue, target):
        return replace(decided, stages=(*decided.stages, *_left_behind(ctx), spared)).due_within(AT_ONCE)
    asked = None if target is None else _asked(ctx, target)
    if asked is not None:
        decided = replace(decided, stages=(*decided.stages, (asked,))).due_within(_LOOK_AGAIN)
    return decided.due_within(until_next_turn(ctx))


def _is_another_attempt(ctx: Context, status: Status) -> bool:
    return status.attempt != ctx.attempt or status.completion_time is not None


def _sought(ctx: Context) -> Option | None:
    """The better slice whose turn it is; None if none has, or if the job should stay where it is for now."""
    turns = turns_taken(ctx)
    if turns is None or turns < 0:
        return None
    better = [option for option in ctx.options if option.number < ctx.option.number]
    coming = (option for option in better if _is_coming(ctx, option))
    return next(coming, better[turns % len(better)])


def _is_coming(ctx: Context, option: Option) -> bool:
    """Whether Kueue has reserved quota for the slice. An admission check that brings its nodes takes a while."""
    queue = ctx.queue_on(option)
    found = queue.workload if queue else None
    return found is not None and found.holds_quota and found.is_active and not _is_late(ctx, found)


def _is_late(ctx: Context, found: Workload) -> bool:
    """Whether it has held quota for as long as a gang may take to start, without being admitted."""
    if found.is_admitted or found.reserved_since is None:
        return False
    patience = timedelta(seconds=ctx.job.spec.run_policy.start_deadline_seconds)
    return ctx.now >= parse_time(found.reserved_since) + patience


def _is_over(ctx: Context, found: Workload) -> bool:
    """Whether Kueue gave it up a turn ago, so that the job may ask for the slice again."""
    return found.is_given_up and ctx.now >= parse_time(str(found.condition("Evicted")["lastTransitionTime"])) + turn(
        ctx
    )


def _is_proven(ctx: Context, target: Option) -> bool:
    queue = ctx.queue_on(target)
    is_admitted = queue is not None and queue.workload is not None and queue.workload.is_admitted
    return is_admitted and not isinstance(placement(ctx, target), Obstacle)


def _spared(ctx: Context, queue: Queue, target: Option | None) -> tuple[Action, ...]:
    """The deletions of Workloads that the job does not need. None while they may cover workers, and none if the job no
    longer says in which queue it could ask again."""
    covered = all(not pod.may_use_chips or pod.alternative == ctx.option.number for pod in ctx.observed.pods)
    if not covered or (queue.workload is None and not queue.name):
        return ()
    wanted = ctx.queue_on(target) if target is not None else None
    found = wanted.workload if wanted else None
    kept = found.name if found and not _is_late(ctx, found) and not _is_over(ctx, found) else ""
    others = (each.workload for each in queue.others if each.workload is not None)
    return tuple(
        DeleteWorkload(each.version, each.name, each.uid) for each in others if each.name != kept and not each.is_going
    )


def _left_behind(ctx: Context) -> tuple[tuple[Action, ...], ...]:
    """The ConfigMap of the attempt before one that only waits. The next attempt with workers looks back only one."""
    name = config_map_name(ctx.job.name, ctx.attempt - 1)
    return ((DeleteConfigMap(name),),) if ctx.is_held and ctx.attempt > 1 else ()


def _asked(ctx: Context, target: Option) -> Action | None:
    """The next step for the Workload of a better slice that is not proven yet."""
    queue, present = ctx.queue_on(target), ctx.queue.workload if ctx.queue else None
    if queue is None or queue.is_unowned or present is None:
        return None
    found = queue.workload
    if found is None and (not queue.name or queue.problem):
        return None
    if found is None:
        asked = asking_for(target, queue)
        return replace(asked, body=beside(asked.body, dict(present.raw)), optional=True, for_growth=True)
    if found.is_going:
        return None
    if found.is_evicted and found.holds_quota:
        return WriteWorkloadStatus(found.without_quota(format_time(ctx.now)), frees_quota=True)
    if found.is_admitted:
        # The workers cannot go where Kueue would place them, so others may have the quota.
        return UpdateWorkload(found.with_active(False), frees_quota=True)
    wanted = beside(dict(found.raw), dict(present.raw))
    is_as_wanted = found.holds_quota or not found.is_active or wanted["spec"] == found.raw["spec"]
    return None if is_as_wanted else UpdateWorkload(wanted)
