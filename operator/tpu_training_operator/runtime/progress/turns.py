"""Who may ask the API server next. Used by `reviewer`.

A token that nobody has seen before costs the API server a question, and anybody may send one. So questions wait in one
line, in the order in which they came, and each address has only a few places in it: one that sends thousands of tokens
waits for itself, and another's question waits for those few at the most.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary


class Turns:
    """`most` at once, of which one address holds or waits for `each`; further ones of that address queue behind."""

    def __init__(self, most: int, each: int) -> None:
        self._each = each
        self._all = asyncio.Semaphore(most)
        # An address is forgotten as soon as none of its questions waits.
        self._own: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def of(self, address: str) -> AsyncIterator[None]:
        own = self._own.get(address)
        if own is None:
            own = self._own[address] = asyncio.Semaphore(self._each)
        async with own, self._all:
            yield
