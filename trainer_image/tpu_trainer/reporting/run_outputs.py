"""Passes what the run says to everyone who listens: the log, the progress file, the history and the operator.

Every replica has one; all but one are silent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpu_trainer.contract.findings import Finding
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.reporting.heartbeat import Heartbeat
from tpu_trainer.reporting.history import FirstLoss, Sample
from tpu_trainer.reporting.progress import Progress
from tpu_trainer.reporting.reporter import Reporter
from tpu_trainer.reporting.rung import RungNumbers
from tpu_trainer.task.logbook import LoggedCurve


@dataclass(frozen=True)
class Telling:
    """`aloud`: this is the replica that reports; `heartbeat`: its reports to the operator, if it sends any; `rung`:
    what a rung of a ladder measures, None in any other run."""

    progress: Progress
    reporter: Reporter
    heartbeat: Heartbeat | None
    aloud: bool
    rung: RungNumbers | None = None

    def began(self, step: int) -> None:
        self.reporter.began(step)

    def first_loss(self, found: FirstLoss) -> None:
        compiling = f", {found.compiling:.1f} s of them compiling" if found.compilations else ""
        self.progress.say(f"first loss after {found.seconds:.1f} s{compiling}")
        self.reporter.first_loss(found)

    def sample(self, sample: Sample, checkpoint_step: int | None) -> None:
        self.progress.checkpoint_step = checkpoint_step
        self.progress.sample(sample)
        self.reporter.sample(sample)
        if self.rung is not None:
            self.rung.sample(sample)

    def logged(self, curves: Sequence[LoggedCurve]) -> None:
        """What the task has logged since the last time."""
        self.progress.logged(curves)
        self.reporter.logged(curves)

    def finding(self, finding: Finding) -> None:
        """Says the same thing once: a run that changes over to Lightning's Trainer begins again."""
        if finding.message in self.progress.warnings:
            return
        self.progress.finding(finding)
        self.reporter.finding(finding)
        if self.rung is not None:
            self.rung.finding(finding)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self.progress.evaluated(step, metrics)
        self.reporter.evaluated(step, metrics)

    def ended(self, outcome: Outcome) -> None:
        # Before the history, which may take a while to write.
        if self.heartbeat is not None:
            self.heartbeat.end(outcome)
        self.reporter.ended(outcome)
