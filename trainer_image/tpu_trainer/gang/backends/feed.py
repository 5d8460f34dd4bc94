"""Batches on their way to the device: in turn, or prepared ahead while the device works.

On XLA the loop only traces, and reading, collating and sending the next batch would delay that, so a thread does it.
Not torch_xla's MpDeviceLoader: it loses what a dataset raises in its reading thread, and its next() syncs on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Full, Queue
from threading import Event, Thread
from typing import Any

AHEAD = 4
"""Batches held on the device in addition to the one in use."""

_POLL_SECONDS = 0.1
_LEAVE_SECONDS = 10.0


@contextmanager
def feed_ahead(
    batches: Iterator[tuple[Any, Any]], place: Callable[[Any], Any], run_dry: Callable[[], object] = lambda: None
) -> Iterator[Iterator[tuple[Any, Any]]]:
    """Yields the batches in order, moved by `place`, each with its companion, which stays on the host; an error of
    `batches` is raised where its batch was due. Calls `run_dry` where the next one is not ready, before the wait for
    it.

    Leaving the context ends the thread and waits for it, because a thread that uses the device while the interpreter
    exits crashes. The wait is bounded, because a dataset may hang on its storage.
    """
    ready: Queue[tuple[Any, Exception | None]] = Queue(AHEAD)
    closed = Event()

    def put(item: tuple[Any, Exception | None]) -> None:
        while not closed.is_set():
            with suppress(Full):
                ready.put(item, timeout=_POLL_SECONDS)
                return

    def work() -> None:
        error: Exception = StopIteration()
        try:
            for batch, companion in batches:
                put(((place(batch), companion), None))
                if closed.is_set():
                    return
        except Exception as raised:
            error = raised
        put((None, error))

    def take() -> Iterator[Any]:
        while True:
            if ready.empty():
                run_dry()
            batch, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield batch

    thread = Thread(target=work, name="feed", daemon=True)
    thread.start()
    try:
        yield take()
    finally:
        closed.set()
        thread.join(_LEAVE_SECONDS)


@contextmanager
def feed_in_turn(
    batches: Iterator[tuple[Any, Any]], place: Callable[[Any], Any]
) -> Iterator[Iterator[tuple[Any, Any]]]:
    """Does the same without a thread, so that random numbers are drawn in a fixed order."""
    yield ((place(batch), companion) for batch, companion in batches)
