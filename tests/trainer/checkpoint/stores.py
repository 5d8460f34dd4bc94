"""Stores for tests: one in memory, one whose writer dies after so many operations, one whose writers take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tpu_trainer.storage.store import MissingError, ObjectStore

OPERATIONS = ("list", "read", "put", "put_if_absent", "delete")
PATIENCE = 60.0
"""Seconds after which a test gives up on a writer; no result depends on it."""


class MemoryStore:
    """What a store promises, and nothing else. `objects` may be damaged by a test."""

    uri = "memory"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def list(self, prefix: str) -> dict[str, int]:
        return {name: len(data) for name, data in self.objects.items() if name.startswith(prefix)}

    def read(self, name: str) -> bytes:
        if name not in self.objects:
            raise MissingError(f"{name} is not there")
        return self.objects[name]

    def put(self, name: str, data: bytes) -> None:
        self.objects[name] = data

    def put_if_absent(self, name: str, data: bytes) -> bool:
        return self.objects.setdefault(name, data) is data

    def delete(self, name: str) -> None:
        self.objects.pop(name, None)


class Killed(BaseException):
    """The writer's process ends here: no handler of the trainer may catch it."""


class Intercepted:
    """Passes every operation on to `store` after `before` was called with its name."""

    def __init__(self, store: ObjectStore, before: Callable[[str], None]) -> None:
        self.uri = store.uri
        self._store, self._before = store, before

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        assert operation in OPERATIONS

        def call(*arguments: Any) -> Any:
            self._before(operation)
            return getattr(self._store, operation)(*arguments)

        return call


def dying_after(store: ObjectStore, operations: int) -> ObjectStore:
    """`store` for a writer that is killed instead of doing operation number `operations` (from 0)."""
    left = iter(range(operations))

    def count(_: str) -> None:
        if next(left, None) is None:
            raise Killed

    return Intercepted(store, count)


def counting(store: ObjectStore) -> tuple[ObjectStore, list[str]]:
    """`store`, and the names of the operations done through it, filled as they happen."""
    done: list[str] = []
    return Intercepted(store, done.append), done


class Turns:
    """Several writers on one store, whose operations follow each other as `order` says (indices of writers).

    A turn is one operation and all that the writer does up to its next. Turns of a writer that has ended fall away;
    after the last of the order the remaining ones go on.
    """

    def __init__(self, store: ObjectStore, order: Sequence[int]) -> None:
        self._store = store
        self._order: Iterator[int] = iter(order)
        self._changed = threading.Condition()
        self._running: set[int] = set()
        self._turn: int | None = None
        self._acting: int | None = None

    def run(self, writers: Sequence[Callable[[ObjectStore], None]]) -> None:
        """Runs all of them to their ends."""
        self._running = set(range(len(writers)))
        self._pass_on()
        threads = [threading.Thread(target=self._write, args=(index, writer)) for index, writer in enumerate(writers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)

    def _write(self, index: int, writer: Callable[[ObjectStore], None]) -> None:
        try:
            writer(Intercepted(self._store, lambda _: self._await_turn(index)))
        finally:
            with self._changed:
                self._running.discard(index)
                if self._turn == index:
                    self._pass_on()

    def _await_turn(self, index: int) -> None:
        with self._changed:
            if self._acting == index:
                self._pass_on()
            assert self._changed.wait_for(lambda: self._turn == index, PATIENCE)
            self._acting = index

    def _pass_on(self) -> None:
        with self._changed:
            self._acting = None
            following = (index for index in self._order if index in self._running)
            self._turn = next(following, min(self._running, default=None))
            self._changed.notify_all()
