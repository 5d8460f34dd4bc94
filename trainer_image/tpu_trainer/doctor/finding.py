"""One thing that the doctor has to say to a person. Made by the checks, carried by progress, report and log."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """`check`: which check found it (RecompilationAfterWarmUp, InputBound, ...); `step`: steps done when it was found;
    `message`: what was seen, in numbers, and what to do about it."""

    check: str
    step: int
    message: str
