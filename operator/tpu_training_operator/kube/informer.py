"""Keeps a `Replica` of selected objects up to date by lists and watches, and reports what changes.

The informer lists once, page by page, then watches from the list's version. A watch that ends continues where it was.
After one that has expired, or that fails again and again, the informer lists again, which also shows deletions in
between. No error ends the informer: the replica stays, with `trouble` beside it, and the informer keeps trying. Only an
impatient one, for a command at a prompt, ends if the first list fails.
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
# A watch that fails so often in a row may fail because of one event, which a list avoids.
_FAILURES_BEFORE_LIST = 3


class Informer(Generic[T]):
    """`keep` returns what is kept of an object, of which there can be thousands; None for one that is not of interest.

    `changed` is called with every change of an object, `updated` after every change of anything here. `trouble`: why
    the replica may be out of date. `is_listed`: whether it has been complete once. `has_tried`: whether the first list
    has ended, with or without success. Times are monotonic seconds: `confirmed_at`, when the API server last confirmed
    that the replica is up to date (-inf: never); `active_at`, when anything happened, even an error.
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
        self.confirmed_at = float("-inf")
        self.active_at = time.monotonic()
        self.has_tried = asyncio.Event()

    def __str__(self) -> str:
        namespace = self._selection.namespace
        return f"{self._selection.resource.plural} of {'all namespaces' if namespace is None else namespace}"

    async def run(self) -> None:
        """Runs until it is cancelled. Raises ApiError if it is impatient and the first list fails."""
        while True:
            try:
                await self._follow()
            except Exception as error:
                if not self._is_patient and not self.is_listed and isinstance(error, ApiError):
                    raise
                self._note_failure(error)
                await asyncio.sleep(self._pause)
                self._pause = min(self._pause * 2, LONGEST_PAUSE)

    async def _follow(self) -> None:
        """Lists if necessary, and watches until the server ends the watch."""
        if self._must_list:
            await self._list()
        has_events = False
        async for event in self._client.watch(self._selection, str(self.replica.known_until)):
            has_events = True
            self._apply(event)
            self._note_success()
        self._note_success()
        if not has_events:
            # The server may end every watch at once.
            await asyncio.sleep(FIRST_PAUSE)

    async def _list(self) -> None:
        is_first, number = not self.is_listed, -1
        async for page in self._client.pages(self._selection, self._read_version):
            if number < 0:
                self.replica.begin_list(_read_number(page.version))
            number = _read_number(page.version)
            for version in page.items:
                self._report(self.replica.add_listed(version), only_listed=is_first)
            self.active_at = time.monotonic()
        for change in self.replica.end_list(number):
            self._report(change)
        self._must_list, self.is_listed = False, True
        self._note_success()
        self.has_tried.set()
        self._updated()

    def _apply(self, event: Object) -> None:
        number = _read_number(event["object"]["metadata"]["resourceVersion"])
        if number < self.replica.known_until and event["type"] != "DELETED":
            # Only a deletion may come with the version that the object had before.
            raise Expired(0, "Expired", "the watch shows a past version: the cluster was restored from a backup")
        if event["type"] == "BOOKMARK":
            self.replica.skip_to(number)
            return
        version = self._read_version(event["object"])
        if version is None:
            # The object cannot be read, so its event is skipped.
            self.replica.skip_to(number)
        elif event["type"] == "DELETED":
            self._report(self.replica.apply_deletion(version))
        else:
            self._report(self.replica.apply_change(version))

    def _read_version(self, item: Object) -> Version[T] | None:
        """Returns the object's version. One that cannot be read must not affect the others: it counts as one that is
        not of interest, or is ignored (None)."""
        version: Version[T] | None = None
        try:
            metadata = item["metadata"]
            key = metadata.get("namespace") or "", metadata["name"]
            version = Version(key, metadata["uid"], _read_number(metadata["resourceVersion"]), None)
            return replace(version, record=self._keep(item))
        except Exception as error:
            name = "/".join(version.name) if version else "one without a name"
            log.warning("%s: %s cannot be read and is ignored: %s: %s", self, name, type(error).__name__, error)
            return version

    def _report(self, change: Change[T] | None, *, only_listed: bool = False) -> None:
        if change is not None:
            self._changed(replace(change, only_listed=True) if only_listed else change)
            self._updated()

    def _note_success(self) -> None:
        self.confirmed_at = self.active_at = time.monotonic()
        self._pause, self._failures = FIRST_PAUSE, 0
        if self.trouble is not None:
            self.trouble = None
            self._updated()

    def _note_failure(self, error: Exception) -> None:
        self.active_at = time.monotonic()
        self._failures += 1
        if isinstance(error, Expired):
            # This is no trouble: only too much has changed since the last version.
            self._must_list = True
        else:
            self._must_list = self._must_list or self._failures >= _FAILURES_BEFORE_LIST
            self.trouble = str(error) or type(error).__name__
            if self._is_patient:
                self._log_failure(error)
        self.has_tried.set()
        self._updated()

    def _log_failure(self, error: Exception) -> None:
        if isinstance(error, ApiError) and error.status == 401:
            log.warning("the API server refused the operator's token; reading it again to watch the %s", self)
        else:
            # Anything else than an ApiError is a bug here, or an unexpected object.
            unexpected = None if isinstance(error, ApiError) else error
            log.warning("watching the %s failed, trying again: %s", self, self.trouble, exc_info=unexpected)


def _read_number(version: object) -> int:
    """Returns the version as a number. The API server promises whole numbers, comparable within one kind."""
    try:
        return int(str(version))
    except ValueError:
        raise Unavailable(
            0, "NoVersion", f"the API server sent a resourceVersion that is not a number: {version!r}"
        ) from None
