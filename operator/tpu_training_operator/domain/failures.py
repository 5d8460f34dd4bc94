"""Which worker failed first, and what class of failure it is. Called by the planner.

A gang fails as one: when one worker dies the others lose their peer and die too, so only the first failure of an
attempt is recorded and charged.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.api.status import Failure
from tpu_training_operator.domain.observed import WorkerPod, format_time, parse_time

# The trainer's exit codes (`tpu_trainer.contract.ExitCode`); a contract test compares the two tables.
EXIT_CODE_CLASSES = {
    1: (FailureClass.USER_ERROR, "UserError"),
    69: (FailureClass.INFRASTRUCTURE, "PeerLost"),
    70: (FailureClass.UNKNOWN, "InternalError"),
    71: (FailureClass.HANG, "Hung"),
    74: (FailureClass.INFRASTRUCTURE, "StorageFailed"),
    75: (FailureClass.PREEMPTION, "Preempted"),
    # The same program on the same data once more: a chip that computes wrongly is a matter of the node it was on.
    76: (FailureClass.UNKNOWN, "Diverged"),
    78: (FailureClass.USER_ERROR, "BadSpec"),
}
_PEER_LOST = 69
# 128 + SIGKILL and 128 + SIGTERM: ended from outside, not by the program.
_KILLED_FROM_OUTSIDE = (137, 143)

# A worker that lost its peer may be reported before the peer that caused it.
SETTLE = timedelta(seconds=5)

_LONGEST_MESSAGE = 1000


@dataclass(frozen=True)
class _Cause:
    failure_class: FailureClass
    reason: str
    message: str


def first_failure(
    pods: Sequence[WorkerPod], attempt: int, now: datetime, *, settle_user_errors: bool = False
) -> Failure | None:
    """The failure that brought the attempt down, or None while there is none or its cause may still show up."""
    failed = [pod for pod in pods if _has_failed(pod)]
    if not failed:
        return None
    first = min(failed, key=lambda pod: (pod.exit_code == _PEER_LOST, _failed_at(pod, now), pod.worker))
    others_may_tell = any(not pod.has_ended and not pod.is_terminating for pod in pods)
    if first.exit_code == _PEER_LOST and others_may_tell and now < _failed_at(first, now) + SETTLE:
        return None
    return _failure(first, attempt, now)


def missing_worker(pod_name: str, slice_index: int, host: int, attempt: int, now: datetime) -> Failure:
    """A worker of a gang that had been complete, and whose pod is gone without a trace."""
    return Failure(
        attempt=attempt,
        pod=pod_name,
        slice=slice_index,
        host=host,
        failure_class=FailureClass.INFRASTRUCTURE,
        reason="PodDeleted",
        message="the pod was deleted while the gang was running",
        time=format_time(now),
    )


def _has_failed(pod: WorkerPod) -> bool:
    return pod.phase == "Failed" or (pod.is_terminating and pod.phase != "Succeeded")


def _failed_at(pod: WorkerPod, now: datetime) -> datetime:
    """When its end began. A worker that is deleted or evicted gets a grace period, in which its peers may end first."""
    metadata = pod.raw["metadata"]
    times = [pod.termination.get("finishedAt"), pod.condition("DisruptionTarget").get("lastTransitionTime")]
    moments = [parse_time(time) for time in times if time]
    if deleted := metadata.get("deletionTimestamp"):
        # The end of the grace period, not its beginning.
        grace = timedelta(seconds=metadata.get("deletionGracePeriodSeconds") or 0)
        moments.append(parse_time(deleted) - grace)
    return min(moments, default=now)


def _failure(pod: WorkerPod, attempt: int, now: datetime) -> Failure:
    cause = _cause(pod)
    return Failure(
        attempt=attempt,
        pod=pod.name,
        node=pod.node,
        slice=pod.worker.slice,
        host=pod.worker.host,
        exit_code=pod.exit_code,
        failure_class=cause.failure_class,
        reason=cause.reason,
        # The end: that is where a traceback says what was wrong.
        message=cause.message[-_LONGEST_MESSAGE:],
        time=format_time(min(_failed_at(pod, now), now)),
    )


def _cause(pod: WorkerPod) -> _Cause:
    """The table of failure classes, the surest sign first."""
    status, code = pod.raw.get("status", {}), pod.exit_code
    disruption = pod.condition("DisruptionTarget")
    if disruption.get("status") == "True":
        reason = str(disruption.get("reason") or "Disrupted")
        lost = reason == "DeletionByTaintManager"
        failure_class = FailureClass.INFRASTRUCTURE if lost else FailureClass.PREEMPTION
        return _Cause(failure_class, reason, str(disruption.get("message") or "the pod was disrupted"))
    if pod.termination.get("reason") == "OOMKilled":
        return _Cause(FailureClass.OUT_OF_MEMORY, "OOMKilled", "the worker used more memory than its limit")
    if code is None and pod.is_terminating:
        return _Cause(FailureClass.INFRASTRUCTURE, "PodDeleted", "the pod was deleted while the gang was running")
    if code is None:
        # Refused or evicted by the kubelet: no container ever ended.
        reason = str(status.get("reason") or "PodFailed")
        return _Cause(FailureClass.INFRASTRUCTURE, reason, str(status.get("message") or "the pod failed"))
    if code in EXIT_CODE_CLASSES:
        failure_class, reason = EXIT_CODE_CLASSES[code]
        return _Cause(failure_class, reason, last_words(pod) or f"the worker exited with code {code}")
    if code in _KILLED_FROM_OUTSIDE:
        return _Cause(FailureClass.INFRASTRUCTURE, "Killed", f"the worker was killed (exit code {code})")
    return _Cause(FailureClass.UNKNOWN, "ExitCode", last_words(pod) or f"the worker exited with code {code}")


def last_words(pod: WorkerPod) -> str:
    """The message in a trainer's termination message (JSON), or the message itself where it is plain text."""
    text = str(pod.termination.get("message") or "").strip()
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return str(parsed.get("message", "")) if isinstance(parsed, dict) else text


def next_look(pods: Sequence[WorkerPod], now: datetime) -> timedelta | None:
    return SETTLE if any(pod.phase == "Failed" for pod in pods) else None


def device_fault(failure: Failure) -> bool:
    return failure.reason == "DeviceBusy"


def hang(pod: WorkerPod, message: str, attempt: int, now: datetime) -> Failure:
    return Failure(
        attempt=attempt,
        pod=pod.name,
        node=pod.node,
        slice=pod.worker.slice,
        host=pod.worker.host,
        failure_class=FailureClass.HANG,
        reason="NoProgress",
        message=message[-_LONGEST_MESSAGE:],
        time=format_time(now),
    )
