"""The laws that every status write must obey, given the status before it. The state machine checks them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from tests.planner.story import reason
from tpu_training_operator.api.conditions import ConditionType, find, is_true, without_condition
from tpu_training_operator.api.status import MOST_STARTS, Goodput, Progress, Status
from tpu_training_operator.domain.cluster_state.observed import parse_time

Law = Callable[[Status, Status], bool]
_PICTURES = (ConditionType.READY, ConditionType.RECONCILING, ConditionType.STALLED)


def is_finished(status: Status) -> bool:
    return is_true(status.conditions, ConditionType.SUCCEEDED) or is_true(status.conditions, ConditionType.FAILED)


def is_queued(status: Status) -> bool:
    admitted = find(status.conditions, ConditionType.ADMITTED)
    return admitted is not None and not admitted.is_true


def is_restart(before: Status, after: Status) -> bool:
    """The write records a failure and raises the attempt."""
    return after.attempt > before.attempt and reason(after) == ("False", "ReplacingWorkers")


def total(restarts: Mapping[str, int]) -> int:
    return sum(restarts.values())


def life(goodput: Goodput) -> int:
    """All seconds that the goodput accounts for."""
    return goodput.suspended + goodput.queue + active(goodput)


def active(goodput: Goodput) -> int:
    trained = goodput.productive + goodput.wasted
    return goodput.start + trained + goodput.recovery + goodput.moving


def _one_picture(_: Status, after: Status) -> bool:
    """Reconciling may also say that passes fail, whatever was decided before."""
    shown = [kind for kind in _PICTURES if is_true(after.conditions, kind)]
    if reason(after, ConditionType.RECONCILING) == ("True", "ProgressingWithRetry") and len(shown) > 1:
        shown.remove(ConditionType.RECONCILING)
    return len(shown) == 1


def _every_attempt_has_a_reason(before: Status, after: Status) -> bool:
    if after.attempt == before.attempt or before.attempt == 0:
        return True
    resumed = is_true(before.conditions, ConditionType.SUSPENDED) or is_queued(before)
    ready, why = reason(after)
    return (
        resumed
        or is_restart(before, after)
        or (ready == "False" and why in ("SomePodsUnschedulable", "Moving", "NextRung"))
    )


def _steps_are_not_taken_back(before: Status, after: Status) -> bool:
    a, b = before.progress, after.progress
    if str(before.ladder) != str(after.ladder):
        # Another rung, on which steps are counted from 0 again.
        return True
    if a is None or b is None:
        return a is None or b is not None
    return before.attempt != after.attempt or a.phase is None or a.step <= b.step


def _checkpoints_are_not_taken_back(before: Status, after: Status) -> bool:
    return str(before.ladder) != str(after.ladder) or checkpoint(before.progress) <= checkpoint(after.progress)


def checkpoint(progress: Progress | None) -> int:
    return (progress and progress.checkpoint_step) or 0


def _sums_only_grow(before: Status, after: Status) -> bool:
    a, b = before.goodput, after.goodput
    if a is None or b is None:
        return a is None
    pairs = [
        (a.queue, b.queue),
        (a.start, b.start),
        (a.productive + a.wasted, b.productive + b.wasted),
        (a.wasted, b.wasted),
        (a.recovery, b.recovery),
        (a.moving, b.moving),
        (a.suspended, b.suspended),
    ]
    return all(earlier <= later for earlier, later in pairs) and parse_time(a.since) <= parse_time(b.since)


def _chips_are_not_taken_back(before: Status, after: Status) -> bool:
    a, b = (status.goodput.chip_seconds if status.goodput else None for status in (before, after))
    if a is None or b is None:
        return a is None
    return a.total <= b.total and a.wasted <= b.wasted and 0 <= b.unsaved <= b.productive and a.since <= b.since


def _the_unsaved_part_is_a_part(_: Status, after: Status) -> bool:
    return after.goodput is None or 0 <= after.goodput.unsaved <= after.goodput.productive


def _the_end_is_the_end(before: Status, after: Status) -> bool:
    def without_generation(status: Status) -> Status:
        """Nor with what it gives back once its workers have stopped: quota and chips."""
        conditions = without_condition(status.conditions, ConditionType.ADMITTED)
        goodput = status.goodput and replace(status.goodput, chip_seconds=None)
        placement = status.placement and replace(status.placement, chip_seconds={})
        given_back = {"conditions": conditions, "goodput": goodput, "placement": placement, "usage": None}
        return replace(status, observed_generation=None, **given_back)

    return not is_finished(before) or without_generation(before) == without_generation(after)


def _accounts_are_closed_at_the_end(_: Status, after: Status) -> bool:
    if not is_finished(after):
        return after.completion_time is None
    return after.goodput is not None and after.goodput.since == after.completion_time


def _the_first_failure_stays(before: Status, after: Status) -> bool:
    return before.first_failure is None or before.first_failure == after.first_failure


def _the_gang_of_an_unfinished_attempt_only_is_ready(_: Status, after: Status) -> bool:
    ready = is_true(after.conditions, ConditionType.GANG_READY)
    return not (ready and (is_finished(after) or is_true(after.conditions, ConditionType.SUSPENDED)))


def _starts_add_up(before: Status, after: Status) -> bool:
    """A write may complete the start of the attempt that it ends, and begins at most one more. An edit, which no law
    binds, may have left anything in an earlier start."""
    written = [start for start in after.starts if start not in before.starts]
    return len(after.starts) <= MOST_STARTS and all(
        min(start.seconds.values(), default=0) >= 0
        and start.total_seconds in (None, sum(start.seconds.values()))
        and start.attempt in (before.attempt, after.attempt)
        for start in written
    )


LAWS: dict[str, Law] = {
    "the phases of a start add up, and none is negative": _starts_add_up,
    "exactly one of Ready, Reconciling and Stalled": _one_picture,
    "attempts are raised one by one": lambda before, after: after.attempt - before.attempt in (0, 1),
    "every attempt has a reason": _every_attempt_has_a_reason,
    "a restart is charged once, and nothing else is": lambda before, after: (
        total(after.restarts.by_class) - total(before.restarts.by_class) == is_restart(before, after)
    ),
    "no class loses a restart": lambda before, after: all(
        count <= after.restarts.by_class.get(kind, 0) for kind, count in before.restarts.by_class.items()
    ),
    "a failure is of the attempt that it ended": lambda before, after: (
        not is_restart(before, after)
        or (after.last_failure is not None and after.last_failure.attempt == before.attempt)
    ),
    "the first failure stays": _the_first_failure_stays,
    "a step is not taken back within an attempt": _steps_are_not_taken_back,
    "a checkpoint is never taken back": _checkpoints_are_not_taken_back,
    "the sums of goodput only grow": _sums_only_grow,
    "the sums of chip-seconds only grow": _chips_are_not_taken_back,
    "unsaved is a part of productive": _the_unsaved_part_is_a_part,
    "the start stays": lambda before, after: before.start_time in (None, after.start_time),
    "a finished job stays as it is": _the_end_is_the_end,
    "the accounts are closed when the job ends": _accounts_are_closed_at_the_end,
    "a gang that has ended is not ready": _the_gang_of_an_unfinished_attempt_only_is_ready,
}


# Laws about what an earlier status knew. Somebody who edits it may have removed that.
OF_WHOLE_STATUSES = {
    "exactly one of Ready, Reconciling and Stalled",
    "attempts are raised one by one",
    "every attempt has a reason",
    "a restart is charged once, and nothing else is",
    "the accounts are closed when the job ends",
    "a finished job stays as it is",
    "the sums of goodput add up to the life of the job",
}


def broken_laws(before: Status, after: Status, created: datetime) -> list[str]:
    if before == after:
        return []
    found = [name for name, holds in LAWS.items() if not holds(before, after)]
    goodput = after.goodput
    if goodput is not None and life(goodput) != (parse_time(goodput.since) - created).total_seconds():
        found.append("the sums of goodput add up to the life of the job")
    return found


class Ledger:
    """Counts the restarts independently of the operator, and says when a budget is exceeded.

    Within the window and since the last refill, no class may have more restarts than its limit. A restart that no
    longer counts never counts again, even if the clock is set back.
    """

    def __init__(self, limits: Mapping[str, int], window: timedelta) -> None:
        self._limits = limits
        self._window = window
        self._latest: datetime | None = None
        self._restarts: dict[str, list[datetime]] = {}

    def follow(self, before: Status, after: Status, now: datetime) -> list[str]:
        """The classes whose limit the write exceeds."""
        self._latest = max(now, self._latest or now)
        if checkpoint(after.progress) > checkpoint(before.progress):
            self._restarts = {}
        for kind, count in after.restarts.by_class.items():
            new = count - before.restarts.by_class.get(kind, 0)
            self._restarts.setdefault(kind, []).extend([now] * new)
        oldest = self._latest - self._window
        counting = {kind: sum(time > oldest for time in times) for kind, times in self._restarts.items()}
        return [kind for kind, count in counting.items() if -1 != self._limits[kind] < count]
