"""The API server's clock, as its answers show it."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_training_operator.kube.client import ServerClock

NOON = datetime(2026, 1, 15, 12, tzinfo=UTC)


class Machines:
    """One with this clock, and an API server whose clock is ahead by so many seconds."""

    def __init__(self, ahead: float) -> None:
        self.local, self.ahead = NOON, timedelta(seconds=ahead)
        self.clock = ServerClock(lambda: self.local)

    def ask(self, there: float = 0.01, back: float = 0.01) -> None:
        asked = self.local
        written = asked + timedelta(seconds=there) + self.ahead
        self.local = asked + timedelta(seconds=there + back)
        self.clock.learn(format_datetime(written, usegmt=True), asked, self.local)

    @property
    def error(self) -> float:
        return abs((self.clock.now() - self.local - self.ahead).total_seconds())


@pytest.mark.parametrize("ahead", [-600, -61, 61, 600])
def test_a_clock_that_is_minutes_off_is_corrected_by_the_first_answer(ahead: float) -> None:
    machines = Machines(ahead)
    machines.ask()
    assert machines.error <= 2.1


@given(answers=st.lists(st.tuples(st.floats(0, 30), st.floats(0, 30)), max_size=20), error=st.floats(-0.5, 0.5))
def test_a_good_clock_is_never_moved(answers: list[tuple[float, float]], error: float) -> None:
    machines = Machines(error)
    for there, back in answers:
        machines.ask(there, back)
        assert machines.clock.now() == machines.local


@given(answers=st.lists(st.tuples(st.floats(0, 30), st.floats(0, 30)), max_size=20), ahead=st.floats(-500, 500))
def test_slow_answers_do_no_harm(answers: list[tuple[float, float]], ahead: float) -> None:
    machines = Machines(ahead)
    machines.ask()
    for there, back in answers:
        machines.ask(there, back)
        assert machines.error <= 2.1


def test_a_clock_that_is_corrected_later_is_followed() -> None:
    machines = Machines(300)
    machines.ask()
    machines.ahead = timedelta(0)
    machines.ask()
    assert machines.error <= 2.1


@pytest.mark.parametrize("date", [None, "", "yesterday", "Thu, 99 Jan 2026 12:00:00 GMT"])
def test_an_answer_without_a_date_changes_nothing(date: str | None) -> None:
    clock = ServerClock(lambda: NOON)
    clock.learn(date, NOON, NOON)
    assert clock.now() == NOON
