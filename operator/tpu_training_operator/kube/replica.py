"""What this process knows of the objects of one kind: told by a watch, and by the answers to its own requests.

Versions decide. A cluster counts the changes of a kind with one counter, and every version of an object is the count at
its change. So the newest version of an object is the truth as far as it is known, and whatever is not newer than what
the watch has told is ignored: if the object were still like that, or still there, the watch would have said so.

An answer may be ahead of the watch. It stands until the watch has caught up, which also tells what came after it.
Nothing that is deleted comes back: no later answer is about it, and an earlier one is ignored.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

# Namespace and name.
Name = tuple[str, str]


@dataclass(frozen=True)
class Version(Generic[T]):
    """One version of one object. `kept`: what this process keeps of it; None if it is not of interest."""

    name: Name
    uid: str
    number: int
    kept: T | None


@dataclass(frozen=True)
class Change(Generic[T]):
    """The watch told something new. `before`, `after`: None if the object was not known, or is not any more.
    `only_listed`: it was there when the informer began, so perhaps nothing has happened to it."""

    name: Name
    number: int
    before: T | None
    after: T | None
    only_listed: bool = False


@dataclass(slots=True)
class _Entry(Generic[T]):
    uid: str
    number: int
    kept: T
    is_told: bool
    """By the watch or a list; False: only an answer says so."""
    is_gone: bool = False
    """The API server said so, and the watch has not yet."""


class Replica(Generic[T]):
    """`told`: every change up to this version is known."""

    def __init__(self) -> None:
        self.told = 0
        self._entries: dict[Name, _Entry[T]] = {}
        self._listed: set[Name] | None = None
        # By uid, the versions of deletions that are later than `told`.
        self._deleted: dict[str, int] = {}

    def get(self, name: Name) -> T | None:
        entry = self._entries.get(name)
        return None if entry is None or entry.is_gone else entry.kept

    def uid(self, name: Name) -> str | None:
        entry = self._entries.get(name)
        return None if entry is None or entry.is_gone else entry.uid

    def items(self) -> Iterator[tuple[Name, T]]:
        return ((name, entry.kept) for name, entry in self._entries.items() if not entry.is_gone)

    # What a list shows.

    def listing(self, number: int) -> None:
        """A list begins that shows everything as of this version."""
        self._listed = set()
        if number < self.told:
            # The cluster was restored from a backup and counts from there again.
            self.told = 0
            self._deleted.clear()
            for entry in self._entries.values():
                entry.number, entry.is_gone = 0, False

    def listed(self, version: Version[T]) -> Change[T] | None:
        assert self._listed is not None
        if version.uid in self._deleted:
            return None
        if version.kept is not None:
            self._listed.add(version.name)
        return self._put(version)

    def list_ended(self, number: int) -> list[Change[T]]:
        """What was not listed is deleted, unless something later than the list is known about it."""
        listed, self._listed, self.told = self._listed or set(), None, number
        self._deleted = {uid: deleted for uid, deleted in self._deleted.items() if deleted > number}
        gone = [name for name, entry in self._entries.items() if name not in listed and entry.number <= number]
        return [Change(name, number, self._drop(name), None) for name in gone]

    # What a watch tells: all changes in their order.

    def changed(self, version: Version[T]) -> Change[T] | None:
        self.told = max(self.told, version.number)
        return self._put(version)

    def deleted(self, version: Version[T]) -> Change[T] | None:
        self.told = max(self.told, version.number)
        return self._drop_deleted(version)

    def passed(self, number: int) -> None:
        """Nothing else has changed up to this version."""
        self.told = max(self.told, number)

    # What a stream tells that keeps the changes of each object in order, but not those of several objects. It may run
    # beside a list.

    def streamed(self, version: Version[T]) -> Change[T] | None:
        if version.name not in self._entries and version.number <= self.told:
            # The last list did not show it any more.
            return None
        return self._put(version)

    def streamed_deletion(self, version: Version[T]) -> Change[T] | None:
        if version.number > self.told:
            self._deleted[version.uid] = version.number
        return self._drop_deleted(version)

    # What the API server answers.

    def answered(self, version: Version[T]) -> None:
        """This is how the API server stored the object, or read it."""
        known = self._entries.get(version.name)
        if version.kept is None or version.number <= self.told or version.uid in self._deleted:
            return
        if known and version.number <= known.number:
            return
        self._store(version, is_told=False)

    def not_found(self, name: Name, uid: str) -> None:
        """The object with this uid does not exist any more."""
        entry = self._entries.get(name)
        if entry is not None and entry.uid == uid:
            entry.is_gone = True

    def _drop_deleted(self, version: Version[T]) -> Change[T] | None:
        entry = self._entries.get(version.name)
        if entry is None or (entry.uid != version.uid and entry.number > version.number):
            return None
        return Change(version.name, version.number, self._drop(version.name), None)

    def _put(self, version: Version[T]) -> Change[T] | None:
        entry = self._entries.get(version.name)
        if entry is not None and version.number < entry.number:
            return None
        if version.kept is None:
            return Change(version.name, version.number, self._drop(version.name), None) if entry else None
        # What only an answer has said is news when it is told: passes rely on hearing of what they have created.
        is_news = entry is None or not entry.is_told or version.kept != entry.kept
        before = self._store(version, is_told=True)
        return Change(version.name, version.number, before, version.kept) if is_news else None

    def _store(self, version: Version[T], *, is_told: bool) -> T | None:
        assert version.kept is not None
        entry = self._entries.get(version.name)
        is_gone = entry is not None and entry.is_gone and entry.uid == version.uid
        before = None if entry is None else entry.kept
        if before is not None:
            self._left(version.name, before)
        kept = self._entering(version.name, version.kept)
        self._entries[version.name] = _Entry(version.uid, version.number, kept, is_told, is_gone)
        return before

    def _drop(self, name: Name) -> T:
        kept = self._entries.pop(name).kept
        self._left(name, kept)
        return kept

    # For indices and sums over what is kept.

    def _entering(self, name: Name, kept: T) -> T:
        """What to keep of it after all."""
        return kept

    def _left(self, name: Name, kept: T) -> None:
        pass
