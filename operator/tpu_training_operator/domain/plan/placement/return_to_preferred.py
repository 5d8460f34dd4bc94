"""How a job returns to a better slice: only once its capacity is proven.

While the gang trains on an alternative, placeholder pods ask for the nodes of a better slice, and the cluster
autoscaler brings these up. When all placeholders run, the gang moves: it saves and stops, its workers on the better
slice are created, and the placeholders go and leave their nodes to the workers. Until then the gang has lost nothing.

A job on fewer slices than it wants asks only for the missing ones. If only some of them come, it grows by those.

Placeholders hold chips that stay unused, so they do not stay. They ask for each better slice in turn, then rest. While
the nodes of a slice are coming up, its turn goes on. The turns follow from the clock, so nothing has to be stored.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta

from tpu_contract.protocol import ReportPhase
from tpu_training_operator.api.conditions import ConditionType, find
from tpu_training_operator.api.placement import ReturnToPreferred
from tpu_training_operator.api.status import PlacementReason
from tpu_training_operator.api.words import count
from tpu_training_operator.domain.cluster_state.observed import WorkerPod, format_time, parse_time
from tpu_training_operator.domain.job.naming import leads_a_slice, placeholder_slice
from tpu_training_operator.domain.job.options import SliceOption
from tpu_training_operator.domain.objects.actions import AT_ONCE, WarnPlaceholderRefused
from tpu_training_operator.domain.objects.placeholder import missing_placeholders
from tpu_training_operator.domain.plan.common.context import Context
from tpu_training_operator.domain.plan.common.pod_cleanup import delete_by_force, delete_pods, describe_stuck, is_stuck
from tpu_training_operator.domain.plan.placement.search import describe_limit, find_next_allowed, move
from tpu_training_operator.domain.plan.plan import LOOK_AGAIN, Batch, Batches, Freshness, Plan, Turn


def move_once_held(ctx: Context) -> Plan | None:
    """Plans the move to a better slice whose nodes placeholders hold; None if there is none. In a queue, Kueue's
    admission proves the capacity instead (`queueing`)."""
    if ctx.queue is not None:
        return None
    if (reachable := _find_reachable(ctx)) is not None:
        return _plan_return(ctx, reachable)
    target = _find_target(ctx)
    if target is None or _count_whole_slices(target, _placeholders_for(ctx, target)) < _count_lacking(ctx, target):
        return None
    return _plan_return(ctx, target)


def hold_nodes(ctx: Context, turn: Turn) -> Plan:
    """Creates the placeholders that ask for a better slice, and deletes those which are no longer needed. `turn`: that
    of the plan to which this is added."""
    held = ctx.observed.placeholders
    target = None if turn is not Turn.NONE or ctx.queue is not None else _find_target(ctx)
    if target is None:
        unwanted = [pod for pod in held if not _awaits_next_gang(pod, ctx)]
        wait = until_next_turn(ctx) if not held else None
        return Plan(delete_pods(unwanted, ctx.now)).due_within(wait, LOOK_AGAIN if held else None)
    asking = _placeholders_for(ctx, target)
    unwanted = [*_find_useless(asking), *(pod for pod in held if pod.option_number != target.number)]
    # A placeholder on a dead node would keep its name for good.
    deletions = (
        *delete_pods(unwanted, ctx.now),
        *delete_by_force((pod for pod in asking if pod not in unwanted), ctx.now),
    )
    return Plan((*(deletions or _create_missing(ctx, target, asking)), *_warnings(ctx, asking)), again=LOOK_AGAIN)


def _placeholders_for(ctx: Context, target: SliceOption) -> list[WorkerPod]:
    return [pod for pod in ctx.observed.placeholders if pod.option_number == target.number]


def _count_lacking(ctx: Context, target: SliceOption) -> int:
    """Returns how many more slices the gang needs for `target`."""
    return target.layout.slices - (ctx.option.layout.slices if target.is_own and ctx.option.is_own else 0)


def _count_whole_slices(target: SliceOption, placeholders: Iterable[WorkerPod]) -> int:
    """Returns the number of slices on which all placeholders run."""
    running = Counter(placeholder_slice(pod.name) for pod in placeholders if pod.is_ready)
    return sum(hosts == target.layout.hosts_per_slice for hosts in running.values())


def _find_reachable(ctx: Context) -> SliceOption | None:
    """Returns the option with the most slices for which placeholders hold the nodes, once no more nodes are coming
    up."""
    turns = count_turns(ctx)
    if turns is None or turns < 0 or 0 in _find_coming_up(ctx):
        return None
    preferred = ctx.options[0]
    more = _count_whole_slices(preferred, _placeholders_for(ctx, preferred))
    reachable = more + preferred.layout.slices - _count_lacking(ctx, preferred)
    better = [option for option in ctx.options if option.is_own and option.number < ctx.option.number]
    return next((option for option in better if more and option.layout.slices <= reachable), None)


def _find_useless(asking: Sequence[WorkerPod]) -> list[WorkerPod]:
    """Returns the placeholders that have ended, and those that hold nodes of a slice whose host 0 is gone. The
    placeholder of host 0 alone kept the node pool for this slice, and its successor may get another pool."""
    there = [pod for pod in asking if not pod.is_terminating and not pod.has_ended]
    led = {placeholder_slice(pod.name) for pod in there if leads_a_slice(pod.name)}
    return [pod for pod in asking if pod.has_ended or (pod.node is not None and placeholder_slice(pod.name) not in led)]


def _plan_return(ctx: Context, target: SliceOption) -> Plan:
    number = _count_lacking(ctx, target) * target.layout.hosts_per_slice
    holds = "holds" if number == 1 else "hold"
    why = f"{count(number, 'placeholder')} {holds} the nodes of {target}; the workers save and stop"
    return move(ctx, target, PlacementReason.BETTER, why)


def _find_target(ctx: Context) -> SliceOption | None:
    """Returns the better slice whose turn it is; None if all slices rest, or if the job should stay where it is for
    now."""
    turns = count_turns(ctx)
    if turns is None or turns < 0:
        return None
    # Placeholders ask for all of spec.slice; fewer slices are an outcome (`_find_reachable`).
    asked_for = [option for option in ctx.options if option.number == 0 or not option.is_own]
    better = [option for option in asked_for if option.number < ctx.option.number]
    coming = _find_coming_up(ctx)
    number = turns % (len(better) + 1)
    in_turn = better[number] if number < len(better) else None
    return next((option for option in better if option.number in coming), in_turn)


def count_turns(ctx: Context) -> int | None:
    """Returns how many turns have passed since the gang was first allowed to move: negative before that, None if it may
    not move."""
    policy = ctx.job.spec.placement
    if policy is None or not _wants_better(ctx):
        return None
    gang = find(ctx.status.conditions, ConditionType.GANG_READY)
    stays = ctx.is_suspended or ctx.is_held or ctx.job.spec.run_policy.suspend or ctx.is_refused or _is_starting(ctx)
    # Workers end one after the other when the training is over.
    stays = stays or any(pod.has_ended for pod in ctx.pods)
    if gang is None or not gang.is_true or stays or find_next_allowed(ctx) is not None:
        return None
    ran = ctx.now - parse_time(gang.last_transition_time) - timedelta(seconds=policy.min_run_seconds)
    return ran // turn_length(ctx)


def _wants_better(ctx: Context) -> bool:
    policy = ctx.job.spec.placement
    returns = policy is not None and policy.return_to_preferred is ReturnToPreferred.AT_CHECKPOINT
    return returns and not ctx.is_on_lower_rung and ctx.option.number > 0


def describe_stay(ctx: Context) -> str:
    """Says why a gang that runs on an alternative does not ask for a better slice for now; empty if it does, or never
    would."""
    allowed = find_next_allowed(ctx)
    if allowed is None or not _wants_better(ctx):
        return ""
    return f"; it asks for no better slice before {format_time(allowed)}: {describe_limit(ctx)}"


def _is_starting(ctx: Context) -> bool:
    """Returns whether the gang still compiles: it has trained nothing here, and would have to compile again
    elsewhere."""
    progress = ctx.status.progress
    return ctx.reports and (progress is None or progress.phase in (None, ReportPhase.STARTING))


def turn_length(ctx: Context) -> timedelta:
    """Returns the length of a turn: as long as the job itself would wait for a slice."""
    return max(option.choice.wait for option in ctx.options)


def until_next_turn(ctx: Context) -> timedelta | None:
    turns, policy = count_turns(ctx), ctx.job.spec.placement
    gang = find(ctx.status.conditions, ConditionType.GANG_READY)
    if turns is None or policy is None or gang is None:
        return None
    begins = parse_time(gang.last_transition_time) + timedelta(seconds=policy.min_run_seconds)
    return max(AT_ONCE, begins + (turns + 1) * turn_length(ctx) - ctx.now) if turns >= 0 else begins - ctx.now


def _find_coming_up(ctx: Context) -> set[int]:
    """Returns the numbers of the options for which a placeholder has recently found a node."""
    patience = timedelta(seconds=ctx.job.spec.run_policy.start_deadline_seconds)
    placements = ((pod, pod.placed) for pod in ctx.observed.placeholders if not pod.has_ended)
    return {pod.option_number for pod, placed in placements if placed is not None and ctx.now < placed + patience}


def _awaits_next_gang(pod: WorkerPod, ctx: Context) -> bool:
    """Returns whether the placeholder's node waits for a worker of this attempt that does not exist yet."""
    is_stopped = ctx.is_suspended or ctx.is_held or ctx.job.spec.run_policy.suspend or ctx.is_refused
    is_for_gang = pod.option_number == (0 if ctx.option.is_own else ctx.option.number)
    return is_for_gang and bool(ctx.missing) and not is_stopped


def _create_missing(ctx: Context, target: SliceOption, asking: Iterable[WorkerPod]) -> Batches:
    first = target.layout.slices - _count_lacking(ctx, target)
    missing = missing_placeholders(target, first, [pod.name for pod in asking])
    return (Batch(missing, Freshness.FRESH_ALL),) if missing else ()


def _warnings(ctx: Context, asking: Iterable[WorkerPod]) -> Batches:
    """Returns a warning, once, about a placeholder whose name a finalizer keeps: until it is gone, no other can ask for
    the slice."""
    notes = ctx.observed.notes
    reasons = (describe_stuck(pod) for pod in asking if is_stuck(pod, ctx.now))
    new = next((why for why in reasons if notes is not None and why not in notes.placeholder_warnings), None)
    return () if new is None else (Batch((WarnPlaceholderRefused(new),)),)
