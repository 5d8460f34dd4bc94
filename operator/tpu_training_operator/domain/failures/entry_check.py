"""Judges the entry check's pod: the job is fine so far, the job is wrong, or the check says nothing about the job.

Only the user's own errors count against the job. A pod that is evicted, that gets no node or too little memory, or
whose image lacks the check says nothing about it, because the workers run elsewhere. Nor does an image that this node
cannot pull or run: other nodes may have other rights, another cache and another processor.
"""

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum, auto

from tpu_contract.protocol import ExitCode
from tpu_training_operator.api.entry_check import EntryCheck
from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.api.status import Failure
from tpu_training_operator.domain.cluster_state.hosts import why_not_ready
from tpu_training_operator.domain.cluster_state.observed import EARLIEST, EntryCheckPod
from tpu_training_operator.domain.failures.first import first_failure, next_look
from tpu_training_operator.domain.failures.messages import describe
from tpu_training_operator.domain.failures.pod_signs import ended_at
from tpu_training_operator.domain.job.trainer_report import LastWords

# A node pool without TPUs may have to grow first.
_LONGEST_WAIT = timedelta(minutes=5)
# The kubelet ends the pod at its deadline; this covers the case that it does not.
_KUBELET = timedelta(seconds=60)
_ENDING = timedelta(seconds=10)

_USERS = (FailureClass.USER_ERROR, FailureClass.NOT_FINITE)
# The trainer's own outcomes that blame the user's code.
_OUTCOMES = {code.name for code in (ExitCode.UserError, ExitCode.BadSpec, ExitCode.NotFinite)}
# Reasons of the kubelet that blame the job and would be the same on any node.
_REASONS = frozenset(
    ("InvalidImageName", "ImageNotFound", "CannotStart", "RootImage", "CreateContainerConfigError", "ExitedEarly")
)
_OTHER_PROCESSOR = re.compile(r"no match for platform|exec format error")
_NO_TRAINER = re.compile(r"No module named '?tpu_trainer")


class CheckOutcome(Enum):
    PASSED = auto()
    FAILED = auto()
    NOTHING = auto()
    """The check says nothing about the job."""


@dataclass(frozen=True)
class CheckVerdict:
    """The result of the check. `failure`: how the pod failed, if it did."""

    finding: CheckOutcome
    message: str
    failure: Failure | None = None


def verdict(pod: EntryCheckPod, check: EntryCheck, now: datetime) -> CheckVerdict | None:
    if _ends_at(pod) > now:
        return None
    message = pod.trainer_message or LastWords()
    # A pod that is still compiling has already reported that its steps succeeded.
    if message.outcome == "Succeeded" and (pod.exit_code == 0 or message.compiled is not None):
        return CheckVerdict(CheckOutcome.PASSED, pod.last_words)
    if failure := first_failure([pod], pod.worker.attempt, now, settle_user_errors=False):
        finding = CheckOutcome.FAILED if _is_users_error(failure, pod) else CheckOutcome.NOTHING
        return CheckVerdict(finding, describe(failure) + _remedy(failure), failure)
    if _deadline(pod, check) > now:
        return None
    if pod.placed is None:
        waited = f"{_wait_for_node(check).total_seconds():.0f} s"
        return CheckVerdict(
            CheckOutcome.NOTHING, f"no node without TPUs had room for {pod.name} within {waited}: {why_not_ready(pod)}"
        )
    took = f"{check.deadline_seconds} s (spec.entryCheck.deadlineSeconds)"
    return CheckVerdict(CheckOutcome.NOTHING, f"{pod.name} has not ended within {took}: {why_not_ready(pod)}")


def next_verdict(pod: EntryCheckPod, check: EntryCheck, now: datetime) -> timedelta:
    """Returns how soon the verdict may change without news from the cluster."""
    soonest = next_look([pod], now)
    left = min(moment - now for moment in (_deadline(pod, check), _ends_at(pod)) if moment > now)
    return left if soonest is None else min(left, soonest)


def _ends_at(pod: EntryCheckPod) -> datetime:
    """Returns by when the kubelet should have ended a pod whose container has ended.

    A pod that is deleted earlier leaves no log. A pod with a sidecar does not end at all.
    """
    ended = ended_at(pod)
    return EARLIEST if ended is None or pod.has_ended else ended + _ENDING


def _deadline(pod: EntryCheckPod, check: EntryCheck) -> datetime:
    if pod.placed is None:
        return pod.created + _wait_for_node(check)
    return pod.placed + timedelta(seconds=check.deadline_seconds) + _KUBELET


def _wait_for_node(check: EntryCheck) -> timedelta:
    return min(_LONGEST_WAIT, timedelta(seconds=check.deadline_seconds))


def _is_users_error(failure: Failure, pod: EntryCheckPod) -> bool:
    if failure.failure_class not in _USERS or _OTHER_PROCESSOR.search(failure.message):
        return False
    if pod.trainer_message is not None:
        return pod.trainer_message.outcome in _OUTCOMES
    return failure.reason in _REASONS


def _remedy(failure: Failure) -> str:
    if failure.failure_class is FailureClass.OUT_OF_MEMORY:
        return "; spec.entryCheck.resources gives it more memory"
    if _NO_TRAINER.search(failure.message):
        return "; Python in the image does not find the package tpu_trainer"
    return ""
