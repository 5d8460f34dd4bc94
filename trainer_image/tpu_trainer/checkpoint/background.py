"""Writes snapshots in a thread of its own while training goes on: one at a time, failures told and not raised.

What the other thread has to say it leaves in a `Result`, which is read after it has ended: nothing is shared while it
runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tpu_trainer.checkpoint.snapshot import Snapshot
from tpu_trainer.errors import StorageError


@dataclass(frozen=True)
class Result:
    """How one write ended. failure: None once it is committed; complaint: what else went wrong, such as a deletion."""

    step: int
    seconds: float
    size: int
    failure: str | None = None
    complaint: str | None = None


class Background:
    """`write` commits a snapshot and returns its bytes; `after` follows it, with the step."""

    def __init__(self, write: Callable[[Snapshot], int], after: Callable[[int], None]) -> None:
        self._write, self._after = write, after
        self._thread: threading.Thread | None = None
        self._results: list[Result] = []

    def start(self, snapshot: Snapshot) -> None:
        """Begins to write; the one before must have been waited for."""
        assert self._thread is None, "one write at a time"
        # A daemon: storage that never answers must not keep the process from ending once it has been told to.
        self._thread = threading.Thread(target=self._run, args=(snapshot,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> Result | None:
        """The result of the write that was under way, once it has ended; None where none was."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        return self._results.pop()

    def poll(self) -> Result | None:
        """The result of a write that has ended since; None while it goes on."""
        return self.wait() if self._thread is not None and not self._thread.is_alive() else None

    def _run(self, snapshot: Snapshot) -> None:
        begun = time.monotonic()
        size, failure, complaint = 0, None, None
        try:
            size = self._write(snapshot)
        except Exception as error:
            failure = _in_a_line(error)
        seconds = time.monotonic() - begun
        if failure is None:
            try:
                self._after(snapshot.step)
            except Exception as error:
                complaint = _in_a_line(error)
        self._results.append(Result(snapshot.step, seconds, size, failure, complaint))


def _in_a_line(error: Exception) -> str:
    if isinstance(error, StorageError):
        return str(error)
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
