"""What the device's runtime counts, step by step: compilations, operations on the CPU, reads, executions.

Held by `doctor`. Every finding is put down to one cause: an operation on the CPU reads from the device and cuts the
step in two, so its reads and executions are not reported again as such.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from tpu_trainer.backends.base import Counters
from tpu_trainer.doctor.findings import Voice
from tpu_trainer.doctor.shapes import Shapes, difference, shapes_of

WARM_UP_STEPS = 3
"""Steps of this process that may compile: the first; the second, when the optimizer has state; and one to spare."""

WINDOW_STEPS = 20
"""Steps over which rates are taken; all that is counted costs too much to be asked for in every step."""

MOST_PER_STEP = 0.1
"""Events per step that are nobody's concern: a read every tenth step is how values should be read."""

_NO_SHAPES: Shapes = {}


class Counting(Protocol):
    """What is asked of a Backend here."""

    def compilations(self) -> int: ...

    def counters(self) -> Counters: ...


class StepCounts:
    """`compilations`: those made by steps after the warm-up. `executions`: how many a step of the trainer's makes."""

    def __init__(self, backend: Counting, voice: Voice, executions: int) -> None:
        self.compilations = 0
        self.steps = 0
        self._backend = backend
        self._voice = voice
        self._executions = executions
        self._first = _NO_SHAPES
        self._recompilations: Counter[str] = Counter()
        self._window_steps = 0
        self._window = Counters()
        self._compiled, self._compile_seconds = 0, 0.0

    def after_step(self, step: int, batch: Any) -> None:
        self.steps += 1
        if self.steps == 1:
            self._first = shapes_of(batch)
        if self.steps < WARM_UP_STEPS:
            return
        if self.steps == WARM_UP_STEPS:
            self._window = self._read()
            return
        if self._backend.compilations() != self._compiled:
            self._recompiled(step, batch)
        self._window_steps += 1
        if self._window_steps == WINDOW_STEPS:
            now = self._read()
            self._rates(step, minus(now, self._window))
            self._window, self._window_steps = now, 0

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """What is counted while the block runs is not a step's."""
        in_steps = minus(self._read(), self._window)
        yield
        self._window = minus(self._read(), in_steps)

    def _read(self) -> Counters:
        now = self._backend.counters()
        self._compiled, self._compile_seconds = now.compilations, now.compile_seconds
        return now

    def _recompiled(self, step: int, batch: Any) -> None:
        compiled, compile_seconds = self._compiled, self._compile_seconds
        now = self._read()
        self.compilations += now.compilations - compiled
        seconds = now.compile_seconds - compile_seconds
        change = difference(self._first, shapes_of(batch))
        cause = "program" if change is None else "shapes"
        self._recompilations[cause] += 1
        number = self._recompilations[cause]
        times = "" if number == 1 else f" (the {number}th time)"
        start = f"step {step} compiled a new program, {seconds:.1f} s, on every replica{times}: "
        self._voice.say(
            "RecompilationAfterWarmUp",
            step,
            start + (_SAME_SHAPES if change is None else _NEW_SHAPES.format(change=change)),
            cause=cause,
            severity=number,
        )

    def _rates(self, step: int, counted: Counters) -> None:
        def per_step(events: float) -> float:
            return events / WINDOW_STEPS

        for name, count in counted.fallbacks.items():
            if (rate := per_step(count)) > MOST_PER_STEP:
                message = _FALLBACK.format(name=name, rate=rate)
                self._voice.say("CpuFallback", step, message, cause=name, severity=rate)
        reads = per_step(counted.host_reads - sum(counted.fallbacks.values()))
        if reads > MOST_PER_STEP:
            self._voice.say("HostSync", step, _HOST_SYNC.format(rate=reads), severity=reads)
        cuts = per_step(counted.executions - counted.host_reads) - self._executions
        if cuts > MOST_PER_STEP:
            message = _MID_STEP.format(rate=cuts + self._executions, own=self._executions)
            self._voice.say("MidStepExecution", step, message, severity=cuts)


def minus(later: Counters, earlier: Counters) -> Counters:
    """What was counted between the two."""
    return Counters(
        compilations=later.compilations - earlier.compilations,
        compile_seconds=later.compile_seconds - earlier.compile_seconds,
        executions=later.executions - earlier.executions,
        host_reads=later.host_reads - earlier.host_reads,
        fallbacks={name: count - earlier.fallbacks.get(name, 0) for name, count in later.fallbacks.items()},
    )


_NEW_SHAPES = (
    "{change}. Every shape that was not there before costs a compilation: pad all batches to one shape, or to one of a "
    "few, and leave out incomplete ones"
)
_SAME_SHAPES = (
    "the batch has the shapes of the first step, so the program itself has changed. Look for an `if`, a loop or a "
    "slice that depends on a Python number, for a value read every few steps, for a learning rate that becomes exactly "
    "0 or 1; PT_XLA_DEBUG_LEVEL=1 prints where each compilation came from"
)
_FALLBACK = (
    "{name} has no implementation on the device and ran on the CPU, {rate:.1f} times a step: each time the step is cut "
    "in two and its data goes to the host and back. Use operations whose result has a fixed shape, such as torch.where "
    "instead of a boolean index"
)
_HOST_SYNC = (
    "{rate:.1f} values a step are read from the device by the task, and each time the device stands still until the "
    "host has seen the value. Leave .item(), float(), print() and comparisons of tensors out of the step, or do them "
    "every tenth step only; losses are reported without them"
)
_MID_STEP = (
    "{rate:.1f} programs a step are sent to the device where {own} would do: something in the task ends the traced "
    "program half-way. Leave torch_xla.sync(), xm.mark_step() and xm.optimizer_step() to the trainer"
)
