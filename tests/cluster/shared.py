"""One cluster for all files of a folder, built again for the next file when a test has broken it.

Tests that share a cluster are fast, and would all fail with the first that hurts it. Each file therefore asks for a
healthy one; what was installed into the old cluster is installed into the new one on demand.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Generic, Protocol, Self, TypeVar

REBUILT = "a shared cluster is built again"

_doubts: list[str] = []


def distrust(why: str) -> None:
    """Has the next file of this process get another cluster: what failed may have left half of something behind."""
    _doubts.append(why)


class Checked(Protocol):
    """stop() also takes down what is broken, by pid."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def problem(self) -> str | None:
        """Why no test should run in it; None if it is healthy. What may heal in a moment is waited for."""


Cluster = TypeVar("Cluster", bound=Checked)
Value = TypeVar("Value")


class Shared(Generic[Cluster]):
    """A context: its end takes the cluster down. `make` returns a cluster that is not started."""

    def __init__(self, make: Callable[[], Cluster]) -> None:
        self._make = make
        self._cluster: Cluster | None = None
        self._installed: dict[str, Any] = {}
        self._life = ExitStack()
        self._spoilt: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._life.close()
        finally:
            if self._cluster is not None:
                self._cluster.stop()

    def healthy(self) -> Cluster:
        """Returns the cluster, after building another if it is broken. Ask at the start of a file."""
        doubt = next(iter(_doubts), None)
        _doubts.clear()
        if self._cluster is not None and (problem := self._spoilt or doubt or self._cluster.problem()):
            warnings.warn(f"{REBUILT}: {problem}", RuntimeWarning, stacklevel=2)
            self._abandon(self._cluster)
        if self._cluster is None:
            self._cluster = self._started()
        return self._cluster

    def keep(self, name: str, make: Callable[[], AbstractContextManager[Value]]) -> Value:
        """Enters a context once in the cluster's life and returns its value; it is left before the cluster stops."""
        if name not in self._installed:
            try:
                self._installed[name] = self._life.enter_context(make())
            except Exception as error:
                # Half of it may be there.
                self._spoilt = f"{name} failed: {error}"
                raise
        value: Value = self._installed[name]
        return value

    def once(self, name: str, make: Callable[[], Value]) -> Value:
        """Calls `make` once in the cluster's life and returns its value."""
        return self.keep(name, lambda: nullcontext(make()))

    def _started(self) -> Cluster:
        """Tries twice: one slow moment must not fail a folder."""
        cluster = self._make()
        try:
            cluster.start()
        except Exception as error:
            warnings.warn(f"{REBUILT}: it did not start: {error}", RuntimeWarning, stacklevel=3)
            cluster = self._make()
            cluster.start()
        return cluster

    def _abandon(self, cluster: Cluster) -> None:
        """Takes it down before what runs in it, which would otherwise wait for answers."""
        life, self._life = self._life, ExitStack()
        self._cluster, self._installed, self._spoilt = None, {}, None
        try:
            cluster.stop()
            life.close()
        except Exception as error:
            warnings.warn(f"a broken cluster is left to the next run's sweep: {error}", RuntimeWarning, stacklevel=3)
