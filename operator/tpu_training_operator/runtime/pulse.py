"""When a pass last had an answer from the API server: what tells a slow pass from one that is stuck.

The controller takes the pulse of each of its passes, the cluster adapter beats for whichever pass a request belongs
to. A context variable carries it there: tasks that a pass starts inherit it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Pulse:
    """`at`: the last sign of life, by the monotonic clock."""

    def __init__(self) -> None:
        self.at = time.monotonic()


_current: ContextVar[Pulse | None] = ContextVar("pulse", default=None)


@contextmanager
def taken() -> Iterator[Pulse]:
    """The pulse of what runs in this context from now on."""
    pulse = Pulse()
    token = _current.set(pulse)
    try:
        yield pulse
    finally:
        _current.reset(token)


def beat() -> None:
    """A request has been answered, or has run into its timeout: whoever made it goes on."""
    if pulse := _current.get():
        pulse.at = time.monotonic()
