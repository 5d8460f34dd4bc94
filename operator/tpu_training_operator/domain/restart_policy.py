"""Whether and when a gang may start again after a failure. Called by the planner."""

from datetime import timedelta

from tpu_training_operator.api.run_policy import FailureClass, RunPolicy
from tpu_training_operator.api.status import Restarts

_UNLIMITED = -1


def may_restart(policy: RunPolicy, restarts: Restarts, failure_class: FailureClass) -> bool:
    """Every class has a budget of its own: preemptions do not use up what is meant for crashes."""
    limit = policy.restart.limits.of(failure_class)
    return limit == _UNLIMITED or restarts.by_class.get(failure_class, 0) < limit


def backoff(policy: RunPolicy, restarts: Restarts) -> timedelta:
    """The wait before the next attempt: doubled with every restart so far, up to the limit."""
    settings = policy.restart.backoff
    # The exponent is held down so that a long-lived job computes no astronomical power.
    seconds = settings.initial_seconds * 2 ** min(restarts.total, 32)
    return timedelta(seconds=min(seconds, settings.max_seconds))
