"""The API server's clock, learned from its answers. Kept by `runtime.kubernetes_cluster`, read by whatever decides.

The domain compares the present with what the control plane wrote: when a pod was created, got its node, will have
stopped. This machine's clock may be minutes off; the Date header of every answer says what the API server's shows.
"""

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

log = logging.getLogger(__name__)

_SECOND = timedelta(seconds=1)
_WORTH_TELLING = timedelta(seconds=10)


def local_time() -> datetime:
    return datetime.now(UTC)


class ServerClock:
    """Shows local time until an answer contradicts it. `local`: this machine's clock."""

    def __init__(self, local: Callable[[], datetime] = local_time) -> None:
        self.local = local
        self._offset = timedelta(0)

    def now(self) -> datetime:
        return self.local() + self._offset

    def heard(self, date: str | None, asked: datetime, answered: datetime) -> None:
        """An answer with this Date header, by local time asked for and received then.

        The header is written in between, in whole seconds, so it leaves room. The clock is moved into it and no
        further: it does not go to and fro with every answer.
        """
        try:
            shown = parsedate_to_datetime(date or "").replace(tzinfo=UTC)
        except ValueError:
            return
        least, most = shown - answered - _SECOND, shown + _SECOND - asked + _SECOND
        offset = min(max(self._offset, least), most)
        if abs(offset - self._offset) >= _WORTH_TELLING:
            seconds = offset.total_seconds()
            log.warning("this machine's clock is %+.0f s off the API server's, which counts", -seconds)
        self._offset = offset
