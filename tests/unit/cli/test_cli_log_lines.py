"""A log whose stream breaks off anywhere is printed whole: every line once, in order."""

from hypothesis import given
from hypothesis import strategies as st

from tpu_training_operator.cli.watch import log_reader
from tpu_training_operator.cli.watch.log_reader import LogLines

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


def fed(lines: LogLines, *texts: bytes) -> list[bytes]:
    return lines.feed(b"".join(b"2026-01-15T12:00:" + text + b"\n" for text in texts))


@given(LOGS, st.booleans(), st.data())
def test_a_log_that_breaks_off_anywhere_is_read_exactly_once(
    written: list[tuple[int, bytes]], show_times: bool, data: st.DataObject
) -> None:
    log = log_of(written)
    lines = LogLines(show_times=show_times)
    read: list[bytes] = []
    for is_last in [*[False] * data.draw(st.integers(0, 4)), True]:
        lines.reopened()
        stream = sent(log, lines.since)
        end = len(stream) if is_last else data.draw(st.integers(0, len(stream)))
        cuts = sorted(data.draw(st.lists(st.integers(0, end), max_size=4)))
        for begin, cut in zip([0, *cuts], [*cuts, end], strict=True):
            read += lines.feed(stream[begin:cut])
    assert lines.end() == []
    assert read == [time + b" " + text if show_times else text for time, text in log]


def test_a_long_line_comes_in_parts_and_each_part_once() -> None:
    lines = LogLines()
    text = b"2026-01-15T12:00:00.5Z " + b"x" * (2 * log_reader._LONGEST_LINE)
    first = lines.feed(text)
    lines.reopened()
    second = lines.feed(text) + lines.feed(b"y\n")
    assert [len(part) for part in first] == [log_reader._LONGEST_LINE - 23, log_reader._LONGEST_LINE]
    assert second == [b"x" * 23 + b"y"]


def test_lines_of_the_same_time_are_told_apart_by_their_number() -> None:
    lines = LogLines()
    assert fed(lines, b"00.5Z first", b"00.5Z second") == [b"first", b"second"]
    lines.reopened()
    assert fed(lines, b"00.5Z first", b"00.5Z second", b"00.5Z third") == [b"third"]


def test_fractions_of_any_length_are_in_order() -> None:
    lines = LogLines()
    assert fed(lines, b"00.5Z first", b"00.52+00:00 second") == [b"first", b"second"]
    lines.reopened()
    assert lines.since == "2026-01-15T12:00:00.52+00:00"
    assert fed(lines, b"00.5Z first", b"00.52+00:00 second", b"00.6Z third") == [b"third"]


def test_the_kubelets_own_words_have_no_time_and_are_printed() -> None:
    lines = LogLines(show_times=True)
    words = b'failed to open log file "/var/log/pods/x/trainer/0.log": no such file or directory'
    assert lines.feed(words + b"\nunavailable\n") == [words, b"unavailable"]
    assert lines.since is None


def test_a_last_line_without_a_newline_is_a_line() -> None:
    lines = LogLines()
    assert lines.feed(b"2026-01-15T12:00:00.1Z half of it") == []
    assert lines.end() == [b"half of it"]


def test_a_line_that_was_rotated_away_is_not_waited_for() -> None:
    lines = LogLines()
    lines.feed(b"2026-01-15T12:00:00.1Z half of it")
    lines.reopened()
    assert fed(lines, b"07.1Z after the rotation") == [b"after the rotation"]
