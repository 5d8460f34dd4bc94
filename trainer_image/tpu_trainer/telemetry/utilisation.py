"""The utilisation of one run: the model's operations, counted once, against the slice's peak. Held by `instruments`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from tpu_trainer.spec import RunSpec
from tpu_trainer.telemetry.flops import CountFlops
from tpu_trainer.telemetry.peak import mfu


class Utilisation:
    """`terms`: how many processes' operations make up a step; 1 where each traces the global batch (see Backend)."""

    def __init__(self, spec: RunSpec, terms: int) -> None:
        self._spec = spec
        self._terms = terms
        self._counted: CountFlops | None = None

    def counting(self) -> AbstractContextManager[object]:
        """Around the forward and backward passes of a step: those of the first are counted, the others are left alone.

        All steps have the same shapes. Nothing is counted where there is no peak to compare with.
        """
        if self._counted is not None or self._spec.hardware != "TPU":
            return nullcontext()
        self._counted = CountFlops()
        return self._counted

    def of(self, step_seconds: float | None) -> float | None:
        """Model flops utilisation, 0..1, at so many seconds per step; None on CPU, or before a step is known."""
        if self._counted is None or step_seconds is None:
            return None
        where = self._spec.slice
        return mfu(self._counted.flops * self._terms, where.replicas, step_seconds, where.generation)
