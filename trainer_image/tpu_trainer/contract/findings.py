"""What the doctor tells people, each thing once: a warning that repeats every minute is soon ignored."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import StrEnum

WORSE = 10.0
"""A cause is told again when it has become this many times worse."""


class Check(StrEnum):
    """Everything the doctor looks for; docs/doctor.md says what each means and what to do."""

    RECOMPILATION = "RecompilationAfterWarmUp"
    CPU_FALLBACK = "CpuFallback"
    HOST_SYNC = "HostSync"
    MID_STEP_EXECUTION = "MidStepExecution"
    PADDING = "Padding"
    INPUT_BOUND = "InputBound"
    STRAGGLER_HOST = "StragglerHost"
    NOT_FINITE = "NotFinite"
    UNEQUAL_COMPILATIONS = "UnequalCompilations"


@dataclass(frozen=True)
class Finding:
    """`check`: a Check, or the name of another part of the trainer that warns; `step`: steps done when it was found;
    `message`: what was seen, in numbers, and what to do about it."""

    check: str
    step: int
    message: str


class Voice:
    def __init__(self, tell: Callable[[Finding], None]) -> None:
        self._tell = tell
        self._told: dict[tuple[str, Hashable], float] = {}

    def say(self, check: Check, step: int, message: str, *, cause: Hashable = None, severity: float = 1.0) -> None:
        """Tells the first finding of a check and cause, and later ones only if `severity` is WORSE times as high."""
        told = self._told.get((check, cause))
        if told is None or severity >= WORSE * told:
            self._told[check, cause] = severity
            self._tell(Finding(check, step, message))
