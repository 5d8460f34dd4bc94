"""Derives numbers from a run's steps: throughput, model flops utilisation and the gradient noise scale."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tpu_contract.run_spec import RunSpec
from tpu_trainer.reporting.history import NoisePoint

WARM_STEPS = 3
"""XLA compiles in a process's first step, and again in its second, when the optimizer has state; 3 leaves a spare."""

TERAFLOPS = {"v2": 46, "v3": 123, "v4": 275, "v5e": 197, "v5p": 459, "v6e": 918, "tpu7x": 2307}
"""Peak dense bf16 TFLOP/s of one chip, from the "System architecture" pages of the Cloud TPU documentation.

A float32 model is measured against the same peak: it is what the hardware offers, and what bf16 would gain.
"""

REPLICAS_PER_CHIP = {"v2": 2, "v3": 2, "tpu7x": 2}
"""Devices that a framework sees per chip, each with half of the peak; one on every other generation."""

NOISE_DECAY = 0.98
"""The decay of the noise scale's running means: a memory of 50 steps. One step's estimate is mostly noise."""

NOISE_STEPS = 10
"""Steps before a noise scale is reported."""


class Throughput:
    """Examples per second of the steps that compile nothing: after the first WARM_STEPS of this process.

    `rate` and `step_seconds` are means over all of these steps, None before there are any.
    """

    def __init__(self, global_batch: int, step: int = 0) -> None:
        self._global_batch = global_batch
        self._warm = step + WARM_STEPS
        self._start: tuple[int, float] | None = None
        self.step_seconds: float | None = None

    @property
    def rate(self) -> float | None:
        return None if self.step_seconds is None else self._global_batch / self.step_seconds

    def arrived(self, step: int, now: float) -> None:
        """Adds the arrival of the results of `step`. `now`: seconds on a clock that runs only while steps are made."""
        if self._start is None:
            self._start = (step, now) if step >= self._warm else None
            return
        first, since = self._start
        if step > first and now > since:
            self.step_seconds = (now - since) / (step - first)


class FlopCounter(TorchDispatchMode):
    """Counts the floating point operations of a block in `flops`, while it runs or is traced.

    Matrix products, convolutions and attention count, with 2 operations per multiply-add; element-wise work does not,
    as in published utilisations. The formulas are torch's, but not its FlopCounterMode: that decomposes composite
    operations, so the traced graph would differ from the graph of the later steps.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += int(count(*args, **kwargs, out_val=result))
        return result


class Utilisation:
    """The model's operations, counted once, over the slice's peak.

    `terms`: how many processes' operations make up a step; 1 where each traces the global batch (see Backend).
    """

    def __init__(self, spec: RunSpec, terms: int) -> None:
        self._spec = spec
        self._terms = terms
        self._counted: FlopCounter | None = None

    def counting(self) -> AbstractContextManager[object]:
        """Returns a context for forward and backward of every step, which counts the first: all have the same shapes.

        Without a peak to compare with, it counts none.
        """
        if self._counted is not None or self._spec.hardware != "TPU":
            return nullcontext()
        self._counted = FlopCounter()
        return self._counted

    def of(self, step_seconds: float | None) -> float | None:
        """Returns the model flops utilisation, 0..1; None on CPU, or while the time of a step is unknown."""
        if self._counted is None or step_seconds is None:
            return None
        where = self._spec.slice
        return mfu(self._counted.flops * self._terms, where.replicas, step_seconds, where.generation)


def mfu(flops_per_step: float, replicas: int, step_seconds: float, generation: str) -> float | None:
    """Returns the model flops utilisation, 0..1: the model's operations over what the slice could do in that time.

    flops_per_step: of all replicas together; rematerialised operations count once. PaLM (Chowdhery et al. 2022),
    appendix B. None for a generation without a known peak, or if nothing was measured.
    """
    teraflops = TERAFLOPS.get(generation)
    if teraflops is None or step_seconds <= 0 or flops_per_step <= 0:
        return None
    replica_peak = teraflops * 1e12 / REPLICAS_PER_CHIP.get(generation, 1)
    return flops_per_step / (replica_peak * replicas * step_seconds)


class NoiseMeter:
    """The simple noise scale S / |G|^2 of McCandlish et al. 2018, appendix A.1, in examples.

    With the gradient of b examples (one replica's) and the gradient of B (their mean over all replicas),
    |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b) and S = (|g_b|^2 - |g_B|^2) / (1/b - 1/B) are unbiased. Their ratio is
    not, and for a single step it may even be negative, so each is averaged over steps before the division.
    """

    def __init__(self, replica_batch: int, global_batch: int) -> None:
        """Takes the examples behind a replica's gradient, accumulated passes included, and behind the global one."""
        self._small, self._big = replica_batch, global_batch
        self._noise = self._signal = 0.0
        self._steps = 0
        self._since: list[tuple[float, float]] = []

    def add(self, replica_square: float, global_square: float) -> None:
        """Adds one step's |g_b|^2, averaged over the replicas, and |g_B|^2. Skips a step that is not finite."""
        small, big = self._small, self._big
        if big <= small:
            return
        signal = (big * global_square - small * replica_square) / (big - small)
        noise = (replica_square - global_square) / (1 / small - 1 / big)
        if not (math.isfinite(signal) and math.isfinite(noise)):
            return
        # Both start at 0 and lag alike, which leaves their ratio as it is: no bias correction is needed.
        self._signal += (1 - NOISE_DECAY) * (signal - self._signal)
        self._noise += (1 - NOISE_DECAY) * (noise - self._noise)
        self._steps += 1
        self._since.append((noise, signal))

    def take(self, step: int) -> NoisePoint | None:
        """Returns the sums over the steps since the last call, the newest of which is `step`; None without any."""
        since, self._since = self._since, []
        return NoisePoint(step, len(since), *map(sum, zip(*since, strict=True))) if since else None

    @property
    def value(self) -> float | None:
        """Returns the noise scale in examples; None with one replica, in the first steps, and while the gradient is
        lost in the noise."""
        if self._steps < NOISE_STEPS or self._signal <= 0:
            return None
        return max(0.0, self._noise) / self._signal
