"""Storage that lags, lies about sizes, refuses, is full, loses its answers, or is changed while it is read.

`Faulty` stands between a store and who uses it; each fault is one class, and several may apply at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.trainer.checkpoint.stores import OPERATIONS, Killed
from tpu_trainer.contract.errors import StorageError
from tpu_trainer.storage.store import ObjectStore

Names = Callable[[str], bool]
"""Which objects a fault concerns."""


class Fault:
    """Does nothing: `call` passes the operation on."""

    def call(self, operation: str, arguments: tuple[Any, ...], do: Callable[[], Any]) -> Any:
        return do()


class Faulty:
    """`store` as somebody sees it to whom `faults` happen, the first of them outermost."""

    def __init__(self, store: ObjectStore, *faults: Fault) -> None:
        self.uri = store.uri
        self._store, self._faults = store, faults

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        assert operation in OPERATIONS

        return partial(self._call, operation)

    def _call(self, operation: str, *arguments: Any) -> Any:
        def step(place: int) -> Any:
            if place == len(self._faults):
                return getattr(self._store, operation)(*arguments)
            return self._faults[place].call(operation, arguments, lambda: step(place + 1))

        return step(0)


@dataclass
class Lag(Fault):
    """The first `listings` lack the objects, or show them with `size`."""

    names: Names
    listings: int
    size: int | None = None

    def call(self, operation: str, arguments: tuple[Any, ...], do: Callable[[], Any]) -> Any:
        if operation != "list" or self.listings == 0:
            return do()
        self.listings -= 1
        lagging: dict[str, int] = do()
        for name in filter(self.names, list(lagging)):
            del lagging[name]
            if self.size is not None:
                lagging[name] = self.size
        return lagging


class Blind(Fault):
    """No listing of checkpoints ever has a COMMIT, or a size."""

    def call(self, operation: str, arguments: tuple[Any, ...], do: Callable[[], Any]) -> Any:
        if operation != "list" or arguments[0] != "step-":
            return do()
        return {name: 0 for name in do() if not name.endswith("/COMMIT")}


@dataclass
class Refuse(Fault):
    """`times` operations of these kinds fail, after `first` of them. `done`: the storage does what it was asked, and
    only the answer is lost."""

    operations: Iterable[str]
    times: int = 1
    first: int = 0
    done: bool = False

    def call(self, operation: str, arguments: tuple[Any, ...], do: Callable[[], Any]) -> Any:
        if operation not in self.operations or self.times == 0:
            return do()
        if self.first:
            self.first -= 1
            return do()
        self.times -= 1
        if self.done:
            do()
        raise StorageError(f"the storage fails: cannot {operation} {arguments[0]}")


@dataclass
class Kill(Fault):
    """The process ends in place of the operation after `operations` others. Once: its successor lives."""

    operations: int

    def call(self, operation: str, arguments: tuple[Any, ...], do: Callable[[], Any]) -> Any:
        self.operations -= 1
        if self.operations == -1:
            raise Killed
        return do()


@dataclass
class Full(Fault):
    """There is room for `room` bytes in all."""

    store: ObjectStore
    room: int

    def call(self, operation: str, arguments: tuple[Any, ...], do: Callable[[], Any]) -> Any:
        if operation in ("put", "put_if_absent") and arguments[1]:
            used = self.store.list("")
            if sum(used.values()) - used.get(arguments[0], 0) + len(arguments[1]) > self.room:
                raise StorageError(f"cannot write {arguments[0]}: No space left on device")
        return do()


@dataclass
class Meanwhile(Fault):
    """Before each read something else happens, as it does while a large file comes slowly; at most `times`."""

    happens: Callable[[], None]
    times: int

    def call(self, operation: str, arguments: tuple[Any, ...], do: Callable[[], Any]) -> Any:
        if operation == "read" and self.times:
            self.times -= 1
            self.happens()
        return do()
