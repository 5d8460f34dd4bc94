"""What the run says while it runs: plain lines on stdout, and JSON lines for whoever started it.

One replica of host 0 reports (`replica` chooses it); all others hold a silent Progress, which only remembers
the step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from tpu_trainer.termination import finite

Phase = Literal["starting", "training", "evaluating", "done"]


class Progress:
    """Appends to `file` (none if None) and prints, unless `silent`. `step` is the last step reported."""

    def __init__(self, total_steps: int, file: Path | None, silent: bool) -> None:
        self.step: int | None = None
        self._total = total_steps
        self._file = None if silent else file
        self._silent = silent
        self._loss: float | None = None
        self._rate: float | None = None

    def starting(self, line: str) -> None:
        self._say(line)
        self._append("starting", [])

    def training(self, step: int, losses: Sequence[float], examples_per_second: float | None) -> None:
        """`losses`: the global loss of every step since the previous report, the newest last; never empty."""
        self.step, self._loss, self._rate = step, losses[-1], examples_per_second
        speed = "" if examples_per_second is None else f", {examples_per_second:.1f} examples/s"
        self._say(f"step {step}/{self._total}: loss {losses[-1]:.6g}{speed}")
        self._append("training", losses)

    def evaluating(self, examples: int) -> None:
        """Nothing is said where there is nothing to evaluate on."""
        if examples:
            self._say(f"evaluating on {examples} examples")
            self._append("evaluating", [])

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics after `step` steps; nothing is said where the task has none."""
        if metrics:
            values = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
            self._say(f"step {step}/{self._total}: {values}")
            # The step last: a metric of that name must not take its place.
            record = {name: finite(value) for name, value in metrics.items()} | {"step": step}
            self._append("evaluating", [], evaluation=record)

    def done(self) -> None:
        """The line for people is the outcome itself, which `entry` prints on every host."""
        self._append("done", [])

    def _say(self, line: str) -> None:
        if not self._silent:
            print(line, flush=True)

    def _append(self, phase: Phase, losses: Sequence[float], **more: object) -> None:
        if self._file is None:
            return
        record = {
            "phase": phase,
            "step": self.step or 0,
            "totalSteps": self._total,
            "loss": finite(self._loss),
            "losses": [finite(loss) for loss in losses],
            "examplesPerSecond": self._rate,
            **more,
        }
        # Opened per line: reports are seconds apart, and a closed file is a flushed one.
        with self._file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record, allow_nan=False) + "\n")
