"""A copy of what a selection of objects holds, kept up to date by a watch. Used by `runtime.job_watch`.

Listed first, then watched from the list's version on; a watch that ends is taken up where it was, one that has expired
begins with a list again. Once the first list is there, no trouble ends it: a person who looks on wants to be told that
the picture may be old, and to see it go on.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from tpu_training_operator.runtime.cluster import ApiError, Object
from tpu_training_operator.runtime.cluster_reader import ClusterReader, Selection, has_expired

T = TypeVar("T")

_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 15.0


class Watched(Generic[T]):
    """`items`: by name, what `keep` makes of each object (it may keep little: there can be thousands)."""

    def __init__(
        self,
        reader: ClusterReader,
        selection: Selection,
        keep: Callable[[Object], T],
        changed: Callable[[], None],
    ) -> None:
        self._reader = reader
        self._selection = selection
        self._keep = keep
        self._changed = changed
        self._version: str | None = None
        self._pause = _FIRST_PAUSE
        self.is_listed = False
        self.items: dict[str, T] = {}
        self.trouble: str | None = None

    async def run(self) -> None:
        """Until cancelled. Raises ApiError where the very first list fails: nothing was ever seen."""
        await self._list()
        while True:
            try:
                await self._go_on()
            except ApiError as error:
                if has_expired(error):
                    self._version = None
                else:
                    self.trouble = str(error)
                    self._changed()
                await asyncio.sleep(self._pause)
                self._pause = min(self._pause * 2, _LONGEST_PAUSE)

    async def _go_on(self) -> None:
        if self._version is None:
            await self._list()
        heard = False
        async for event in self._reader.watch(self._selection, self._version or ""):
            heard = True
            self._is_well()
            self._take(event)
        if not heard:
            # A server that ends every watch at once is not asked again at once.
            self._is_well()
            await asyncio.sleep(_FIRST_PAUSE)

    async def _list(self) -> None:
        items: dict[str, T] = {}
        version = ""
        async for page in self._reader.pages(self._selection):
            items |= {item["metadata"]["name"]: self._keep(item) for item in page.items}
            version = page.version
        # Swapped as a whole: what was deleted while nobody watched is gone, too.
        self.items, self._version, self.is_listed = items, version, True
        self._is_well()
        self._changed()

    def _take(self, event: Object) -> None:
        item = event["object"]
        self._version = item["metadata"]["resourceVersion"]
        if event["type"] == "BOOKMARK":
            return
        name = item["metadata"]["name"]
        if event["type"] == "DELETED":
            self.items.pop(name, None)
        else:
            self.items[name] = self._keep(item)
        self._changed()

    def _is_well(self) -> None:
        self._pause = _FIRST_PAUSE
        if self.trouble is not None:
            self.trouble = None
            self._changed()
