"""A log that breaks off anywhere is passed on whole: no byte lost, none twice, and never held."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_training_operator.cli.log_position import LogPosition

# Times to the nanosecond, several lines in one second, and now and then two at the very same time.
_STEPS = st.sampled_from([0, 1, 10**8, 10**9, 5 * 10**9])
_TEXTS = st.binary(max_size=40).map(lambda text: text.replace(b"\n", b" "))
LOGS = st.lists(st.tuples(_STEPS, _TEXTS), max_size=12)


def log_of(lines: list[tuple[int, bytes]]) -> list[tuple[bytes, bytes]]:
    """Each line's time, as a kubelet writes it, and its text."""
    now, log = 0, []
    for step, text in lines:
        now += step
        seconds, nanoseconds = divmod(now, 10**9)
        log.append((b"2026-01-15T12:%02d:%02d.%09dZ" % (seconds // 60, seconds % 60, nanoseconds), text))
    return log


def sent(log: list[tuple[bytes, bytes]], since: str | None) -> bytes:
    lines = (time + b" " + text + b"\n" for time, text in log if since is None or time[:19] >= since[:19].encode())
    return b"".join(lines)


@given(LOGS, st.booleans(), st.data())
def test_a_log_that_breaks_off_anywhere_is_passed_on_exactly_once(
    lines: list[tuple[int, bytes]], show_times: bool, data: st.DataObject
) -> None:
    log = log_of(lines)
    position = LogPosition(show_times=show_times)
    passed_on = b""
    for is_last in [*[False] * data.draw(st.integers(0, 4)), True]:
        position.broken_off()
        stream = sent(log, position.since)
        end = len(stream) if is_last else data.draw(st.integers(0, len(stream)))
        cuts = sorted(data.draw(st.lists(st.integers(0, end), max_size=4)))
        for begin, cut in zip([0, *cuts], [*cuts, end], strict=True):
            passed_on += position.feed(stream[begin:cut])
    times = [time + b" " if show_times else b"" for time, _ in log]
    assert passed_on == b"".join(time + text + b"\n" for time, (_, text) in zip(times, log, strict=True))


def test_of_lines_with_the_same_time_only_the_one_that_broke_off_is_taken_up_within() -> None:
    position = LogPosition(show_times=False)
    lines = b"".join(b"2026-01-15T12:00:00.5Z %s\n" % text for text in (b"first", b"second", b"third"))
    passed_on = position.feed(lines[: lines.index(b"cond")])
    position.broken_off()
    assert passed_on + position.feed(lines) == b"first\nsecond\nthird\n"


def test_fractions_of_any_length_are_in_order() -> None:
    position = LogPosition(show_times=False)
    assert position.feed(b"2026-01-15T12:00:00.5Z first\n2026-01-15T12:00:00.52+00:00 second\n") == b"first\nsecond\n"
    position.broken_off()
    assert position.since == "2026-01-15T12:00:00.52+00:00"
    again = b"2026-01-15T12:00:00.5Z first\n2026-01-15T12:00:00.52+00:00 second\n2026-01-15T12:00:00.6Z third\n"
    assert position.feed(again) == b"third\n"


def test_the_kubelets_own_words_have_no_time_and_are_passed_on() -> None:
    position = LogPosition(show_times=True)
    words = b'failed to open log file "/var/log/pods/x/trainer/0.log": no such file or directory\n'
    assert position.feed(words) == words
    assert position.feed(b"unavailable\n") == b"unavailable\n"
    assert position.since is None


def test_a_line_whose_end_was_rotated_away_is_ended() -> None:
    position = LogPosition(show_times=False)
    assert position.feed(b"2026-01-15T12:00:00.1Z half of it") == b"half of it"
    position.broken_off()
    assert position.feed(b"2026-01-15T12:00:07.1Z after the rotation\n") == b"\nafter the rotation\n"


@pytest.mark.parametrize("piece", [b"x" * 65536, b"2026-01-15T12:00:00.123456789Z x\n" * 2000], ids=["line", "lines"])
def test_nothing_is_held_of_what_was_passed_on(piece: bytes) -> None:
    position = LogPosition(show_times=True)
    position.feed(b"2026-01-15T12:00:00.123456789Z ")
    assert len(position.feed(piece)) >= len(piece) - 64
