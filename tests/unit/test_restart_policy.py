"""How often, and how soon, a gang may start again."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.jobs import job
from tpu_training_operator.api.run_policy import FailureClass, RunPolicy
from tpu_training_operator.api.status import Restarts
from tpu_training_operator.domain.restart_policy import backoff, may_restart


def policy(**limits: int) -> RunPolicy:
    return job({"spec.runPolicy": {"restart": {"limits": limits}}}).spec.run_policy


def after(**by_class: int) -> Restarts:
    return Restarts(by_class=by_class)


@pytest.mark.parametrize(
    ("failure_class", "so_far", "allowed"),
    [
        ("UserError", 0, False),
        ("Infrastructure", 19, True),
        ("Infrastructure", 20, False),
        ("Preemption", 10_000, True),
        ("OutOfMemory", 0, True),
        ("OutOfMemory", 1, False),
        ("Hang", 2, True),
        ("Hang", 3, False),
        ("Unknown", 2, True),
        ("Unknown", 3, False),
    ],
)
def test_the_budgets_that_hold_when_none_are_given(failure_class: str, so_far: int, allowed: bool) -> None:
    assert may_restart(policy(), after(**{failure_class: so_far}), FailureClass(failure_class)) is allowed


@given(
    failure_class=st.sampled_from(FailureClass),
    limit=st.integers(0, 50),
    so_far=st.dictionaries(st.sampled_from([str(kind) for kind in FailureClass]), st.integers(0, 60)),
)
def test_a_class_has_a_budget_of_its_own(failure_class: FailureClass, limit: int, so_far: dict[str, int]) -> None:
    allowed = may_restart(policy(**{failure_class: limit}), after(**so_far), failure_class)
    assert allowed is (so_far.get(failure_class, 0) < limit)


@pytest.mark.parametrize("so_far", [0, 1, 10**6])
def test_minus_one_is_without_limit(so_far: int) -> None:
    assert may_restart(policy(UserError=-1), after(UserError=so_far), FailureClass.USER_ERROR)


@pytest.mark.parametrize(
    ("restarts", "seconds"), [(0, 5), (1, 10), (2, 20), (5, 160), (6, 300), (7, 300), (10**9, 300)]
)
def test_the_wait_doubles_with_every_restart_up_to_its_limit(restarts: int, seconds: int) -> None:
    assert backoff(RunPolicy(), after(Preemption=restarts)) == timedelta(seconds=seconds)


def test_restarts_of_every_class_lengthen_the_wait() -> None:
    assert backoff(RunPolicy(), after(Preemption=1, Unknown=1)) == timedelta(seconds=20)


def test_a_first_wait_above_the_limit_is_the_limit() -> None:
    short = job({"spec.runPolicy": {"restart": {"backoff": {"initialSeconds": 60, "maxSeconds": 10}}}})
    assert backoff(short.spec.run_policy, Restarts()) == timedelta(seconds=10)
