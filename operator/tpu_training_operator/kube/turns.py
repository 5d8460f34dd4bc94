"""Whose request is next, and how many are under way at once.

Two kinds of requests share the connection. What a stage sends for its job, creations and deletions by the thousand, is
a flow: it waits for a place among the requests under way, and flows take turns, so that a gang of thousands never holds
up one of four. A flow without a request under way has a place beside the others, unless the API server is overloaded:
theirs may wait long for an admission webhook of their namespace. Everything else waits for no place: reads, watches,
statuses and events are few, and the passes of other jobs wait for them.

How many places there are, the API server decides. It queues what it cannot do at once (API Priority and Fairness), and
answers 429 when its queues are full. The number grows while answers are good and places are taken, and halves with a
sign of overload: additive increase, multiplicative decrease, as in TCP. A request that the server asks to wait keeps
its place meanwhile, so nobody else hurries into it; then it takes the next one that is free.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from tpu_training_operator.kube.throttle import Throttle

log = logging.getLogger(__name__)

# At 10 ms an answer, 32 requests under way are 3200 a second, more than this process can send.
_FIRST = 32
MOST = 64
# No load for any API server. With fewer, a server that lets each request run into its timeout would keep one of many
# jobs from an answer for so long that its pass looks stuck.
LEAST = 4
# No answer, and what the API server says when it, a proxy before it or etcd behind it has too much to do. Not 500:
# that is often the admission webhook of a single namespace.
_OVERLOAD = frozenset((0, 429, 503, 504))


@dataclass(frozen=True)
class Places:
    """How many requests of flows may be under way. `since`: the number of the first request under this limit."""

    limit: float = _FIRST
    since: int = 0

    @property
    def may_be_exceeded(self) -> bool:
        """Whether the limit has recovered from all signs of overload, so that it only bounds what nobody has tried."""
        return self.limit >= _FIRST

    def after(self, status: int, number: int, following: int, under_way: int) -> "Places":
        """After an answer to the request `number`; `following`: the number that the next request gets."""
        if status in _OVERLOAD:
            # All that were under way together tell of one overload, so only the first of them counts.
            return self if number < self.since else Places(max(LEAST, self.limit / 2), following)
        if 2 * under_way < self.limit:
            # The answer says nothing about a load that nobody tried.
            return self
        return Places(min(MOST, self.limit + 1 / self.limit), self.since)


@dataclass(eq=False)
class Flow:
    """The requests of one stage. `waiting`: the tasks whose request is not under way, so that they can be cancelled
    without leaving anything half done. `queue`: their futures become the numbers of their requests. `under_way`: how
    many of the requests are."""

    waiting: set["asyncio.Task[object]"] = field(default_factory=set)
    queue: deque["asyncio.Future[int]"] = field(default_factory=deque)
    under_way: int = 0


# A context variable, because the tasks that a stage starts inherit it, and the local store needs to know nothing of it.
_current: ContextVar[Flow | None] = ContextVar("flow", default=None)


@contextmanager
def flow() -> Iterator[Flow]:
    """Writes in this context, and in the tasks that it starts, are one flow."""
    begun = Flow()
    token = _current.set(begun)
    try:
        yield begun
    finally:
        _current.reset(token)


@contextmanager
def _waiting(flow: Flow | None) -> Iterator[None]:
    task = asyncio.current_task()
    if flow is None or task is None:
        yield
        return
    flow.waiting.add(task)
    try:
        yield
    finally:
        flow.waiting.discard(task)


class Turns:
    """`throttle`: bounds the requests a second; None: nothing does."""

    def __init__(self, throttle: Throttle | None = None) -> None:
        self._throttle = throttle
        self._others: deque[asyncio.Future[int]] = deque()
        # The flows with a queue, in the order of their turns.
        self._flows: deque[Flow] = deque()
        self._under_way = 0
        self._sent = 0
        self._alarm: asyncio.TimerHandle | None = None
        self.places = Places()

    @asynccontextmanager
    async def turn(self, method: str, *, again: bool = False) -> AsyncIterator["Turn"]:
        """Waits until the request may be sent; it is under way until the block ends. `again`: it was sent before, so
        it goes before others of its flow."""
        flow = None if method == "GET" else _current.get()
        number = await self._wait(flow, again=again)
        try:
            yield Turn(self, flow, number)
        finally:
            self._leave(flow)

    def heard(self, status: int, number: int) -> None:
        before, self.places = self.places, self.places.after(status, number, self._sent + 1, self._under_way)
        if self.places.limit < before.limit:
            told = status or "no answer"
            log.info("the API server does not keep up (%s): %d writes at once", told, self.places.limit)

    async def _wait(self, flow: Flow | None, *, again: bool) -> int:
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        queue = self._others if flow is None else flow.queue
        if flow is not None and not queue:
            self._flows.append(flow)
        queue.appendleft(waiter) if again else queue.append(waiter)
        self._admit()
        if waiter.done():
            return waiter.result()
        try:
            with _waiting(flow):
                return await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():
                # Admitted in the same moment.
                self._leave(flow)
            raise

    def _leave(self, flow: Flow | None) -> None:
        if flow is not None:
            self._under_way -= 1
            flow.under_way -= 1
            self._admit()

    def _admit(self) -> None:
        while (flow := self._next_flow()) is not None or self._others:
            if self._throttle is not None and (seconds := self._throttle.due()):
                if self._alarm is None:
                    self._alarm = asyncio.get_running_loop().call_later(seconds, self._ring)
                return
            queue = self._others if flow is None else flow.queue
            waiter = queue.popleft()
            if flow is not None:
                self._flows.remove(flow)
                if queue:
                    self._flows.append(flow)
            if waiter.cancelled():
                continue
            if self._throttle is not None:
                self._throttle.take()
            if flow is not None:
                self._under_way += 1
                flow.under_way += 1
            self._sent += 1
            waiter.set_result(self._sent)

    def _next_flow(self) -> Flow | None:
        """None if none has a turn now."""
        if self._others:
            return None
        if self._under_way < int(self.places.limit):
            return next(iter(self._flows), None)
        if not self.places.may_be_exceeded:
            return None
        return next((flow for flow in self._flows if not flow.under_way), None)

    def _ring(self) -> None:
        self._alarm = None
        self._admit()


@dataclass(frozen=True)
class Turn:
    """The leave to send one request."""

    turns: Turns
    flow: Flow | None
    number: int

    def heard(self, status: int) -> None:
        """The HTTP status of the answer; 0: no answer came."""
        self.turns.heard(status, self.number)

    async def pause(self, seconds: float) -> None:
        """Wait as the server asks, in one's place."""
        with _waiting(self.flow):
            await asyncio.sleep(seconds)
