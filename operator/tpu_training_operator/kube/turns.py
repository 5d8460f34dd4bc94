"""Decides which request is sent next, and how many may be under way at once.

The writes of one batch of a job's plan, which can be thousands, form a flow. Each of them waits for a place, and flows
take turns, so that a gang of thousands does not hold up one of four. A flow without a request under way gets an extra
place unless the API server is overloaded, because the requests of others may wait long for the admission webhook of
their namespace. All other requests (reads, watches, statuses) need no place: they are few, and passes of other jobs
wait for them.

The API server sets the number of places. It queues what it cannot do at once (API Priority and Fairness), and answers
429 when its queues are full. The number grows while answers are good and all places are taken, and halves with each
sign of overload: additive increase, multiplicative decrease, as in TCP. A request that the server asks to wait keeps
its place in the meantime, so that no other request takes it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

# With answers after 10 ms, 32 requests under way are 3200 a second, more than this process can send.
_FIRST = 32
MOST = 64
# Any API server can take this many. With fewer, and a server that lets every request time out, one of many jobs would
# wait so long for an answer that its pass looks stuck.
LEAST = 4
# No answer, and the answers of an overloaded API server, of a proxy before it or of etcd behind it. Not 500: that often
# comes from the admission webhook of a single namespace.
_OVERLOAD = frozenset((0, 429, 503, 504))


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


@dataclass(frozen=True)
class WriteLimit:
    """How many requests of flows may be under way. `since`: the number of the first request under this limit."""

    limit: float = _FIRST
    since: int = 0

    @property
    def may_be_exceeded(self) -> bool:
        """Whether the limit has recovered from overload: the requests beyond it have not been tried."""
        return self.limit >= _FIRST

    def after_answer(self, status: int, number: int, next_number: int, under_way: int) -> "WriteLimit":
        """Returns the limit after an answer to the request `number`."""
        if status in _OVERLOAD:
            # Requests that were under way together meet the same overload, so only the first answer counts.
            return self if number < self.since else WriteLimit(max(LEAST, self.limit / 2), next_number)
        if 2 * under_way < self.limit:
            # The answer proves nothing about a higher load.
            return self
        return WriteLimit(min(MOST, self.limit + 1 / self.limit), self.since)


@dataclass(eq=False)
class Flow:
    """The requests of one batch.

    `waiting`: the tasks whose request has not been sent, which can be cancelled safely. `queue`: their futures, which
    get the number of the request when its turn has come. `under_way`: the number of requests under way.
    """

    waiting: set["asyncio.Task[object]"] = field(default_factory=set)
    queue: deque["asyncio.Future[int]"] = field(default_factory=deque)
    under_way: int = 0


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
    """`rate`: limits the requests per second; None: they are not limited."""

    def __init__(self, rate: TokenBucket | None = None) -> None:
        self._rate = rate
        self._others: deque[asyncio.Future[int]] = deque()
        # The flows with a queue, in the order of their turns.
        self._flows: deque[Flow] = deque()
        self._under_way = 0
        self._sent = 0
        self._alarm: asyncio.TimerHandle | None = None
        self.limit = WriteLimit()

    @asynccontextmanager
    async def turn(self, method: str, *, again: bool = False) -> AsyncIterator["Permit"]:
        """Waits until the request may be sent; it is under way until the block ends. `again`: it has been sent before,
        so it goes before the others of its flow."""
        flow = None if method == "GET" else _current.get()
        number = await self._wait(flow, again=again)
        try:
            yield Permit(self, flow, number)
        finally:
            self._leave(flow)

    def record_answer(self, status: int, number: int) -> None:
        before, self.limit = self.limit, self.limit.after_answer(status, number, self._sent + 1, self._under_way)
        if self.limit.limit < before.limit:
            answer = status or "no answer"
            log.info(
                "the API server is overloaded (%s): the operator sends %d writes at once", answer, self.limit.limit
            )

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
                # It was admitted at the same moment.
                self._leave(flow)
            raise

    def _leave(self, flow: Flow | None) -> None:
        if flow is not None:
            self._under_way -= 1
            flow.under_way -= 1
            self._admit()

    def _admit(self) -> None:
        while (flow := self._next_flow()) is not None or self._others:
            if self._rate is not None and (seconds := self._rate.seconds_until_next()):
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
            if self._rate is not None:
                self._rate.take()
            if flow is not None:
                self._under_way += 1
                flow.under_way += 1
            self._sent += 1
            waiter.set_result(self._sent)

    def _next_flow(self) -> Flow | None:
        """Returns the flow whose turn it is; None if no flow may send now."""
        if self._others:
            return None
        if self._under_way < int(self.limit.limit):
            return next(iter(self._flows), None)
        if not self.limit.may_be_exceeded:
            return None
        return next((flow for flow in self._flows if not flow.under_way), None)

    def _ring(self) -> None:
        self._alarm = None
        self._admit()


@dataclass(frozen=True)
class Permit:
    """The permission to send one request."""

    turns: Turns
    flow: Flow | None
    number: int

    def record_answer(self, status: int) -> None:
        """Records the HTTP status of the answer; 0: no answer came."""
        self.turns.record_answer(status, self.number)

    async def pause(self, seconds: float) -> None:
        """Waits as long as the server asks, and keeps the place."""
        with _waiting(self.flow):
            await asyncio.sleep(seconds)
