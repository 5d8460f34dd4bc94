"""Prints a run's progress as plain lines on stdout.

One replica of host 0 reports; all others hold a silent log, which only remembers the step. The heartbeat reads the
latest values from another thread.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tpu_contract.protocol import MOST_WARNINGS, ProgramMatch
from tpu_trainer.contract.findings import Finding
from tpu_trainer.contract.outcome import Best
from tpu_trainer.reporting.history import Sample
from tpu_trainer.task.logbook import LoggedCurve

MOST_SHOWN = 4
"""Logged values in a line of the log."""


class ProgressLog:
    """Prints, unless `silent`. step: the last step reported. start_step: the one that the run begins after. total: the
    one after which the run ends, as far as is known.

    checkpoint_step: the newest step that is safe in a checkpoint. last: the last sample. metrics: of the last
    evaluation. first_metrics: of this process's first evaluation, once there is another. means: the last values of
    what the task has logged. warnings: the first MOST_WARNINGS findings. best: the checkpoint with the best evaluation.
    rung: what the job on top of a ladder has measured in its first steps, once they are made.
    program: how the step's program is the one that the entry check has compiled; None if it was not compared.
    """

    def __init__(self, total_steps: int, silent: bool) -> None:
        self.step: int | None = None
        self.start_step: int | None = None
        self.checkpoint_step: int | None = None
        self.total = total_steps
        self._silent = silent
        self.last: Sample | None = None
        self.metrics: Mapping[str, float] = {}
        self.first_metrics: Mapping[str, float] = {}
        self.means: dict[str, float] = {}
        self._shown: dict[str, float] = {}
        self.warnings: tuple[str, ...] = ()
        self.best: Best | None = None
        self.rung: Mapping[str, Any] | None = None
        self.program: ProgramMatch | None = None

    def resume(self, step: int, line: str) -> None:
        self.step = self.checkpoint_step = step
        self.say(line)

    def add_sample(self, sample: Sample) -> None:
        self.step, self.last = sample.step, sample
        rate = sample.examples_per_second
        means = "".join(f", {name} {value:.6g}" for name, value in list(self._shown.items())[:MOST_SHOWN])
        speed = "" if rate is None else f", {rate:.1f} examples/s"
        self.say(f"step {sample.step}/{self.total}: loss {sample.losses[-1]:.6g}{means}{speed}")

    def add_curves(self, curves: Sequence[LoggedCurve]) -> None:
        """Adds what the task has logged; the next sample's line shows it."""
        for curve in curves:
            _, value = curve.points[-1]
            self.means[curve.name] = value
            if curve.shown:
                self._shown[curve.name] = value

    def add_finding(self, finding: Finding) -> None:
        """Adds a warning, which every later record repeats."""
        if len(self.warnings) < MOST_WARNINGS:
            self.warnings = (*self.warnings, finding.message)
        if not self._silent:
            print(f"warning: {finding.check}: {finding.message}", file=sys.stderr, flush=True)

    def add_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the metrics after `step` steps; prints nothing if the task has none."""
        if metrics:
            self.first_metrics = self.first_metrics or self.metrics
            self.metrics = metrics
            values = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
            self.say(f"step {step}/{self.total}: {values}")

    def say(self, line: str) -> None:
        if not self._silent:
            print(line, flush=True)
