"""How a worker learns that it should stop: by SIGTERM (from the kubelet) or SIGINT (from a terminal).

The signal only sets a flag, which travels to the other replicas with the gradients (`exchange`), so that all stop after
the same step. With a process per device only the parent gets the signal; it informs the children through a file.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

_NUMBERS = (signal.SIGTERM, signal.SIGINT)

StopFlag = Callable[[], bool]
"""Returns whether this host was asked to stop; called in every step."""


class StopSignal:
    """The stop flag of this process. Install it from the main thread, before anything slow."""

    def __init__(self) -> None:
        self._requested = False
        self._arrived = False
        self._arrivals: int | None = None
        self._file: Path | None = None

    def __call__(self) -> bool:
        return self._requested

    def install(self) -> None:
        for number in _NUMBERS:
            signal.signal(number, self._on_signal)
        if self._arrivals is None:
            self._arrivals, end = os.pipe()
            os.set_blocking(self._arrivals, False)
            os.set_blocking(end, False)
            signal.set_wakeup_fd(end, warn_on_full_buffer=False)

    def arrived(self) -> bool:
        """Returns whether a signal has arrived, even if the main thread hangs and cannot run the handler. Only one
        other thread may call it."""
        if self._arrivals is not None:
            with suppress(BlockingIOError):
                self._arrived |= any(number in _NUMBERS for number in os.read(self._arrivals, 512))
        return self._arrived or self._requested

    def share(self, file: Path) -> None:
        """Creates `file` on the signal, or at once if it has already arrived."""
        self._file = file
        if self._requested:
            file.touch()

    def unshare(self) -> None:
        """Stops sharing, because the file's directory is about to be removed."""
        self._file = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._requested = True
        if self._file is not None:
            self._file.touch()


class SharedStop:
    """The parent's stop flag as a child sees it: whether the file exists."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self) -> bool:
        return self._file.exists()

    def arrived(self) -> bool:
        return self()
