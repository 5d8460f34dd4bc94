"""Where a run reports to: the log, the history and the operator.

Every replica has these outputs, and those of one replica write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpu_contract.protocol import ProgramMatch
from tpu_trainer.contract.findings import Finding
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.reporting.heartbeat import Heartbeat
from tpu_trainer.reporting.history import FirstLossTime, Sample
from tpu_trainer.reporting.loss_trend import LossTrend
from tpu_trainer.reporting.progress import ProgressLog
from tpu_trainer.reporting.reporter import Reporter
from tpu_trainer.reporting.rung import RungNumbers
from tpu_trainer.task.logbook import LoggedCurve

_OTHER_PROGRAM = (
    "the step is not the program that the entry check has compiled: its arguments, matrix products or collectives "
    "differ, so the condition StepFits says nothing about this run. Look for code that depends on the device, the time "
    "or a file, and for data whose shapes have changed"
)
_KNOWN_PROGRAMS = {
    ProgramMatch.SAME: "this is the program that the entry check has compiled",
    ProgramMatch.ALIKE: "the program has the arguments, products and collectives of the one that the entry check has "
    "compiled; other operations differ",
}


@dataclass(frozen=True)
class RunOutputs:
    """`heartbeat`: sends reports to the operator, if the run has that service. `is_reporter`: True in the one replica
    that reports. `losses`: of all steps of this process. `rung`: collects what a rung of a ladder measures, and the job
    on top of it; None in any other run."""

    progress: ProgressLog
    reporter: Reporter
    heartbeat: Heartbeat | None
    is_reporter: bool
    losses: LossTrend
    rung: RungNumbers | None = None

    def begin(self, step: int) -> None:
        self.progress.start_step = step
        self.reporter.begin(step)

    def add_first_loss(self, time: FirstLossTime) -> None:
        compiling = f", {time.compiling:.1f} s of them compiling" if time.compilations else ""
        self.progress.say(f"first loss after {time.seconds:.1f} s{compiling}")
        self.reporter.add_first_loss(time)

    def add_program(self, step: int, match: ProgramMatch | None) -> None:
        """Adds how the program of `step`, which repeats, is the one that the entry check has compiled."""
        self.progress.program = match
        if match is ProgramMatch.OTHER:
            self.add_finding(Finding("CompileCheck", step, _OTHER_PROGRAM))
        elif match is not None:
            self.progress.say(f"step {step}: {_KNOWN_PROGRAMS[match]}")

    def add_sample(self, sample: Sample, checkpoint_step: int | None) -> None:
        self.progress.checkpoint_step = checkpoint_step
        self.progress.add_sample(sample)
        self.reporter.add_sample(sample)
        self.losses.add(sample.losses)
        if self.rung is not None and sample.noise is not None:
            self.rung.add_noise(sample.noise)

    def add_curves(self, curves: Sequence[LoggedCurve]) -> None:
        """Adds what the task has logged since the last call."""
        self.progress.add_curves(curves)
        self.reporter.add_curves(curves)

    def add_finding(self, finding: Finding) -> None:
        """Reports each message once."""
        if finding.message in self.progress.warnings:
            return
        self.progress.add_finding(finding)
        self.reporter.add_finding(finding)
        if self.rung is not None:
            self.rung.add_finding(finding)

    def add_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.progress.add_evaluation(step, metrics)
        self.reporter.add_evaluation(step, metrics)

    def end(self, outcome: Outcome) -> None:
        # The heartbeat ends first, because the history may take a while to write.
        if self.heartbeat is not None:
            self.heartbeat.end(outcome)
        self.reporter.end(outcome)
