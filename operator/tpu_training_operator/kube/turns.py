"""Decides when a request may be sent, in two lanes.

The writes of one batch of a job's plan, which can be thousands, form a flow. All flows share a fixed number of places,
and wait for them in the order in which they ask. A batch asks for a few at a time (`runtime.execution`), so a gang of
thousands does not hold up one of four. Each flow also has a place of its own, because the requests of others may wait
long for the admission webhook of their namespace. All other requests (reads, watches, statuses) need no place: they are
few, and passes of other jobs wait for them.

The API server queues what it cannot do at once (API Priority and Fairness), and answers 429 when its queues are full. A
request that it asks to wait keeps its place in the meantime, so that no other request takes it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

# With answers after 10 ms, 32 requests under way are 3200 a second, more than this process can send.
PLACES = 32


class TokenBucket:
    """Admits `burst` requests at once and `per_second` on average. `clock` returns seconds."""

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float]) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._tokens = float(burst)
        self._filled_at = clock()

    def take(self) -> float:
        """Takes a token, on credit if none is left. Returns the seconds until it is due."""
        self._fill()
        self._tokens -= 1
        return max(0.0, -self._tokens / self._per_second)

    def give_back(self) -> None:
        """Puts back a token that was taken but not used."""
        self._fill()
        self._tokens = min(self._burst, self._tokens + 1)

    def seconds_until_next(self) -> float:
        """Returns the seconds until the next token; 0 if there is one now. Takes none."""
        self._fill()
        return max(0.0, (1 - self._tokens) / self._per_second)

    def _fill(self) -> None:
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._per_second)
        self._filled_at = now


@dataclass(eq=False)
class Flow:
    """The requests of one batch. `waiting`: the tasks that have no request under way, which can be cancelled safely."""

    waiting: set["asyncio.Task[object]"] = field(default_factory=set)
    place: asyncio.Lock = field(default_factory=asyncio.Lock)

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Marks the present task as waiting until the block ends."""
        task = asyncio.current_task()
        assert task is not None
        self.waiting.add(task)
        try:
            yield
        finally:
            self.waiting.discard(task)


# A context variable: the tasks of a batch inherit it, and the local store, which has no use for it, needs no argument.
_current: ContextVar[Flow | None] = ContextVar("flow", default=None)


@contextmanager
def flow() -> Iterator[Flow]:
    """Makes one flow of all writes in this context and in the tasks that it starts."""
    started = Flow()
    token = _current.set(started)
    try:
        yield started
    finally:
        _current.reset(token)


class Turns:
    """`rate`: limits the requests per second; None: they are not limited. `places`: the writes of flows at once."""

    def __init__(self, rate: TokenBucket | None = None, places: int = PLACES) -> None:
        self._rate = rate
        self._line = asyncio.Lock()
        self._places = asyncio.Semaphore(places)

    @asynccontextmanager
    async def turn(self, method: str) -> AsyncIterator[Flow | None]:
        """Waits until the request may be sent; it is under way until the block ends. Yields its flow, if it has one."""
        flow = None if method == "GET" else _current.get()
        if flow is None:
            if self._rate is not None:
                await asyncio.sleep(self._rate.take())
            yield None
            return
        with flow.wait():
            if self._rate is not None:
                # The others take their tokens on credit, so they go first.
                async with self._line:
                    await asyncio.sleep(self._rate.seconds_until_next())
                    await asyncio.sleep(self._rate.take())
            place = self._places if flow.place.locked() else flow.place
            await place.acquire()
        try:
            yield flow
        finally:
            place.release()
