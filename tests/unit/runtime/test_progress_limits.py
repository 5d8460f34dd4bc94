"""How often one of many may do something, on a clock that the test holds."""

import pytest

from tests.fakes.clock import Clock
from tpu_training_operator.runtime.progress import server as module
from tpu_training_operator.runtime.progress.server import Limits
from tpu_training_operator.runtime.progress.tokens import ReportRefused


def attempt(limits: Limits[str], key: str) -> float | None:
    """Does it, and returns None; or the seconds to wait."""
    try:
        limits.take(key, "not so fast")
    except ReportRefused as refused:
        return refused.retry_after
    return None


def test_a_burst_goes_through_and_then_one_at_a_time() -> None:
    clock = Clock()
    limits: Limits[str] = Limits(per_second=0.5, burst=3, clock=clock)
    assert [attempt(limits, "a") for _ in range(4)] == [None, None, None, 2.0]
    clock.now = 2.0
    assert [attempt(limits, "a"), attempt(limits, "a")] == [None, 2.0]


def test_giving_back_more_than_was_taken_does_not_enlarge_the_burst() -> None:
    limits: Limits[str] = Limits(per_second=1, burst=1, clock=Clock())
    limits.take("a", "not so fast")
    for _ in range(10):
        limits.give_back("a")
    assert [attempt(limits, "a"), attempt(limits, "a")] == [None, 1.0]


def test_the_key_that_was_quiet_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_KEYS", 2)
    clock = Clock()
    limits: Limits[str] = Limits(per_second=1, burst=2, clock=clock)
    for key in ("a", "b", "a", "c"):
        attempt(limits, key)
    assert len(limits._buckets) == 2
    assert [attempt(limits, "a"), attempt(limits, "b")] == [1.0, None]
