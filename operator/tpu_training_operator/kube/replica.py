"""A replica of the objects of one kind, from lists, watches, and answers to this process's own requests.

Versions decide. A cluster counts the changes of a kind with one counter, and the version of an object is the count at
its last change. So of two versions of an object the higher one is newer, and a version that is not newer than what the
watch has shown is ignored: if the object still were like that, the watch would have shown it.

An answer may be ahead of the watch. It stands until the watch has caught up. A deleted object never comes back: later
answers are not about it, and earlier ones are ignored.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

# Namespace and name.
Name = tuple[str, str]


@dataclass(frozen=True)
class Version(Generic[T]):
    """One version of one object. `record`: what this process keeps of it; None if it is not of interest."""

    name: Name
    uid: str
    number: int
    record: T | None


@dataclass(frozen=True)
class Change(Generic[T]):
    """A change that a watch or a list has shown. `before`, `after`: None if the object was not known, or is no longer
    there. `only_listed`: it was there when the informer began, so perhaps nothing has happened to it."""

    name: Name
    number: int
    before: T | None
    after: T | None
    only_listed: bool = False


@dataclass(slots=True)
class _KnownObject(Generic[T]):
    """`is_confirmed`: a watch or a list has shown this version, not only an answer. `is_gone`: an answer has shown that
    the object is deleted, which the watch has not shown yet."""

    uid: str
    number: int
    record: T
    is_confirmed: bool
    is_gone: bool = False


class Replica(Generic[T]):
    """`known_until`: every change up to this version is known."""

    def __init__(self) -> None:
        self.known_until = 0
        self._objects: dict[Name, _KnownObject[T]] = {}
        self._listed: set[Name] | None = None
        # By uid, the versions of deletions that are later than `known_until`.
        self._deleted: dict[str, int] = {}

    def get(self, name: Name) -> T | None:
        known = self._objects.get(name)
        return None if known is None or known.is_gone else known.record

    def uid(self, name: Name) -> str | None:
        known = self._objects.get(name)
        return None if known is None or known.is_gone else known.uid

    def number(self, name: Name) -> int | None:
        known = self._objects.get(name)
        return None if known is None or known.is_gone else known.number

    def items(self) -> Iterator[tuple[Name, T]]:
        return ((name, known.record) for name, known in self._objects.items() if not known.is_gone)

    # Lists.

    def begin_list(self, number: int) -> None:
        """Begins a list that shows everything as of this version."""
        self._listed = set()
        if number < self.known_until:
            # The cluster was restored from a backup and counts from there again.
            self.known_until = 0
            self._deleted.clear()
            for known in self._objects.values():
                known.number, known.is_gone = 0, False

    def add_listed(self, version: Version[T]) -> Change[T] | None:
        assert self._listed is not None
        if version.uid in self._deleted:
            return None
        if version.record is not None:
            self._listed.add(version.name)
        return self._put(version)

    def end_list(self, number: int) -> list[Change[T]]:
        """Drops the objects that were not listed, unless something later than the list is known about them."""
        listed, self._listed, self.known_until = self._listed or set(), None, number
        self._deleted = {uid: deleted for uid, deleted in self._deleted.items() if deleted > number}
        gone = [name for name, known in self._objects.items() if name not in listed and known.number <= number]
        return [Change(name, number, self._drop(name), None) for name in gone]

    # Watches, which show all changes in their order.

    def apply_change(self, version: Version[T]) -> Change[T] | None:
        self.known_until = max(self.known_until, version.number)
        return self._put(version)

    def apply_deletion(self, version: Version[T]) -> Change[T] | None:
        self.known_until = max(self.known_until, version.number)
        return self._drop_deleted(version)

    def skip_to(self, number: int) -> None:
        """Notes that nothing else has changed up to this version."""
        self.known_until = max(self.known_until, number)

    # Streams, which keep the changes of each object in order, but not those of several objects. They may run beside a
    # list.

    def apply_streamed_change(self, version: Version[T]) -> Change[T] | None:
        if version.name not in self._objects and version.number <= self.known_until:
            # The last list no longer had it.
            return None
        return self._put(version)

    def apply_streamed_deletion(self, version: Version[T]) -> Change[T] | None:
        if version.number > self.known_until:
            self._deleted[version.uid] = version.number
        return self._drop_deleted(version)

    # Answers.

    def apply_answer(self, version: Version[T]) -> None:
        """Learns how the API server stored an object, or read it."""
        known = self._objects.get(version.name)
        if version.record is None or version.number <= self.known_until or version.uid in self._deleted:
            return
        if known and version.number <= known.number:
            return
        self._store(version, is_confirmed=False)

    def mark_gone(self, name: Name, uid: str) -> None:
        """Learns that the object with this uid no longer exists."""
        known = self._objects.get(name)
        if known is not None and known.uid == uid:
            known.is_gone = True

    def _drop_deleted(self, version: Version[T]) -> Change[T] | None:
        known = self._objects.get(version.name)
        if known is None or (known.uid != version.uid and known.number > version.number):
            return None
        return Change(version.name, version.number, self._drop(version.name), None)

    def _put(self, version: Version[T]) -> Change[T] | None:
        known = self._objects.get(version.name)
        if known is not None and version.number < known.number:
            return None
        if version.record is None:
            return Change(version.name, version.number, self._drop(version.name), None) if known else None
        # A version that only an answer has shown is news, because passes expect a hint about what they have created.
        is_news = known is None or not known.is_confirmed or version.record != known.record
        before = self._store(version, is_confirmed=True)
        return Change(version.name, version.number, before, version.record) if is_news else None

    def _store(self, version: Version[T], *, is_confirmed: bool) -> T | None:
        assert version.record is not None
        known = self._objects.get(version.name)
        is_gone = known is not None and known.is_gone and known.uid == version.uid
        before = None if known is None else known.record
        if before is not None:
            self._after_removal(version.name, before)
        record = self._before_storing(version.name, version.record)
        self._objects[version.name] = _KnownObject(version.uid, version.number, record, is_confirmed, is_gone)
        return before

    def _drop(self, name: Name) -> T:
        record = self._objects.pop(name).record
        self._after_removal(name, record)
        return record

    # For indices and sums over the records.

    def _before_storing(self, name: Name, record: T) -> T:
        """Returns the record to store."""
        return record

    def _after_removal(self, name: Name, record: T) -> None:
        pass
