"""A gang that waits: its status, and how long it may hold nodes without running on them.

A gang that starts changes with every pod event, and thousands of gangs may wait at once. So the status shows a new
reason after at least ten seconds, new counts once a minute, and is written with the same message every five minutes, to
bring the goodput up to date.

A pod's own status does not mention a volume that cannot be mounted, or what the cluster autoscaler does about a pod
without a node. Its events do.

Two gangs that each hold nodes which the other needs would wait forever. A gang without any node blocks no other and may
wait as long as it takes. A gang that has all its nodes and does not start on them, because a volume cannot be mounted
or a runtime hangs, would hold its chips forever, too.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tpu_contract.words import cut
from tpu_training_operator.api.conditions import ConditionType, Reason, find
from tpu_training_operator.api.failures import FailureReason
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.run_policy import FailureClass, RunPolicy
from tpu_training_operator.api.status import Failure, State, Status
from tpu_training_operator.api.words import count
from tpu_training_operator.domain.cluster_state.hosts import (
    HostGroup,
    group_words,
    host_of,
    summarize_hosts,
    why_not_ready,
)
from tpu_training_operator.domain.cluster_state.observed import WorkerPod
from tpu_training_operator.domain.cluster_state.worker_reports import Notes
from tpu_training_operator.domain.failures.first import failure_of
from tpu_training_operator.domain.failures.messages import with_ending
from tpu_training_operator.domain.failures.pod_signs import has_started
from tpu_training_operator.domain.objects.actions import AT_ONCE, LookAtEvents
from tpu_training_operator.domain.plan.common.conditions import ReadyState
from tpu_training_operator.domain.plan.common.context import Context
from tpu_training_operator.domain.plan.placement.search import next_slice
from tpu_training_operator.domain.plan.plan import Batch, Plan

_NEW_REASON = timedelta(seconds=10)
_NEW_COUNTS = timedelta(minutes=1)
_AGAIN = timedelta(minutes=5)
_SHORT_WAIT = timedelta(minutes=15)
_MOST_GROUPS = 3
_LONGEST_MESSAGE = 1000
# The events of two pods may differ; those of more would repeat them.
_MOST_ASKED = 2
_REASONS = re.compile(r"(?<!\d)\d{1,5} hosts?: ([^:;(]{0,200})")
# A kubelet alternates between these two.
_SAME = {"ErrImagePull": "ImagePullBackOff"}


def show_wait(ctx: Context, decision: Plan) -> Plan:
    """Returns the plan with a status that says what the gang waits for, or with a look at events that may explain
    it."""
    notes = ctx.observed.notes
    if notes is None or decision.status is not None:
        return decision
    between = _between_looks(ctx)
    pods = _choose_silent(ctx)
    if pods and _is_due(notes, ctx, between):
        return decision.then(Plan((Batch((LookAtEvents(pods),)),), again=AT_ONCE))
    soonest = _since(notes, ctx) + _NEW_REASON - ctx.now
    if AT_ONCE < soonest <= _NEW_REASON:
        # No message yet: a gang that starts within seconds needs none.
        return decision.due_within(soonest, between)
    message = describe_hosts(ctx)
    wait = _wait(notes, ctx, message)
    if wait <= AT_ONCE:
        return replace(decision, status=_show(ctx, message)).due_within(between)
    return decision.due_within(wait, between)


def describe_hosts(ctx: Context) -> str:
    """Says what the gang waits for, such as "attempt 2: 3 of 4 hosts ready; 1 host: ErrImagePull: ..."."""
    layout = ctx.resolution.layout
    hosts = (host for pod in ctx.pods if (host := host_of(pod.raw)) is not None)
    summary = summarize_hosts(hosts, ctx.attempt, layout.slices, layout.hosts_per_slice)
    lines = read_event_lines(ctx)
    ready = f"{summary.ready + summary.finished} of {count(summary.total, 'host')} ready"
    parts = [f"{ctx.rung_prefix}attempt {ctx.attempt}: {ready}"]
    parts += [_describe_group(group, ctx, lines) for group in summary.others[:_MOST_GROUPS]]
    if left := sum(len(group.workers) for group in summary.others[_MOST_GROUPS:]):
        parts.append(f"{left} more for other reasons")
    if (due := next_slice(ctx)) is not None:
        parts.append(due.words())
    return cut("; ".join(parts), _LONGEST_MESSAGE)


def read_event_lines(ctx: Context) -> Mapping[str, str]:
    """Returns, by pod name, the event that explains why the pod waits, as of the last look at its events."""
    notes = ctx.observed.notes
    return notes.events.lines if notes and notes.events else {}


def _describe_group(group: HostGroup, ctx: Context, lines: Mapping[str, str]) -> str:
    names = (worker.pod_name(ctx.job.name) for worker in group.workers)
    event_line = next((f" ({name}: {lines[name]})" for name in names if name in lines), "")
    return group_words(group) + event_line


def _choose_silent(ctx: Context) -> tuple[tuple[str, str], ...]:
    """Returns names and uids of pods whose own status does not say why they wait: a few with a node, and one without,
    about which the cluster autoscaler may have something to say."""
    silent = [pod for pod in ctx.pods if pod.node and not pod.is_ready and not pod.has_ended and not _says_why(pod)]
    unplaced = [pod for pod in ctx.pods if pod.node is None]
    return tuple((pod.name, pod.uid) for pod in (*silent[:_MOST_ASKED], *unplaced[:1]))


def _says_why(pod: WorkerPod) -> bool:
    return not pod.is_terminating and pod.waiting(sidecars=True)[1] != ""


def _is_due(notes: Notes, ctx: Context, between: timedelta) -> bool:
    """Returns whether it is time to look at events. In the first seconds every gang waits."""
    youngest = max(pod.created for pod in ctx.pods)
    return ctx.now >= youngest + _NEW_REASON and (notes.events is None or ctx.now >= notes.events.asked + between)


def _between_looks(ctx: Context) -> timedelta:
    """Returns the pause between two looks at a waiting gang, because a new event causes no pass; it is longer after a
    long wait."""
    latest = max(max(pod.created, pod.placed or pod.created) for pod in ctx.pods)
    return _NEW_COUNTS if ctx.now < latest + _SHORT_WAIT else _AGAIN


def _wait(notes: Notes, ctx: Context, message: str) -> timedelta:
    """Returns how long until this message may be written."""
    ready = find(ctx.status.conditions, ConditionType.READY)
    before = ready.message if ready else ""
    is_new = _find_reasons(message) != _find_reasons(before)
    pause = _AGAIN if message == before else _NEW_REASON if is_new else _NEW_COUNTS
    return min(pause, _since(notes, ctx) + pause - ctx.now)


def _since(notes: Notes, ctx: Context) -> datetime:
    return notes.written or max(pod.created for pod in ctx.pods)


def _find_reasons(message: str) -> set[str]:
    return {_SAME.get(reason, reason) for reason in _REASONS.findall(message)}


def _show(ctx: Context, message: str) -> Status:
    """Returns the status with the message. The state and its reason stay: a gang that is being replaced is Restarting
    until it runs."""
    is_replaced = ctx.status.state is State.RESTARTING
    reason = Reason.REPLACING_WORKERS if is_replaced else Reason.WAITING_FOR_WORKERS
    state = State.RESTARTING if is_replaced else State.STARTING
    status = replace(ctx.status, goodput=ctx.settled_goodput())
    return ctx.present(status, ReadyState(state, reason, message))


# Pulling a large image on a new node takes a while.
_LONGEST_START = timedelta(minutes=30)


@dataclass(frozen=True)
class Late:
    """A worker that has its node and has not started. It counts as failed at `deadline`, `limit` after it got there."""

    pod: WorkerPod
    limit: timedelta
    deadline: datetime


def find_late(pods: Sequence[WorkerPod], policy: RunPolicy) -> Late | None:
    """Returns the worker that is late; None for a gang that lacks nodes, or whose containers have all started."""
    placed = [pod.placed for pod in pods if pod.placed is not None]
    waiting = [pod for pod in pods if not has_started(pod) and not pod.has_ended]
    if len(placed) < len(pods) or not waiting:
        return None
    limit = max(_LONGEST_START, timedelta(seconds=policy.start_deadline_seconds))
    return Late(waiting[0], limit, max(placed) + limit)


def start_failure(late: Late, event: str, attempt: int, now: datetime) -> Failure:
    """Returns the failure of a late worker. `event`: the newest event that explains why the pod waits; empty if none is
    known."""
    pod = late.pod
    waits = f"{why_not_ready(pod)} ({event})" if event else why_not_ready(pod)
    what = f"the container has not started within {late.limit.total_seconds():.0f} s on its node"
    message = with_ending(what, waits)
    return failure_of(pod, attempt, FailureClass.INFRASTRUCTURE, FailureReason.NOT_STARTED, message, now)


@dataclass(frozen=True)
class PartlyPlaced:
    """`waiting` workers have no node. At `deadline` the others release theirs."""

    waiting: int
    deadline: datetime


def find_partly_placed(pods: Sequence[WorkerPod], policy: RunPolicy, avoided: Sequence[str]) -> PartlyPlaced | None:
    """Returns what a partly placed gang lacks; None if all workers have nodes, or if none has one and the job avoids no
    node (`avoided`).

    The time runs from the latest progress, the youngest pod or the latest placement: the nodes of a large slice come up
    one after the other, and a gang may have queued for hours before.
    """
    waiting = sum(pod.node is None for pod in pods)
    if waiting == 0 or (waiting == len(pods) and not avoided):
        return None
    last = max(max(pod.created, pod.placed or pod.created) for pod in pods)
    return PartlyPlaced(waiting, last + timedelta(seconds=policy.start_deadline_seconds))


def is_partly_refused(pods: Sequence[WorkerPod], policy: RunPolicy, now: datetime) -> bool:
    """Returns whether the cluster has refused the missing workers for so long that the others hold their nodes for
    nothing."""
    return bool(pods) and now >= max(pod.created for pod in pods) + timedelta(seconds=policy.start_deadline_seconds)
