"""The token bucket, on a clock that the test holds."""

from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.clock import Clock
from tpu_training_operator.kube.turns import TokenBucket


def test_a_burst_goes_through_at_once_and_the_rest_takes_turns() -> None:
    bucket = TokenBucket(per_second=10, burst=3, clock=Clock())
    assert [bucket.take() for _ in range(6)] == [0, 0, 0, 0.1, 0.2, 0.3]


def test_tokens_come_back_with_time_up_to_the_burst() -> None:
    clock = Clock()
    bucket = TokenBucket(per_second=10, burst=3, clock=clock)
    for _ in range(3):
        bucket.take()
    clock.now = 0.1
    assert [bucket.take(), bucket.take()] == [0, 0.1]
    clock.now = 1000.0
    assert [bucket.take() for _ in range(4)] == [0, 0, 0, 0.1]


def test_asking_when_a_token_is_due_takes_none() -> None:
    clock = Clock()
    bucket = TokenBucket(per_second=10, burst=1, clock=clock)
    assert [bucket.seconds_until_next(), bucket.seconds_until_next(), bucket.take()] == [0, 0, 0]
    assert [bucket.seconds_until_next(), bucket.seconds_until_next()] == [0.1, 0.1]
    clock.now = 0.1
    assert bucket.seconds_until_next() == 0


@given(
    gaps=st.lists(st.floats(0, 2), min_size=1, max_size=60), per_second=st.floats(0.5, 100), burst=st.integers(1, 20)
)
def test_no_stretch_of_time_sees_more_requests_than_burst_and_rate_allow(
    gaps: list[float], per_second: float, burst: int
) -> None:
    clock = Clock()
    bucket = TokenBucket(per_second, burst, clock)
    sent = []
    for gap in gaps:
        clock.now += gap
        sent.append(clock.now + bucket.take())
    for first in range(len(sent)):
        for last in range(first, len(sent)):
            stretch = sent[last] - sent[first]
            assert last - first + 1 <= burst + per_second * stretch + 1e-6
