"""Pure functions that find what happened between one status and the next, for the metrics.

A newer operator may have written the status: values unknown here count as known ones.
"""

from collections.abc import Iterable
from datetime import datetime

from tpu_training_operator.api.conditions import ConditionType, Reason, find, is_true
from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.api.status import Accounts, AttemptStart, Status
from tpu_training_operator.domain.cluster_state.observed import parse_time


def restarts(before: Status, after: Status) -> dict[FailureClass, int]:
    """Returns the number of added restarts, by class."""
    added: dict[FailureClass, int] = {}
    for name, count in after.restarts.by_class.items():
        known = FailureClass(name) if name in list(FailureClass) else FailureClass.UNKNOWN
        more = max(0, count - before.restarts.by_class.get(name, 0))
        added[known] = added.get(known, 0) + more
    return added


def failure(before: Status, after: Status) -> FailureClass | None:
    """Returns the class of the failure that ended an attempt; None if no attempt failed."""
    last = before.last_failure.attempt if before.last_failure else 0
    if after.last_failure is None or after.last_failure.attempt <= last:
        return None
    return after.last_failure.failure_class


def finish(before: Status, after: Status) -> str | None:
    """Returns the reason of the condition with which the job ended; None unless it has just ended."""
    if before.completion_time is not None or after.completion_time is None:
        return None
    ends = (find(after.conditions, kind) for kind in (ConditionType.SUCCEEDED, ConditionType.FAILED))
    return next((end.reason for end in ends if end and end.is_true), "")


def readiness(before: Status, after: Status) -> tuple[bool, float] | None:
    """Returns whether the gang had failed, and after how many seconds all its workers became ready; None unless they
    have just become ready.

    A start counts from the first attempt or the resumption, a recovery from the first failure. A start whose first
    attempts failed is one start.
    """
    ready = find(after.conditions, ConditionType.GANG_READY)
    if ready is None or not ready.is_true or is_true(before.conditions, ConditionType.GANG_READY):
        return None
    now = parse_time(ready.last_transition_time)
    started = max(_starts(after), default=now)
    unready = find(before.conditions, ConditionType.GANG_READY)
    since = parse_time(unready.last_transition_time) if unready else started
    if since <= started:
        return False, _seconds(started, now)
    # The status keeps only the last failure; of several in a row, the first made the gang unready.
    failed = parse_time(after.last_failure.time) if after.last_failure else since
    return True, _seconds(min(since, failed), now)


def seconds_by_account(before: Status, after: Status) -> dict[str, int]:
    """Returns the seconds added to each account. Training counts as productive once a checkpoint has it or the job has
    ended: until then it may still be lost, and counters never decrease."""
    return _count_added(before, after, before.goodput, after.goodput)


def chip_seconds_by_account(before: Status, after: Status) -> dict[str, int]:
    """Returns the chip-seconds added to each account, without those that a job used before its operator began to
    count."""
    if before.attempt and not (before.goodput and before.goodput.chip_seconds):
        return {}
    spent = (status.goodput and status.goodput.chip_seconds for status in (before, after))
    return _count_added(before, after, *spent)


def finished_starts(before: Status, after: Status) -> list[AttemptStart]:
    """Returns the starts that ended with a first step. The write that tells of it may begin the next attempt."""
    return [start for start in after.starts if start.total_seconds is not None and start not in before.starts]


def is_over_budget(status: Status) -> bool:
    """Returns whether the budget has stopped the job. One that is to fail is suspended first."""
    conditions = (find(status.conditions, kind) for kind in (ConditionType.SUSPENDED, ConditionType.FAILED))
    return any(end is not None and end.is_true and end.reason == Reason.BUDGET_EXCEEDED for end in conditions)


def final_ratio(before: Status, after: Status) -> float | None:
    """Returns the goodput of a job that has just ended."""
    if finish(before, after) is None or after.goodput is None or after.goodput.ratio is None:
        return None
    return float(after.goodput.ratio)


def _count_added(before: Status, after: Status, spent: Accounts | None, spent_after: Accounts | None) -> dict[str, int]:
    earlier, later = _settle(before, spent), _settle(after, spent_after)
    return {account: max(0, amount - earlier.get(account, 0)) for account, amount in later.items()}


def _settle(status: Status, spent: Accounts | None) -> dict[str, int]:
    """Returns the sums without the training that may still be lost."""
    if spent is None:
        return {}
    return spent.by_account | {"productive": spent.productive - (0 if status.completion_time else spent.unsaved)}


def unready_since(status: Status, created: datetime) -> datetime:
    """Returns since when a job has been waiting for its workers: the last of its creation, start, resumption, admission
    and failure."""
    gang, admitted = (find(status.conditions, kind) for kind in (ConditionType.GANG_READY, ConditionType.ADMITTED))
    lost = [gang] if gang and not gang.is_true else []
    gained = [admitted] if admitted and admitted.is_true else []
    changed = (parse_time(condition.last_transition_time) for condition in (*lost, *gained))
    return max((created, *_starts(status), *changed))


def _starts(status: Status) -> Iterable[datetime]:
    if status.start_time:
        yield parse_time(status.start_time)
    suspended = find(status.conditions, ConditionType.SUSPENDED)
    if suspended and not suspended.is_true:
        yield parse_time(suspended.last_transition_time)


def _seconds(start: datetime, end: datetime) -> float:
    return max(0.0, (end - start).total_seconds())
