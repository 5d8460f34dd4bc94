"""Stops the processes of the user's own loop after the same step, once one of them was asked to stop.

They use no collective: it would hang if only some processes called it, and would get mixed up with the loop's own. They
use torch.distributed's store instead. A process that is asked to stop proposes a step that is still ahead, the first
proposal counts, and every process reads the store in every step. They agree because processes that train together are
less than one step apart: a step's all-reduce ends on no process before all have begun it.
"""

from __future__ import annotations

import math
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

AHEAD_SECONDS = 1.0
"""Seconds from a request to the last step: a program that queues work on a device runs some steps ahead of it."""

MOST_AHEAD = 20
"""Most calls of `step` from a request to the last step."""

_KEY = "tpu-trainer/stop-after-step"

Agree = Callable[[bool], bool]
"""Takes whether this process was asked to stop, and returns whether any was; every process calls it in every step."""


class Store(Protocol):
    """The part of torch.distributed's Store that is used here."""

    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


class StopRequest:
    """True once this process got SIGTERM. From `listen` to `forget` no other handler runs."""

    def __init__(self) -> None:
        self._requested = False
        self._before: Any = None
        self._installed = False

    def __call__(self) -> bool:
        return self._requested

    def listen(self) -> None:
        # Python runs handlers in the main thread only, and refuses to install them from another.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
            self._installed = True

    def forget(self) -> None:
        # A process may leave from another thread.
        if self._installed and threading.current_thread() is threading.main_thread():
            # None: a handler that was not installed from Python.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
            self._installed = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._requested = True


class Agreement:
    """Decides after every step whether it is the last. `agree`: the user's own way to agree, instead of the store."""

    def __init__(
        self, requested: Callable[[], bool], agree: Agree | None, find_store: Callable[[], Store | None]
    ) -> None:
        self._requested, self._agree, self._find_store = requested, agree, find_store
        self._last: int | None = None

    def reached(self, step: int, step_seconds: float) -> bool:
        """Returns whether all processes end after `step`. `step_seconds`: a step's usual time, 0 if that is unknown."""
        if self._agree is not None:
            if self._agree(self._requested()):
                self._last = step
        elif self._last is None:
            self._last = self._last_step(step, step_seconds)
        return self._last is not None and step >= self._last

    def _last_step(self, step: int, step_seconds: float) -> int | None:
        store = self._find_store()
        if store is None:
            return step if self._requested() else None
        try:
            if self._requested():
                return int(store.compare_set(_KEY, "", str(step + steps_ahead(step_seconds))))
            return int(store.get(_KEY)) if store.check([_KEY]) else None
        except RuntimeError:
            # The process that held the store is gone. The next collective fails, and says why.
            return None


def steps_ahead(step_seconds: float) -> int:
    """Returns 1 for slow steps, because the grace period is short, and more for fast ones."""
    return max(1, min(MOST_AHEAD, math.ceil(AHEAD_SECONDS / step_seconds))) if step_seconds > 0 else 1


def torch_store() -> Store | None:
    """Returns torch.distributed's store; None while this process is alone, or has not joined the others."""
    if world_size() == 1:
        return None
    store: Store = sys.modules["torch.distributed"].distributed_c10d._get_default_store()
    return store


def world_size() -> int:
    """Returns how many processes torch.distributed joins; 1 without it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 1
    return int(distributed.get_world_size())


def count_xla_devices() -> int | None:
    """Returns how many devices torch_xla joins, over all hosts; 0 while this process has not used it, None if its
    release does not say."""
    torch_xla = sys.modules.get("torch_xla")
    if torch_xla is None:
        return 0
    try:
        # Asking an idle runtime would start it, and take the chips.
        if not torch_xla._XLAC._xla_runtime_is_initialized():
            return 0
        runtime = torch_xla.runtime
        # With SPMD a process counts as one, and its program runs on all devices.
        return int(runtime.global_runtime_device_count() if runtime.is_spmd() else runtime.world_size())
    except AttributeError:
        return None
