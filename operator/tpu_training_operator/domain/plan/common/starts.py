"""The status's record of how an attempt came to its first step: the seconds of each phase, which add up to the whole.

The pods tell the first phases, worker 0 the others, and both only afterwards: no status is written for a phase. The
times of the first ones come from several clocks, so each counts as no earlier than the one before it, and none as later
than worker 0's first step. What worker 0 reports are durations by its own monotonic clock.

Worker 0 may start before its peers and wait for them at the meeting. That part of its wait counts as theirs, as time in
which their pods were bound and started.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import accumulate, pairwise

from tpu_contract.protocol import ReportPhase, StartPhase
from tpu_training_operator.api.conditions import ConditionType, find
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.status import MOST_STARTS, AttemptStart, Failure, Status
from tpu_training_operator.domain.cluster_state.observed import WorkerPod, format_time, parse_time
from tpu_training_operator.domain.cluster_state.worker_reports import WorkerReport
from tpu_training_operator.domain.failures.pod_signs import has_started, started_at


def add_start(
    before: Sequence[AttemptStart], attempt: int, failure: Failure | None, cause: str, now: datetime
) -> list[AttemptStart]:
    """Returns the starts with that of an attempt which begins now. `failure`: the one before it, if that caused it."""
    since = now if failure is None else min(parse_time(failure.time), now)
    start = AttemptStart(
        attempt=attempt,
        cause=cause if failure is None else str(failure.failure_class),
        since=format_time(since),
        seconds={StartPhase.NOTICED: round((now - since).total_seconds())},
    )
    # An edit may have taken the attempt back.
    return [*(known for known in before if known.attempt < attempt), start][-MOST_STARTS:]


def complete_start(status: Status, pods: Sequence[WorkerPod], report: WorkerReport | None) -> Status:
    """Returns the status with what is known by now about the start of its attempt. `pods`: all workers of the attempt,
    worker 0 first; empty if one is missing."""
    start = status.starts[-1] if status.starts else None
    if start is None or start.attempt != status.attempt or start.total_seconds is not None or not pods:
        return status
    if not all(has_started(pod) and (pod.is_ready or pod.has_ended) for pod in pods):
        return status
    said = report if report is not None and report.attempt == status.attempt else None
    told = dict(said.start_seconds) if said is not None else {}
    begun = [started_at(pod) or pod.placed or pod.created for pod in pods]
    # While worker 0 meets the others, some of them may not have started.
    waited = (max(begun) - begun[0]).total_seconds()
    if told:
        met = told.get(StartPhase.MEETING, 0.0)
        waited = min(waited, met)
        told[StartPhase.MEETING] = met - waited
    seconds = _until_started(start, status, pods, begun[0] + timedelta(seconds=waited)) | told
    if said is not None and not told and _has_made_a_step(said):
        passed = (said.received - parse_time(start.since)).total_seconds()
        seconds[StartPhase.UNTOLD] = max(0.0, passed - sum(seconds.values()))
    # Whole seconds whose sum is the rounded sum.
    ends = [0, *map(round, accumulate(seconds.values()))]
    known = {phase: end - begin for phase, (begin, end) in zip(seconds, pairwise(ends), strict=True)}
    is_over = StartPhase.COMPILED in known or StartPhase.UNTOLD in known
    start = replace(start, seconds=known, total_seconds=sum(known.values()) if is_over else None)
    return replace(status, starts=[*status.starts[:-1], start])


def _until_started(
    start: AttemptStart, status: Status, pods: Sequence[WorkerPod], started: datetime
) -> dict[str, float]:
    """Returns the seconds of the phases that end by `started`."""
    admitted = find(status.conditions, ConditionType.ADMITTED)
    moments = {
        StartPhase.QUEUED: parse_time(admitted.last_transition_time if admitted else start.since),
        StartPhase.BACKOFF: parse_time(status.restarts.next_attempt_time or start.since),
        StartPhase.CLEARED: min(pod.created for pod in pods),
        StartPhase.BOUND: max(pod.placed or pod.created for pod in pods),
        StartPhase.STARTED: started,
    }
    # An edit may have left any number.
    passed: float = max(0, start.seconds.get(StartPhase.NOTICED, 0))
    seconds: dict[str, float] = {StartPhase.NOTICED: passed}
    since = parse_time(start.since)
    last = max(passed, (started - since).total_seconds())
    for phase, moment in moments.items():
        end = min(max(passed, (moment - since).total_seconds()), last)
        seconds[phase], passed = end - passed, end
    return seconds


def _has_made_a_step(report: WorkerReport) -> bool:
    return report.phase is not ReportPhase.STARTING and report.step > (report.start_step or 0)
