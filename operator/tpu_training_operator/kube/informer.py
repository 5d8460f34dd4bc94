"""A local copy of the objects of a selection, kept up to date by a watch.

The informer lists once, then watches from the list's version. A watch that ends continues where it was; one that has
expired starts with a new list. After the first list no error ends it: the copy stays, with `trouble` beside it, and the
informer keeps trying.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from tpu_training_operator.kube.client import Client, Selection
from tpu_training_operator.kube.cluster import Object
from tpu_training_operator.kube.errors import ApiError, Expired

T = TypeVar("T")

_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 15.0


class Informer(Generic[T]):
    """`items`: by name, what `keep` returns of each object (there can be thousands). `trouble`: why the copy may be
    out of date. `changed` is called after every change of either."""

    def __init__(
        self, client: Client, selection: Selection, keep: Callable[[Object], T], changed: Callable[[], None]
    ) -> None:
        self._client = client
        self._selection = selection
        self._keep = keep
        self._changed = changed
        self._version: str | None = None
        self._pause = _FIRST_PAUSE
        self.is_listed = False
        self.items: dict[str, T] = {}
        self.trouble: str | None = None

    async def run(self) -> None:
        """Runs until it is cancelled. Raises ApiError if the very first list fails."""
        await self._list()
        while True:
            try:
                await self._continue()
            except ApiError as error:
                if isinstance(error, Expired):
                    self._version = None
                else:
                    self.trouble = str(error)
                    self._changed()
                await asyncio.sleep(self._pause)
                self._pause = min(self._pause * 2, _LONGEST_PAUSE)

    async def _continue(self) -> None:
        if self._version is None:
            await self._list()
        heard = False
        async for event in self._client.watch(self._selection, self._version or ""):
            heard = True
            self._recovered()
            self._apply(event)
        if not heard:
            # The server may end every watch at once; do not ask again at once.
            self._recovered()
            await asyncio.sleep(_FIRST_PAUSE)

    async def _list(self) -> None:
        items: dict[str, T] = {}
        version = ""
        async for page in self._client.pages(self._selection, self._named):
            items |= dict(page.kept)
            version = page.version
        # Replaced as a whole: objects deleted while nobody watched disappear, too.
        self.items, self._version, self.is_listed = items, version, True
        self._recovered()
        self._changed()

    def _named(self, item: Object) -> tuple[str, T]:
        return item["metadata"]["name"], self._keep(item)

    def _apply(self, event: Object) -> None:
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

    def _recovered(self) -> None:
        self._pause = _FIRST_PAUSE
        if self.trouble is not None:
            self.trouble = None
            self._changed()
