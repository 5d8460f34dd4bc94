"""The status's record of how an attempt came to its first step: the seconds of each phase, which add up to the whole.

The pods tell the first phases, worker 0 the others, and both only afterwards: no status is written for a phase. The
times of the first ones come from several clocks, so each counts as no earlier than the one before it, and none as later
than worker 0's first step. What worker 0 reports are durations by its own monotonic clock.

Worker 0 may start before its peers and wait for them at the meeting. That part of its wait counts as theirs, as time in
which their pods were bound and started.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from tpu_contract.protocol import WORKER_PHASES, ReportPhase, StartPhase
from tpu_training_operator.api.conditions import ConditionType, find
from tpu_training_operator.api.status import MOST_STARTS, AttemptStart, Failure, Status
from tpu_training_operator.domain.cluster_state.observed import WorkerPod, format_time, parse_time
from tpu_training_operator.domain.cluster_state.worker_reports import WorkerReport
from tpu_training_operator.domain.failures.pod_signs import has_started, started_at

# An edit may have left any number, which a time does not reach.
_LONGEST = 10**9


def add_start(
    before: Sequence[AttemptStart], attempt: int, failure: Failure | None, cause: str, now: datetime
) -> list[AttemptStart]:
    """Returns the starts with that of an attempt which begins now. `failure`: the one before it, if that caused it."""
    since = now if failure is None else min(parse_time(failure.time), now)
    start = AttemptStart(
        attempt=attempt,
        cause=cause if failure is None else str(failure.failure_class),
        since=format_time(since),
        after_failure=failure is not None,
        seconds={} if failure is None else {StartPhase.NOTICED: round(_seconds(since, now))},
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
    waited = max(begun) - begun[0]
    if told:
        met = told.get(StartPhase.MEETING, 0.0)
        waited = min(waited, timedelta(seconds=min(met, _LONGEST)))
        told[StartPhase.MEETING] = met - waited.total_seconds()
    seconds, started = _until_started(start, status, pods, begun[0] + waited)
    if told:
        seconds |= {phase: told[phase] for phase in WORKER_PHASES if phase in told}
    elif said is not None and _has_made_a_step(said):
        seconds[StartPhase.UNTOLD] = max(0.0, _seconds(started, said.received))
    known = _rounded(seconds)
    is_over = StartPhase.COMPILED in known or StartPhase.UNTOLD in known
    start = replace(start, seconds=known, total_seconds=sum(known.values()) if is_over else None)
    return replace(status, starts=[*status.starts[:-1], start])


def _until_started(
    start: AttemptStart, status: Status, pods: Sequence[WorkerPod], started: datetime
) -> tuple[dict[str, float], datetime]:
    """Returns the seconds of the phases up to `started`, and when they ended."""
    before = parse_time(start.since)
    noticed = before + timedelta(seconds=min(max(0, start.seconds.get(StartPhase.NOTICED, 0)), _LONGEST))
    started = max(noticed, started)
    seconds = dict[str, float]()
    moments = {StartPhase.NOTICED: noticed, **_moments(status, pods), StartPhase.STARTED: started}
    for phase, moment in moments.items():
        end = min(max(moment, before), started)
        seconds[phase], before = _seconds(before, end), end
    return seconds, started


def _moments(status: Status, pods: Sequence[WorkerPod]) -> dict[StartPhase, datetime]:
    """Returns when the phases between the decision and the start of the containers ended."""
    admitted = find(status.conditions, ConditionType.ADMITTED)
    earliest = status.restarts.next_attempt_time
    ends = {
        StartPhase.QUEUED: parse_time(admitted.last_transition_time) if admitted else None,
        StartPhase.BACKOFF: parse_time(earliest) if earliest else None,
        StartPhase.CLEARED: min(pod.created for pod in pods),
        StartPhase.BOUND: max(pod.placed or pod.created for pod in pods),
    }
    return {phase: end for phase, end in ends.items() if end is not None}


def _has_made_a_step(report: WorkerReport) -> bool:
    return report.phase is not ReportPhase.STARTING and report.step > (report.start_step or 0)


def _seconds(start: datetime, end: datetime) -> float:
    return (end - start).total_seconds()


def _rounded(seconds: Mapping[str, float]) -> dict[str, int]:
    """Returns whole seconds whose sum is the rounded sum."""
    known, passed, total = dict[str, int](), 0.0, 0
    for phase in StartPhase:
        if phase in seconds:
            passed += seconds[phase]
            known[phase] = round(passed) - total
            total = round(passed)
    return known
