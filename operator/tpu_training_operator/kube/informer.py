"""Keeps a `Replica` of a selection up to date by a list and a watch, and tells what changed.

The informer lists once, page by page, then watches from the list's version. A watch that ends continues where it was;
one that has expired, or fails again and again, starts with a new list, which also finds what was deleted meanwhile. No
error ends the informer: the replica stays, with `trouble` beside it, and the informer keeps trying. Only an impatient
one, for a command at a prompt, ends if the very first list fails.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

from tpu_training_operator.kube.client import Client, Selection
from tpu_training_operator.kube.cluster import Object
from tpu_training_operator.kube.errors import ApiError, Expired, Unavailable
from tpu_training_operator.kube.replica import Change, Replica, Version

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 15.0
# A watch that fails so often in a row may stumble over one event, which a list does not show.
_FAILURES_BEFORE_LIST = 3


class Informer(Generic[T]):
    """`keep`: what is kept of each object (there can be thousands); None for an object that is of no interest.

    `changed` is called for every object that has changed, `updated` after every change of anything here. `trouble`: why
    the replica may be out of date. `is_listed`: whether it has ever been complete. Times are monotonic seconds:
    `heard_at`, when the API server last said that all is told (-inf: never); `moved_at`, when anything happened at all,
    even an error.
    """

    def __init__(
        self,
        client: Client,
        selection: Selection,
        keep: Callable[[Object], T | None],
        *,
        replica: Replica[T] | None = None,
        changed: Callable[[Change[T]], None] = lambda change: None,
        updated: Callable[[], None] = lambda: None,
        is_patient: bool = False,
    ) -> None:
        self._client = client
        self._selection = selection
        self._keep = keep
        self._changed = changed
        self._updated = updated
        self._is_patient = is_patient
        self._pause = FIRST_PAUSE
        self._must_list = True
        self._failures = 0
        self.replica: Replica[T] = Replica() if replica is None else replica
        self.is_listed = False
        self.trouble: str | None = None
        self.heard_at = float("-inf")
        self.moved_at = time.monotonic()
        # Set once the first list has ended, well or not.
        self.has_tried = asyncio.Event()

    def __str__(self) -> str:
        namespace = self._selection.namespace
        return f"{self._selection.resource.plural} of {'all namespaces' if namespace is None else namespace}"

    async def run(self) -> None:
        """Runs until it is cancelled. Raises ApiError if it is impatient and the very first list fails."""
        while True:
            try:
                await self._continue()
            except Exception as error:
                if not self._is_patient and not self.is_listed and isinstance(error, ApiError):
                    raise
                self._failed(error)
                await asyncio.sleep(self._pause)
                self._pause = min(self._pause * 2, LONGEST_PAUSE)

    def _failed(self, error: Exception) -> None:
        self.moved_at = time.monotonic()
        self._failures += 1
        if isinstance(error, Expired):
            # The way of an API server to say that much has happened: no trouble.
            self._must_list = True
        else:
            self._must_list = self._must_list or self._failures >= _FAILURES_BEFORE_LIST
            self.trouble = str(error) or type(error).__name__
            self._tell(error)
        self.has_tried.set()
        self._updated()

    def _tell(self, error: Exception) -> None:
        if not self._is_patient:
            return
        if isinstance(error, ApiError) and error.status == 401:
            log.warning("the API server refused the operator's token; reading it again to watch the %s", self)
        else:
            # Anything else than an ApiError is a bug here, or an object that nobody expected.
            unexpected = None if isinstance(error, ApiError) else error
            log.warning("watching the %s failed, trying again: %s", self, self.trouble, exc_info=unexpected)

    async def _continue(self) -> None:
        if self._must_list:
            await self._list()
        heard = False
        async for event in self._client.watch(self._selection, str(self.replica.told)):
            heard = True
            self._apply(event)
            self._recovered()
        self._recovered()
        if not heard:
            # The server may end every watch at once; do not ask again at once.
            await asyncio.sleep(FIRST_PAUSE)

    async def _list(self) -> None:
        is_first, number = not self.is_listed, -1
        async for page in self._client.pages(self._selection, self._version):
            if number < 0:
                self.replica.listing(_number(page.version))
            number = _number(page.version)
            for version in page.kept:
                self._told(self.replica.listed(version), only_listed=is_first)
            self.moved_at = time.monotonic()
        for change in self.replica.list_ended(number):
            self._told(change)
        self._must_list, self.is_listed = False, True
        self._recovered()
        self.has_tried.set()
        self._updated()

    def _apply(self, event: Object) -> None:
        number = _number(event["object"]["metadata"]["resourceVersion"])
        if number < self.replica.told and event["type"] != "DELETED":
            # Only a deletion may come with the version that the object had before.
            raise Expired(0, "Expired", "the watch tells of a past version: the cluster was restored")
        if event["type"] == "BOOKMARK":
            self.replica.passed(number)
            return
        version = self._version(event["object"])
        if version is None:
            # Whatever it is, the next event is newer.
            self.replica.passed(number)
        elif event["type"] == "DELETED":
            self._told(self.replica.deleted(version))
        else:
            self._told(self.replica.changed(version))

    def _version(self, item: Object) -> Version[T] | None:
        """An object that cannot be read must not keep the others from being seen: it counts as one of no interest, or
        as none at all."""
        version: Version[T] | None = None
        try:
            metadata = item["metadata"]
            name = metadata.get("namespace") or "", metadata["name"]
            version = Version(name, metadata["uid"], _number(metadata["resourceVersion"]), None)
            return replace(version, kept=self._keep(item))
        except Exception as error:
            log.warning("one of the %s cannot be read and is left out: %s: %s", self, type(error).__name__, error)
            return version

    def _told(self, change: Change[T] | None, *, only_listed: bool = False) -> None:
        if change is not None:
            self._changed(replace(change, only_listed=True) if only_listed else change)
            self._updated()

    def _recovered(self) -> None:
        self.heard_at = self.moved_at = time.monotonic()
        self._pause, self._failures = FIRST_PAUSE, 0
        if self.trouble is not None:
            self.trouble = None
            self._updated()


def _number(version: object) -> int:
    """Versions of one kind can be compared; the API server promises that they are whole numbers."""
    try:
        return int(str(version))
    except ValueError:
        raise Unavailable(0, "NoVersion", f"an API server with versions such as {version!r}") from None
