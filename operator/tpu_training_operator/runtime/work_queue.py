"""A work queue that never hands out a key that is in work.

The algorithm is client-go's: adding a key that waits already changes nothing, a key that is added while it is in work
is handed out again afterwards, and a key whose work failed waits longer every time.

A key may go first: a job whose worker has just failed must not wait for a thousand new ones. Keys that were only listed
wait in the background, so that a resync delays no other key. Groups of keys take turns: a tenant whose thousand jobs
fail again and again must not delay the others. And no group may occupy all workers while its work takes minutes, as
with many large gangs or an admission webhook that does not answer.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from tpu_training_operator.runtime.metrics import Metrics

Key = TypeVar("Key")

_FIRST_RETRY_SECONDS = 0.05
_LONGEST_RETRY_SECONDS = 60.0
# Background keys in work at once: enough to use the request rate, without delaying other keys.
_BACKGROUND_AT_ONCE = 3
# Each kind of key gets one turn in this many, however many keys go before it.
_TURNS = 8


class _KeyLine(Generic[Key]):
    """Keys in order of arrival, where groups take turns. A key may also be removed from the middle."""

    def __init__(self, group_of: Callable[[Key], Hashable]) -> None:
        self._group_of = group_of
        self._groups: dict[Hashable, dict[Key, None]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._groups.get(self._group_of(key), ())

    def add(self, key: Key) -> None:
        self._groups.setdefault(self._group_of(key), {})[key] = None

    def discard(self, key: Key) -> None:
        if key in self:
            group = self._group_of(key)
            del self._groups[group][key]
            if not self._groups[group]:
                del self._groups[group]

    def next(self, may: Callable[[Hashable], bool]) -> Key | None:
        """Returns the key whose turn it is, of the groups that `may` work."""
        return next((next(iter(keys)) for group, keys in self._groups.items() if may(group)), None)

    def take(self, key: Key) -> Key:
        group = self._group_of(key)
        keys = self._groups.pop(group)
        del keys[key]
        if keys:
            self._groups[group] = keys
        return key


class _WorkerShares:
    """Decides which groups may have another of `number` places: those that hold fewer places than are free. So k groups
    leave one place in k + 1 to the next group."""

    def __init__(self, number: float) -> None:
        self._number = number
        self._held = Counter[Hashable]()

    def has_one_for(self, group: Hashable) -> bool:
        return self._held[group] < self._number - self._held.total()

    def take(self, group: Hashable) -> None:
        self._held[group] += 1

    def leave(self, group: Hashable) -> None:
        self._held[group] -= 1
        if not self._held[group]:
            del self._held[group]


class WorkQueue(Generic[Key]):
    """`settle_seconds`: how long an added key waits for the same key to be added again, as happens hundreds of times
    while a gang starts. `group_of`: the group of a key; by default, the key itself. `workers`: how many take keys."""

    def __init__(
        self,
        settle_seconds: float,
        metrics: Metrics | None = None,
        group_of: Callable[[Key], Hashable] = lambda key: key,
        workers: float = math.inf,
    ) -> None:
        self._settle_seconds = settle_seconds
        self._metrics = metrics
        self._group_of = group_of
        self._places = _WorkerShares(workers)
        self._background_places = _WorkerShares(_BACKGROUND_AT_ONCE)
        self._first: _KeyLine[Key] = _KeyLine(group_of)
        self._ready: _KeyLine[Key] = _KeyLine(group_of)
        self._background: _KeyLine[Key] = _KeyLine(group_of)
        # Keys that go first when they are due, and those in work that did.
        self._hurried: set[Key] = set()
        self._went_first: set[Key] = set()
        self._background_in_work: set[Key] = set()
        # Keys taken since the last one of the background, and since the last one that did not go first.
        self._turns = 0
        self._first_turns = 0
        self._wanted: set[Key] = set()
        self._in_work: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        # Keys that must not be worked on before a time of the loop's clock.
        self._paused: dict[Key, float] = {}
        self._failures: dict[Key, int] = {}
        self._available = asyncio.Event()

    def add(self, key: Key, *, settle_seconds: float = 0.0, background: bool = False, first: bool = False) -> None:
        """Adds a key that needs work, or with `background`, one that perhaps needs none. With `first` it goes before
        others. `settle_seconds`: if it should wait longer than others to be added again."""
        if not background:
            self.add_after(key, max(self._settle_seconds, settle_seconds), first=first)
        elif key in self._paused:
            self.add_after(key, 0)
        elif key not in self._wanted:
            self._want(key)
            if key not in self._in_work:
                self._background.add(key)
                self._available.set()

    def add_after(self, key: Key, seconds: float, *, first: bool = False) -> None:
        """Makes the key due in `seconds`, unless it is due sooner anyway, or paused for longer. It goes before others
        with `first`, and if it went first and is due at once, because the same work continues then."""
        if first or (seconds <= 0 and key in self._went_first):
            self._hurried.add(key)
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        due = max(loop.time() + seconds, self._paused.get(key, 0.0))
        if timer is not None:
            if timer.when() <= due:
                return
            timer.cancel()
        self._timers[key] = loop.call_at(due, self._add, key)

    def retry(self, key: Key, *, pause_seconds: float = 0.0) -> None:
        """Adds a key whose work failed: later each time, and not before `pause_seconds`."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        if self._metrics:
            self._metrics.key_retried()
        if pause_seconds:
            self._paused[key] = asyncio.get_running_loop().time() + pause_seconds
            if timer := self._timers.pop(key, None):
                timer.cancel()
        first = key in self._went_first
        self.add_after(key, min(_FIRST_RETRY_SECONDS * 2 ** min(failures, 32), _LONGEST_RETRY_SECONDS), first=first)

    def forget(self, key: Key) -> None:
        """Resets the key's failures, because its work succeeded."""
        self._failures.pop(key, None)

    async def get(self) -> Key:
        """Returns the next key, which belongs to the caller until `done`."""
        while (key := self._next()) is None:
            self._available.clear()
            await self._available.wait()
        self._wanted.discard(key)
        self._in_work.add(key)
        self._places.take(self._group_of(key))
        if self._metrics:
            self._metrics.key_taken(key)
        return key

    def _next(self) -> Key | None:
        first, ready = self._first.next(self._places.has_one_for), self._ready.next(self._places.has_one_for)
        behind = self._background.next(self._may_in_background)
        if (first is not None or ready is not None) and not (behind is not None and self._turns >= _TURNS):
            self._turns += 1
            goes_first = first is not None and not (ready is not None and self._first_turns >= _TURNS)
            self._first_turns = self._first_turns + 1 if goes_first else 0
            if first is not None and goes_first:
                self._went_first.add(first)
                return self._first.take(first)
            return None if ready is None else self._ready.take(ready)
        if behind is None:
            return None
        self._turns = 0
        self._background_in_work.add(behind)
        self._background_places.take(self._group_of(behind))
        return self._background.take(behind)

    def _may_in_background(self, group: Hashable) -> bool:
        return self._places.has_one_for(group) and self._background_places.has_one_for(group)

    def done(self, key: Key) -> None:
        self._in_work.discard(key)
        self._places.leave(self._group_of(key))
        self._went_first.discard(key)
        if key in self._background_in_work:
            self._background_in_work.remove(key)
            self._background_places.leave(self._group_of(key))
        if self._metrics:
            self._metrics.key_done(key)
        if key in self._wanted and key not in self._paused:
            self._line_up(key)
        # This also wakes workers that wait for a background turn.
        self._available.set()

    def close(self) -> None:
        """Cancels all timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _add(self, key: Key) -> None:
        self._timers.pop(key, None)
        was_paused = self._paused.pop(key, None) is not None
        is_behind = key in self._background or (key in self._ready and key in self._hurried)
        if key in self._wanted and not is_behind and not was_paused:
            if key in self._first:
                self._hurried.discard(key)
            return
        self._background.discard(key)
        self._ready.discard(key)
        self._want(key)
        if key not in self._in_work:
            self._line_up(key)
            self._available.set()

    def _line_up(self, key: Key) -> None:
        if key in self._hurried:
            self._hurried.discard(key)
            self._first.add(key)
        else:
            self._ready.add(key)

    def _want(self, key: Key) -> None:
        if key not in self._wanted:
            self._wanted.add(key)
            if self._metrics:
                self._metrics.key_queued(key)
