"""Whether and when a gang may start again after a failure.

Every class has a budget of its own: preemptions do not use up what is meant for crashes. A restart counts for
`restart.window`, or until the training has got on since: a checkpoint that goes beyond all before fills the budgets up.
"""

import hashlib
from dataclasses import replace
from datetime import datetime, timedelta

from tpu_training_operator.api.run_policy import MOST_COUNTED_RESTARTS, FailureClass, Restart, RunPolicy
from tpu_training_operator.api.status import Restarts
from tpu_training_operator.domain.observed import format_time, parse_time

_UNLIMITED = -1


def may_restart(policy: Restart, restarts: Restarts, failure_class: FailureClass, now: datetime) -> bool:
    limit = policy.limits.of(failure_class)
    return limit == _UNLIMITED or len(_counting(policy, restarts, now).get(failure_class, ())) < limit


def charge(
    policy: Restart, restarts: Restarts, failure_class: FailureClass, now: datetime, wait: timedelta
) -> Restarts:
    """One more restart of the class, after `wait`."""
    counting = _counting(policy, restarts, now)
    # What is without limit is kept for the backoff only.
    times = [*counting.get(failure_class, ()), format_time(now)][-MOST_COUNTED_RESTARTS:]
    by_class = {**restarts.by_class, failure_class: restarts.by_class.get(failure_class, 0) + 1}
    return Restarts(
        by_class=by_class, charged={**counting, failure_class: times}, next_attempt_time=format_time(now + wait)
    )


def refill(restarts: Restarts) -> Restarts:
    """The training has got on: nothing counts any more."""
    return replace(restarts, charged={}) if restarts.charged else restarts


def backoff(policy: Restart, restarts: Restarts, seed: str, now: datetime) -> timedelta:
    """The wait before the next attempt: none at first, then doubled with every restart that counts, up to the limit,
    less a share of up to a half."""
    count = sum(map(len, _counting(policy, restarts, now).values()))
    if count == 0:
        return timedelta(0)
    # The exponent is held down so that a long-lived job computes no astronomical power.
    seconds = min(policy.backoff.initial_seconds * 2 ** min(count - 1, 32), policy.backoff.max_seconds)
    return timedelta(seconds=seconds * (1 - share(seed) / 2))


def pause_after_release(policy: RunPolicy, seed: str) -> timedelta:
    """The wait of a gang that gave back its nodes: 0.5 to 1.5 times `backoff.maxSeconds`, so that gangs which were in
    each other's way do not meet again."""
    return timedelta(seconds=policy.restart.backoff.max_seconds * (0.5 + share(seed)))


def longest_wait(policy: RunPolicy) -> timedelta:
    """No wait above is longer."""
    return timedelta(seconds=1.5 * policy.restart.backoff.max_seconds + 1)


def share(seed: str) -> float:
    """In [0, 1); computed and not drawn, so that every operator that decides this decides the same."""
    return int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8]) / 2**64


def _counting(policy: Restart, restarts: Restarts, now: datetime) -> dict[str, list[str]]:
    """The times of the restarts that still count, by class."""
    oldest = now - policy.window_length
    recent = {kind: [time for time in times if parse_time(time) > oldest] for kind, times in restarts.charged.items()}
    return {kind: times for kind, times in recent.items() if times}
