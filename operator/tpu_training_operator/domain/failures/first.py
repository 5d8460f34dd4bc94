"""Finds the worker that failed first. Only its failure is recorded for the attempt and counts as a restart.

A gang fails as one: when a worker dies, the others lose their peer and die too. `domain.failures.table` classifies the
failure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tpu_training_operator.api.constants import LABEL_JOB_NAME
from tpu_training_operator.api.failures import FailureReason
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.api.status import Failure
from tpu_training_operator.domain.cluster_state.observed import WorkerPod, format_time, parse_time
from tpu_training_operator.domain.cluster_state.ownership import job_of
from tpu_training_operator.domain.failures.messages import step_reached, with_ending
from tpu_training_operator.domain.failures.pod_signs import deletion_requested_at, disruption, ended_at, has_started
from tpu_training_operator.domain.failures.table import (
    DELETED_WHILE_RUNNING,
    DEVICE_FAULTS,
    Doubt,
    FailureRow,
    classify,
    own_exit_code,
    with_started_peers,
)
from tpu_training_operator.domain.job.naming import WorkerId

# How long to wait for the cause of a failure, because a worker that lost its peer may be reported before that peer. An
# end in the future comes from a node whose clock is ahead. It does not show since when it is known, so nothing waits
# for it.
SETTLE = timedelta(seconds=5)


@dataclass(frozen=True)
class _End:
    pod: WorkerPod
    row: FailureRow
    began: datetime


def first_failure(
    pods: Sequence[WorkerPod], attempt: int, now: datetime, *, settle_user_errors: bool
) -> Failure | None:
    """Returns the failure that ended the attempt; None if there is none, or if its cause may still show up.

    `settle_user_errors`: the loop is the user's own, so a lost peer may have caused its exit code.
    """
    ends = _find_ends(pods, now)
    if not ends:
        return None
    doubts = {Doubt.LOST_PEER, Doubt.IN_OWN_LOOP} if settle_user_errors else {Doubt.LOST_PEER}
    first = _first_cause(ends, doubts)
    ended = {end.pod.worker for end in ends}
    others_may_tell = any(pod.worker not in ended and not pod.has_ended for pod in pods)
    is_open = (first.row.doubt in doubts and others_may_tell) or (first.row.is_early and first.pod.is_about_to_end)
    if is_open and first.began <= now < first.began + SETTLE:
        return None
    return _record(first, attempt, now)


def next_look(pods: Sequence[WorkerPod], now: datetime) -> timedelta | None:
    """Returns how soon `first_failure` may change without news from the cluster; None if it cannot."""
    moments = [end.began + SETTLE for end in _find_ends(pods, now) if end.began <= now]
    moments += [due for pod, row in _pair_with_rows(pods) if (due := _due_time(pod, row))]
    return min((moment - now for moment in moments if moment > now), default=None)


def missing_worker(worker: WorkerId, job: str, trace: WorkerPod | None, now: datetime) -> Failure:
    """Returns the failure of a worker whose pod is missing from a gang that had been complete.

    `trace`: the pod as it was last seen, or as it is now if a lost label or owner hides it; None if it is unknown.
    """
    name = worker.pod_name(job)
    known = trace if trace is not None and trace.name == name else None
    hidden = None if known is None else _hidden_words(known, job)
    row = None if known is None or hidden else classify(known)
    if known is not None and row is not None and row.patience is None:
        return _record(_End(known, row, _began_at(known, now)), worker.attempt, now)
    return Failure(
        attempt=worker.attempt,
        pod=name,
        slice=worker.slice,
        host=worker.host,
        failure_class=FailureClass.INFRASTRUCTURE,
        reason=FailureReason.WORKER_HIDDEN if hidden else FailureReason.POD_DELETED,
        message=hidden or DELETED_WHILE_RUNNING,
        time=format_time(now),
    )


def _hidden_words(pod: WorkerPod, job: str) -> str | None:
    """Explains why the operator no longer sees a worker that exists; None if nothing hides it."""
    is_labelled = (pod.raw["metadata"].get("labels") or {}).get(LABEL_JOB_NAME) == job
    if is_labelled and job_of(pod.raw) == job:
        return None
    lost = "its owner reference" if is_labelled else f"its label {LABEL_JOB_NAME}"
    return f"Pod {pod.name} has lost {lost}, so it is no longer a worker; delete the pod: it may still use its chips"


def hang_failure(
    pod: WorkerPod, message: str, attempt: int, now: datetime, *, reason: FailureReason = FailureReason.NO_PROGRESS
) -> Failure:
    """Returns the failure of a gang without progress. A long message keeps its first line and the end of its stacks."""
    what, _, stacks = message.partition("\n")
    return failure_of(pod, attempt, FailureClass.HANG, reason, with_ending(what, stacks, "\n"), now)


def failure_of(
    pod: WorkerPod, attempt: int, failure_class: FailureClass, reason: str, message: str, time: datetime
) -> Failure:
    return Failure(
        attempt=attempt,
        pod=pod.name,
        node=pod.node,
        slice=pod.worker.slice,
        host=pod.worker.host,
        failure_class=failure_class,
        reason=reason,
        message=message,
        time=format_time(time),
    )


def is_device_fault(failure: Failure) -> bool:
    """Tells whether the failure points at the chips of its node."""
    return failure.reason in DEVICE_FAULTS


def _pair_with_rows(pods: Sequence[WorkerPod]) -> list[tuple[WorkerPod, FailureRow]]:
    """Pairs each worker that shows a sign of failure with its row; that of a failed start depends on its peers."""
    rows = [(pod, row) for pod in pods if (row := classify(pod))]
    started = [pod for pod in pods if has_started(pod)] if rows else []
    return [(pod, with_started_peers(row) if any(peer is not pod for peer in started) else row) for pod, row in rows]


def _find_ends(pods: Sequence[WorkerPod], now: datetime) -> list[_End]:
    """Returns the workers that failed or will never start, in the order in which that began."""
    ends = []
    for pod, row in _pair_with_rows(pods):
        due = _due_time(pod, row)
        if row.patience is None:
            ends.append(_End(pod, row, _began_at(pod, now)))
        elif due and due <= now:
            ends.append(_End(pod, row, due))
    return sorted(ends, key=lambda end: (end.began, end.pod.worker))


def _first_cause(ends: Sequence[_End], doubts: set[Doubt]) -> _End:
    """Returns the first end that does not report a lost peer.

    If a lost peer may have caused it nevertheless, a certain sign that began shortly afterwards takes precedence,
    because Kubernetes may report an end after those of the peers that it caused.
    """
    first = next((end for end in ends if end.row.doubt is not Doubt.LOST_PEER), ends[0])
    if first.row.doubt not in doubts:
        return first
    sure = (end for end in ends if end.row.doubt not in doubts and end.began <= first.began + SETTLE)
    return next(sure, first)


def _due_time(pod: WorkerPod, row: FailureRow) -> datetime | None:
    """Returns when a pod that does not start counts as failed.

    A waiting container has no timestamp, so patience starts when the pod gets its node. It is already over for a sign
    that shows only after a long pull.
    """
    if row.patience is None or pod.placed is None:
        return None
    return pod.placed + row.patience


def _began_at(pod: WorkerPod, now: datetime) -> datetime:
    """Returns when the worker began to end: its peers may end before it, during its grace period."""
    announced = disruption(pod).get("lastTransitionTime")
    moments = [ended_at(pod), parse_time(announced) if announced else None, deletion_requested_at(pod)]
    known = [moment for moment in moments if moment]
    return min(known) if known else _last_heard(pod, now)


def _last_heard(pod: WorkerPod, now: datetime) -> datetime:
    """Dates the end of a pod that failed without a time: the kubelet refused it, or the node forgot it."""
    started = pod.raw.get("status", {}).get("startTime")
    for time in (pod.condition("Ready").get("lastTransitionTime"), started):
        if time:
            return parse_time(time)
    return now


def _record(end: _End, attempt: int, now: datetime) -> Failure:
    pod, row = end.pod, end.row
    message, time = row.message_for(pod), min(end.began, now)
    failure = failure_of(pod, attempt, row.failure_class, row.reason_for(pod), message, time)
    return replace(failure, exit_code=own_exit_code(pod), step=step_reached(pod))
