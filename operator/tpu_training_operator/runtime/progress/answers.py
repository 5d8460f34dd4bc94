"""Answers that hold for a while, and that are asked for once at a time. Used by `reviewer`.

A worker reports every few seconds; asking the API server each time who it is would cost more than all the rest.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from tpu_training_operator.runtime.progress.refused import Refused

Value = TypeVar("Value")

_MOST_ANSWERS = 10_000
# A pod that has just been created may not be known everywhere yet.
_REFUSAL_SECONDS = 5.0


class Answers(Generic[Value]):
    """Remembers a value for `seconds` and a Refused for less; any other error is told to those who wait, and
    forgotten. The oldest answer goes first when there are too many."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._known: OrderedDict[str, tuple[Value | Refused, float]] = OrderedDict()
        self._asking: dict[str, asyncio.Task[Value | Refused]] = {}

    def trusts(self, key: str) -> bool:
        """Whether `get` would ask nobody anew, or the last answer was a value: it is kept until there are too many."""
        answer, until = self._known.get(key, (None, -math.inf))
        has_value = answer is not None and not isinstance(answer, Refused)
        return has_value or key in self._asking or self._clock() < until

    async def get(self, key: str, ask: Callable[[], Awaitable[Value]]) -> Value:
        """The remembered answer, or that of `ask`; whoever comes while it is being asked for waits for the same one.
        Raises Refused, and what `ask` raises."""
        answer, until = self._known.get(key, (None, 0.0))
        if answer is None or self._clock() >= until:
            task = self._asking.get(key)
            if task is None:
                task = self._asking[key] = asyncio.create_task(self._ask(key, ask))
                task.add_done_callback(lambda done: self._note(key, done))
            # One that no longer waits takes nothing from the others.
            answer = await asyncio.shield(task)
        if isinstance(answer, Refused):
            raise answer.with_traceback(None)
        return answer

    async def _ask(self, key: str, ask: Callable[[], Awaitable[Value]]) -> Value | Refused:
        try:
            return await ask()
        except Refused as refused:
            return refused

    def _note(self, key: str, done: "asyncio.Task[Value | Refused]") -> None:
        del self._asking[key]
        # Asking for the exception also tells asyncio that somebody has looked, if all who waited have left.
        if done.cancelled() or done.exception() is not None:
            return
        answer = done.result()
        seconds = _REFUSAL_SECONDS if isinstance(answer, Refused) else self._seconds
        self._known.pop(key, None)
        self._known[key] = (answer, self._clock() + seconds)
        if len(self._known) > _MOST_ANSWERS:
            self._known.popitem(last=False)
