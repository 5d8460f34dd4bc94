"""A queue of keys on which one key is never worked on twice at once. Used by `runtime.controller`.

The algorithm of client-go's work queue: any number of hints about a key that waits collapse into one, a hint about
a key in work makes it come once more afterwards, and a key whose work failed waits longer every time.
"""

import asyncio
from collections import deque
from typing import Generic, TypeVar

from tpu_training_operator.runtime.observers import SILENT_WORK, WorkObserver

Key = TypeVar("Key")

_FIRST_RETRY_SECONDS = 0.05
_LONGEST_RETRY_SECONDS = 60.0


class WorkQueue(Generic[Key]):
    """`settle_seconds`: how long a hinted key waits for more hints; a starting gang sends hundreds."""

    def __init__(self, settle_seconds: float, observer: WorkObserver = SILENT_WORK) -> None:
        self._settle_seconds = settle_seconds
        self._observer = observer
        self._ready: deque[Key] = deque()
        self._wanted: set[Key] = set()
        self._in_work: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._available = asyncio.Event()

    def hint(self, key: Key) -> None:
        """Something about the key may have changed."""
        self.add_after(key, self._settle_seconds)

    def add_after(self, key: Key, seconds: float) -> None:
        """Have the key worked on in `seconds`, or sooner if it is due sooner anyway."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        due = loop.time() + seconds
        if timer is not None:
            if timer.when() <= due:
                return
            timer.cancel()
        self._timers[key] = loop.call_at(due, self._add, key)

    def retry(self, key: Key) -> None:
        """The work failed: once more, later each time."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        self._observer.retried()
        self.add_after(key, min(_FIRST_RETRY_SECONDS * 2 ** min(failures, 32), _LONGEST_RETRY_SECONDS))

    def forget(self, key: Key) -> None:
        """The work succeeded: the next failure is the first again."""
        self._failures.pop(key, None)

    async def get(self) -> Key:
        """The next key; it belongs to the caller until `done`."""
        while not self._ready:
            self._available.clear()
            await self._available.wait()
        key = self._ready.popleft()
        self._wanted.discard(key)
        self._in_work.add(key)
        self._observer.taken(key)
        return key

    def done(self, key: Key) -> None:
        self._in_work.discard(key)
        self._observer.done(key)
        if key in self._wanted:
            self._ready.append(key)
            self._available.set()

    def close(self) -> None:
        """Cancel what is due later."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _add(self, key: Key) -> None:
        self._timers.pop(key, None)
        if key in self._wanted:
            return
        self._wanted.add(key)
        self._observer.added(key)
        if key not in self._in_work:
            self._ready.append(key)
            self._available.set()
