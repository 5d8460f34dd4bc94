"""The API server's clock, learned from its answers.

The operator compares the present with times that the control plane wrote: when a pod was created, when it got its node,
when its grace period ends. This machine's clock may be minutes off; the Date header of every answer shows the server's.
"""

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import lru_cache

log = logging.getLogger(__name__)

_SECOND = timedelta(seconds=1)
_WORTH_TELLING = timedelta(seconds=10)


def local_time() -> datetime:
    return datetime.now(UTC)


class ServerClock:
    """Shows local time until an answer contradicts it. `local` is this machine's clock."""

    def __init__(self, local: Callable[[], datetime] = local_time) -> None:
        self.local = local
        self._offset = timedelta(0)

    def now(self) -> datetime:
        return self.local() + self._offset

    def heard(self, date: str | None, asked: datetime, answered: datetime) -> None:
        """Learn from the Date header of an answer; `asked` and `answered` are local times.

        The server wrote the header between the two, in whole seconds, so it bounds the offset from both sides. The
        clock moves into these bounds and no further, so that it does not jump back and forth with every answer.
        """
        try:
            shown = _read(date or "")
        except ValueError:
            return
        least, most = shown - answered - _SECOND, shown + _SECOND - asked + _SECOND
        offset = min(max(self._offset, least), most)
        if abs(offset - self._offset) >= _WORTH_TELLING:
            seconds = offset.total_seconds()
            log.warning("this machine's clock is %+.0f s off the API server's, which counts", -seconds)
        self._offset = offset


# Hundreds of answers a second have the same date, and reading one takes longer than the rest of what is done with it.
@lru_cache(maxsize=1)
def _read(date: str) -> datetime:
    return parsedate_to_datetime(date).replace(tzinfo=UTC)
