"""What the device's runtime counts, step by step: compilations, operations on the CPU, reads, executions.

Every event is reported once: an operation on the CPU also reads from the device and cuts the step in two, so those
reads and executions are not reported as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from tpu_contract.protocol import Check
from tpu_trainer.contract.clock import WARM_UP_STEPS
from tpu_trainer.contract.findings import FindingReporter
from tpu_trainer.gang.backends.base import Backend, Counters

WINDOW_STEPS = 20
"""Steps over which rates are measured; reading all counters is too expensive for every step."""

MOST_PER_STEP = 0.1
"""The highest rate of events per step without a warning: values should be read every tenth step at most."""

Shapes = Mapping[str, str]
"""Where a tensor is in the batch ("batch[0]", "batch['tokens']") -> its shape and dtype ("[8, 64] int64")."""


class StepCounts:
    """Counts events in steps. `compilations`: in steps after the warm-up. `executions`: how many the trainer itself
    makes per step, infinite if unknown."""

    def __init__(self, backend: Backend, findings: FindingReporter, executions: float) -> None:
        self.compilations = 0
        self.steps = 0
        self._backend = backend
        self._findings = findings
        self._executions = executions
        self._first: Shapes = {}
        self._recompilations: Counter[str] = Counter()
        self._window_steps = 0
        self._set_aside = 0
        self._window = Counters()
        self._compiled, self._compile_seconds = 0, 0.0

    def after_step(self, step: int, batch: Any) -> None:
        self.steps += 1
        if self.steps == 1:
            self._first = shapes_of(batch)
        # A replica that is ahead must not count what it compiles after the step.
        with self._backend.quiet():
            if self.steps == WARM_UP_STEPS:
                self._window = self._read()
            elif self.steps > WARM_UP_STEPS:
                if self._backend.compilations() != self._compiled:
                    self._report_recompilation(step, batch)
                self._window_steps += 1
                if self._window_steps == WINDOW_STEPS:
                    self._judge_window(step)

    def close_window(self, step: int) -> None:
        """Judges the rates of the steps since the last window, however few."""
        with self._backend.quiet():
            if self._window_steps:
                self._judge_window(step)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Excludes events in the block from the steps' counts."""
        with self._backend.quiet():
            in_steps = minus(self._read(), self._window)
        yield
        with self._backend.quiet():
            self._window = minus(self._read(), in_steps)
        self._set_aside += 1

    def _read(self) -> Counters:
        now = self._backend.counters()
        self._compiled, self._compile_seconds = now.compilations, now.compile_seconds
        return now

    def _judge_window(self, step: int) -> None:
        now = self._read()
        self._judge_rates(step, minus(now, self._window), self._window_steps)
        self._window, self._window_steps, self._set_aside = now, 0, 0

    def _report_recompilation(self, step: int, batch: Any) -> None:
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
        message = start + (_SAME_SHAPES if change is None else _NEW_SHAPES.format(change=change))
        self._findings.report(Check.RECOMPILATION, step, message, cause=cause, severity=number)

    def _judge_rates(self, step: int, counted: Counters, steps: int) -> None:
        # A single event in a short window is no rate. Neither is one event for each block that was set aside, since the
        # runtime counts a little late.
        most = max(MOST_PER_STEP, (1 + self._set_aside) / steps)
        for name, count in counted.fallbacks.items():
            if (rate := count / steps) > most:
                message = _FALLBACK.format(name=name, rate=rate)
                self._findings.report(Check.CPU_FALLBACK, step, message, cause=name, severity=rate)
        reads = (counted.host_reads - sum(counted.fallbacks.values())) / steps
        if reads > most:
            self._findings.report(Check.HOST_SYNC, step, _HOST_SYNC.format(rate=reads), severity=reads)
        # Subtract whole numbers first: 2.1 - 2 is more than 0.1.
        cuts = (counted.executions - counted.host_reads - self._executions * steps) / steps
        if cuts > most:
            message = _MID_STEP.format(rate=cuts + self._executions, own=self._executions)
            self._findings.report(Check.MID_STEP_EXECUTION, step, message, severity=cuts)


def minus(later: Counters, earlier: Counters) -> Counters:
    """Returns the counts between the two."""
    return Counters(
        compilations=later.compilations - earlier.compilations,
        compile_seconds=later.compile_seconds - earlier.compile_seconds,
        executions=later.executions - earlier.executions,
        host_reads=later.host_reads - earlier.host_reads,
        fallbacks={name: count - earlier.fallbacks.get(name, 0) for name, count in later.fallbacks.items()},
    )


def shapes_of(batch: Any, at: str = "batch") -> Shapes:
    """Returns the shapes of all tensors in nested lists, tuples and mappings, by which the compiler knows a batch."""
    if isinstance(batch, Tensor):
        return {at: f"{list(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"}
    if isinstance(batch, Mapping):
        parts = [(f"{at}[{key!r}]", value) for key, value in batch.items()]
    elif isinstance(batch, tuple | list):
        parts = [(f"{at}[{index}]", value) for index, value in enumerate(batch)]
    else:
        parts = []
    return {place: shape for at_part, value in parts for place, shape in shapes_of(value, at_part).items()}


def difference(first: Shapes, now: Shapes) -> str | None:
    """Describes where `now` differs from `first`; None if it does not."""
    changes = [
        f"{place} is {now.get(place, 'missing')}; in the first step it was {first.get(place, 'missing')}"
        for place in dict.fromkeys([*first, *now])
        if first.get(place) != now.get(place)
    ]
    return "; ".join(changes) or None


_NEW_SHAPES = (
    "{change}. Every new shape costs a compilation: pad all batches to one shape, or to one of a few, and drop "
    "incomplete ones"
)
_SAME_SHAPES = (
    "the batch has the shapes of the first step, so the program itself has changed. Look for an `if`, a loop or a "
    "slice that depends on a Python number, for a value read or logged every few steps, for a number of the loss that "
    "becomes 0 or 1 in float32 or equal to another one. PT_XLA_DEBUG_LEVEL=1 prints where each compilation came from, "
    "with torch.compile TORCH_LOGS=recompiles"
)
_FALLBACK = (
    "{name} has no implementation on the device and ran on the CPU, {rate:.1f} times a step: each time the step is cut "
    "in two and its data goes to the host and back. Use operations whose result has a fixed shape, such as torch.where "
    "instead of a boolean index"
)
_HOST_SYNC = (
    "{rate:.1f} values a step are read from the device by the task, and each time the device idles until the host has "
    "seen the value. Keep .item(), float(), print() and comparisons of tensors out of the step, or use them every "
    "tenth step only; losses are reported without them"
)
_MID_STEP = (
    "{rate:.1f} programs a step are sent to the device instead of {own}: something in the task ends the traced program "
    "early. Leave torch_xla.sync(), xm.mark_step() and xm.optimizer_step() to the trainer"
)
