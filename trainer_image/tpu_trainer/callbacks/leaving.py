"""A process that leaves by os._exit while its session is open.

That runs no handler, and with code 0 it looks like a training that is complete: what starts the process hears no more
of it than the code.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


class Leaving:
    """From `listen` to `forget`, os._exit(0) asks `code_of` for the code with which the process really ends."""

    def __init__(self, code_of: Callable[[], int]) -> None:
        self._code_of = code_of
        self._process = os.getpid()
        self._before: Callable[[int], NoReturn] = os._exit
        self._own: Callable[[int], NoReturn] = self._leave

    def listen(self) -> None:
        os._exit = self._own  # type: ignore[assignment]

    def forget(self) -> None:
        if os._exit is self._own:
            os._exit = self._before  # type: ignore[assignment]

    def _leave(self, status: int) -> NoReturn:
        # Forked children, such as a DataLoader's workers, end in this way.
        if os.getpid() == self._process and not status:
            self.forget()
            try:
                status = self._code_of()
                sys.stdout.flush()
            except BaseException:
                # Nothing may keep the process here.
                traceback.print_exc()
                status = 1
        self._before(status)
