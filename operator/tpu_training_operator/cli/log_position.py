"""Where somebody is in a log that may break off, and how to go on without a gap and without a line twice.

The API server is asked for each line's time. It reads `sinceTime` in whole seconds, so after a break it sends lines
again: those that were passed on are known by their time and, where several have the same, by their number. Pure, with
bounded memory: a line may be of any length. Used by `runtime.log_following`.
"""

from dataclasses import dataclass

# 2026-01-15T12:00:00.123456789+02:00, and something to spare.
_LONGEST_TIME = 48
_NO_TIME = b""


@dataclass
class _Line:
    """The line that is being read. `skip`: how much of its text was passed on before the break."""

    has_time: bool = True
    is_old: bool = False
    skip: int = 0
    seen: int = 0


class LogPosition:
    """`show_times`: whether the times stay in what is passed on."""

    def __init__(self, *, show_times: bool) -> None:
        self._show_times = show_times
        # The newest time, and of the lines of that time how many are through, and how much of one that has begun.
        self._time = _NO_TIME
        self._through = 0
        self._part: int | None = None
        # As they were at the last break.
        self._known: tuple[bytes, int, int | None] = (_NO_TIME, 0, None)
        self._again = 0
        self._head = bytearray()
        self._line: _Line | None = None

    @property
    def since(self) -> str | None:
        """The time to ask for after a break; None when nothing has been read."""
        return self._time.decode() or None

    def broken_off(self) -> None:
        """What comes next begins with a whole line, at `since`."""
        self._known = (self._time, self._through, self._part)
        self._again = 0
        self._head.clear()
        self._line = None

    def feed(self, chunk: bytes) -> bytes:
        """What of the next piece of the log is new."""
        new: list[bytes] = []
        at = 0
        while at < len(chunk):
            line = self._line
            at = self._read_time(chunk, at, new) if line is None else self._read_text(chunk, at, line, new)
        return b"".join(new)

    def _read_time(self, chunk: bytes, at: int, new: list[bytes]) -> int:
        space = chunk.find(b" ", at, at + _LONGEST_TIME)
        newline = chunk.find(b"\n", at, space if space >= 0 else at + _LONGEST_TIME)
        end = newline if newline >= 0 else space
        if end < 0 and len(self._head) + len(chunk) - at < _LONGEST_TIME:
            self._head += chunk[at:]
            return len(chunk)
        head = bytes(self._head) + chunk[at : max(end, at)]
        self._head.clear()
        if end >= 0 and newline < 0 and _is_time(head):
            self._begin(head, new)
            return end + 1
        # The kubelet's own words, such as that a log was rotated away, have no time.
        self._line = _Line(has_time=False)
        new.append(head)
        return max(end, at)

    def _begin(self, time: bytes, new: list[bytes]) -> None:
        known, through, part = self._known
        line, has_begun = _Line(), False
        if known and _order(time) < _order(known):
            line.is_old = True
        elif known and time == known:
            line.is_old = self._again < through
            if self._again == through and part is not None:
                line.skip, has_begun = part, True
            self._again += 1
        if time != self._time and not line.is_old:
            if self._part is not None:
                # The rest of the line that broke off is no longer in the log.
                new.append(b"\n")
            self._time, self._through = time, 0
        if not line.is_old and not has_begun:
            self._part = 0
            if self._show_times:
                new.append(time + b" ")
        self._line = line

    def _read_text(self, chunk: bytes, at: int, line: _Line, new: list[bytes]) -> int:
        newline = chunk.find(b"\n", at)
        end = len(chunk) if newline < 0 else newline
        if not line.is_old:
            text = chunk[at:end]
            unseen = max(0, line.skip - line.seen)
            new.append(text[unseen:] if unseen else text)
            line.seen += len(text)
            if line.has_time:
                self._part = max(self._part or 0, line.seen)
        if newline < 0:
            return end
        if not line.is_old:
            new.append(b"\n")
            if line.has_time:
                self._through += 1
                self._part = None
        self._line = None
        return end + 1


def _is_time(text: bytes) -> bool:
    return len(text) >= 20 and text[4:5] == b"-" and text[10:11] == b"T" and text[:4].isdigit()


def _order(time: bytes) -> tuple[bytes, bytes]:
    """Without what comes after the fraction, which may have any number of digits."""
    fraction = time[20:]
    digits = fraction[: len(fraction) - len(fraction.lstrip(b"0123456789"))]
    return time[:19], digits
