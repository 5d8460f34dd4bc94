"""Whether and when a gang may start again after a failure.

Every failure class has its own limit, so preemptions do not use up the restarts meant for crashes. A restart counts
for `restart.window`, or until training makes progress: with a new checkpoint, all restarts are left again.
"""

import hashlib
from dataclasses import dataclass
from datetime import datetime, timedelta

from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.run_policy import MOST_COUNTED_RESTARTS, FailureClass, Restart, RunPolicy
from tpu_training_operator.api.status import Restarts
from tpu_training_operator.domain.cluster_state.observed import format_time, parse_time

# The scheduler may put off a pod that it has tried before for this long. If the preempted gang came back earlier, it
# could be placed before the gang that preempted it, and would be preempted a second time.
PAUSE_AFTER_PREEMPTION = timedelta(seconds=10)


@dataclass(frozen=True)
class ClassRestarts:
    """Restarts after failures of one class: `total` over the job's life, and those `counting` against the `limit`,
    which is None if there is none."""

    failure_class: FailureClass
    total: int
    counting: int
    limit: int | None

    @property
    def left(self) -> int | None:
        return None if self.limit is None else max(0, self.limit - self.counting)


def restarts_of(policy: Restart, restarts: Restarts, failure_class: FailureClass, now: datetime) -> ClassRestarts:
    counting = len(_find_counting(policy, restarts, now).get(failure_class, ()))
    return ClassRestarts(
        failure_class, restarts.by_class.get(failure_class, 0), counting, policy.limit_of(failure_class)
    )


def may_restart(policy: Restart, restarts: Restarts, failure_class: FailureClass, now: datetime) -> bool:
    return restarts_of(policy, restarts, failure_class, now).left != 0


def count_restart(
    policy: Restart, restarts: Restarts, failure_class: FailureClass, now: datetime, wait: timedelta
) -> Restarts:
    """Counts one more restart of the class, whose attempt starts after `wait`."""
    counting = _find_counting(policy, restarts, now)
    # Restarts of an unlimited class are kept for the backoff only.
    times = [*counting.get(failure_class, ()), format_time(now)][-MOST_COUNTED_RESTARTS:]
    by_class = {**restarts.by_class, failure_class: restarts.by_class.get(failure_class, 0) + 1}
    return Restarts(
        by_class=by_class, charged={**counting, failure_class: times}, next_attempt_time=format_time(now + wait)
    )


def refill(restarts: Restarts) -> Restarts:
    """Forgets all restarts that count, because the job has made progress."""
    return replace(restarts, charged={}) if restarts.charged else restarts


def backoff(policy: Restart, restarts: Restarts, seed: str, now: datetime) -> timedelta:
    """Returns the wait before the next attempt: none at first, then `initialSeconds`, doubled for every restart that
    counts, up to `maxSeconds`, less up to 50 % jitter."""
    count = sum(map(len, _find_counting(policy, restarts, now).values()))
    if count == 0:
        return timedelta(0)
    # Bounded, so that a long-lived job does not compute an astronomical power.
    exponent = min(count - 1, 32)
    seconds = min(policy.backoff.initial_seconds * 2**exponent, policy.backoff.max_seconds)
    return timedelta(seconds=seconds * (1 - _jitter(seed) / 2))


def pause_after_release(policy: RunPolicy, seed: str) -> timedelta:
    """Returns how long a gang waits after releasing its nodes: 0.5 to 1.5 times `backoff.maxSeconds`, so that gangs
    which blocked each other do not meet again."""
    return timedelta(seconds=policy.restart.backoff.max_seconds * (0.5 + _jitter(seed)))


def longest_wait(policy: RunPolicy) -> timedelta:
    return max(PAUSE_AFTER_PREEMPTION, timedelta(seconds=1.5 * policy.restart.backoff.max_seconds + 1))


def _jitter(seed: str) -> float:
    """Returns a number in [0, 1). It is a hash rather than a random number, so that every operator decides the same."""
    return int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8]) / 2**64


def _find_counting(policy: Restart, restarts: Restarts, now: datetime) -> dict[str, list[str]]:
    """Returns the times of the restarts that still count, by class."""
    oldest = now - policy.window
    recent = {kind: [time for time in times if parse_time(time) > oldest] for kind, times in restarts.charged.items()}
    return {kind: times for kind, times in recent.items() if times}
