"""How often, and how soon, a gang may start again."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.jobs import job, restart_limits
from tests.unit.pods import NOON
from tpu_training_operator.api.run_policy import MOST_COUNTED_RESTARTS, FailureClass, Restart
from tpu_training_operator.api.status import Restarts
from tpu_training_operator.domain.cluster_state.observed import format_time
from tpu_training_operator.domain.plan.common.restart_limits import backoff, count_restart, may_restart, refill


def policy(seconds: int = 86400, **limits: int) -> Restart:
    return job(
        {"spec.runPolicy": {"restart": {"limits": restart_limits(limits), "windowSeconds": seconds}}}
    ).spec.run_policy.restart


def after(**counting: int) -> Restarts:
    """This many restarts of each class, a minute ago."""
    time = format_time(NOON - timedelta(minutes=1))
    return Restarts(by_class=counting, charged={kind: [time] * count for kind, count in counting.items()})


@pytest.mark.parametrize(
    ("failure_class", "so_far", "allowed"),
    [
        ("UserError", 0, False),
        ("Infrastructure", 19, True),
        ("Infrastructure", 20, False),
        ("Preemption", 100, True),
        ("OutOfMemory", 0, True),
        ("OutOfMemory", 1, False),
        ("Hang", 2, True),
        ("Hang", 3, False),
        ("Unknown", 2, True),
        ("Unknown", 3, False),
    ],
)
def test_the_default_limits(failure_class: str, so_far: int, allowed: bool) -> None:
    assert may_restart(policy(), after(**{failure_class: so_far}), FailureClass(failure_class), NOON) is allowed


@given(
    failure_class=st.sampled_from(FailureClass),
    limit=st.integers(0, 50),
    so_far=st.dictionaries(st.sampled_from([str(kind) for kind in FailureClass]), st.integers(0, 60)),
)
def test_a_class_has_a_limit_of_its_own(failure_class: FailureClass, limit: int, so_far: dict[str, int]) -> None:
    allowed = may_restart(policy(**{failure_class: limit}), after(**so_far), failure_class, NOON)
    assert allowed is (so_far.get(failure_class, 0) < limit)


@pytest.mark.parametrize("so_far", [0, 1, 100])
def test_minus_one_is_unlimited(so_far: int) -> None:
    assert may_restart(policy(UserError=-1), after(UserError=so_far), FailureClass.USER_ERROR, NOON)


@given(
    window=st.integers(1, 1000),
    limit=st.integers(1, MOST_COUNTED_RESTARTS),
    gaps=st.lists(st.integers(0, 300), max_size=150),
)
def test_no_window_has_more_restarts_in_it_than_the_limit(window: int, limit: int, gaps: list[int]) -> None:
    rules, restarts, now, granted = policy(window, Unknown=limit), Restarts(), NOON, []
    for gap in gaps:
        now += timedelta(seconds=gap)
        inside = sum(time > now - timedelta(seconds=window) for time in granted)
        allowed = may_restart(rules, restarts, FailureClass.UNKNOWN, now)
        assert allowed is (inside < limit)
        if allowed:
            granted.append(now)
            restarts = count_restart(rules, restarts, FailureClass.UNKNOWN, now, timedelta(0))
    assert restarts.by_class.get("Unknown", 0) == len(granted)


def test_after_progress_all_restarts_are_left_and_the_next_restart_does_not_wait() -> None:
    spent = after(Infrastructure=20, Unknown=3)
    full = refill(spent)
    assert may_restart(policy(), full, FailureClass.INFRASTRUCTURE, NOON)
    assert backoff(policy(), full, "seed", NOON) == timedelta(0)
    assert full.by_class == {"Infrastructure": 20, "Unknown": 3}, "what the job has cost is not forgotten"


@pytest.mark.parametrize(("restarts", "seconds"), [(1, 5), (2, 10), (3, 20), (6, 160), (7, 300), (8, 300), (100, 300)])
def test_the_wait_doubles_with_every_restart_up_to_its_limit(restarts: int, seconds: int) -> None:
    waits = [backoff(policy(), after(Preemption=restarts), str(seed), NOON).total_seconds() for seed in range(200)]
    assert seconds / 2 < min(waits) <= max(waits) <= seconds
    assert len(set(waits)) > 190, "two jobs that failed together come back together"


def test_restarts_of_every_class_lengthen_the_wait() -> None:
    two = after(Preemption=1, Unknown=1)
    assert backoff(policy(), two, "seed", NOON) == backoff(policy(), after(Unknown=2), "seed", NOON)


def test_a_first_wait_above_the_limit_is_the_limit() -> None:
    short = job({"spec.runPolicy": {"restart": {"backoff": {"initialSeconds": 60, "maxSeconds": 10}}}})
    assert backoff(short.spec.run_policy.restart, after(Hang=1), "seed", NOON) <= timedelta(seconds=10)
