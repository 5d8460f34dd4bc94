"""Sees to it that the doctor says everything once: a warning that comes back every minute is soon not read any more.

Held by `doctor`, used by all its checks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from tpu_trainer.doctor.finding import Finding

WORSE = 10.0
"""A cause is spoken of again when it has become this many times worse."""


class Voice:
    def __init__(self, tell: Callable[[Finding], None]) -> None:
        self._tell = tell
        self._told: dict[tuple[str, Hashable], float] = {}

    def say(self, check: str, step: int, message: str, *, cause: Hashable = None, severity: float = 1.0) -> None:
        """Tells the first finding of a check and cause, and later ones only where `severity` is ten times that."""
        told = self._told.get((check, cause))
        if told is None or severity >= WORSE * told:
            self._told[check, cause] = severity
            self._tell(Finding(check, step, message))
