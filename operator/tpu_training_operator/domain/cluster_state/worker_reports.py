"""Values that an operator holds in memory about a job: the reports of its workers, and its own notes.

No plan needs them to be correct. An operator without notes only writes a status or reads events once more than needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from tpu_contract.protocol import ProgramMatch, ReportPhase
from tpu_training_operator.api.status import BestCheckpoint
from tpu_training_operator.domain.job.trainer_report import ReportedRung


@dataclass(frozen=True)
class WorkerReport:
    """The latest report of an attempt. `attempt` and `pod_uid` belong to the pod whose token came with the report,
    whatever the report itself says. `start_seconds`: of each phase of the worker's start up to now, where that is
    known. `start_step`: the step that the attempt begins after; None from a worker that has
    not read its checkpoint. Numbers other than counts are texts with six digits. `exact`: the step was counted,
    not computed from a percentage, which changes only after many steps. `rung`: what the first steps of the job on top
    of a ladder have shown."""

    attempt: int
    pod_uid: str
    received: datetime
    phase: ReportPhase
    step: int
    start_step: int | None = None
    total_steps: int | None = None
    examples_per_second: str | None = None
    loss: str | None = None
    metrics: Mapping[str, str] | None = None
    checkpoint_step: int | None = None
    best_checkpoint: BestCheckpoint | None = None
    estimated_remaining_seconds: int | None = None
    warnings: tuple[str, ...] = ()
    program: ProgramMatch | None = None
    stacks: str | None = None
    start_seconds: Mapping[str, float] = field(default_factory=dict)
    exact: bool = True
    rung: ReportedRung | None = None
    packages_sha256: str | None = None


@dataclass(frozen=True)
class Inbox:
    """Everything that this operator has received from one job. `listening_since`: None if it does not listen; earlier
    reports went to another operator. `last_loss`: when a report was last lost through no fault of a worker.
    `between_writes`: the least time between status writes that only a report causes."""

    listening_since: datetime | None = None
    last_loss: datetime | None = None
    report: WorkerReport | None = None
    asked_for_stacks: datetime | None = None
    between_writes: timedelta = timedelta(seconds=5)


EMPTY_INBOX = Inbox()


@dataclass(frozen=True)
class Reporting:
    """Where workers report to: `https://<service>.<namespace>.svc:<port>`, and the certificate (PEM) to trust there."""

    url: str
    ca_certificate: str


@dataclass(frozen=True)
class PodEvents:
    """The events of some pods when they were `asked` for: one line by pod name."""

    asked: datetime
    lines: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Notes:
    """What this operator remembers about a job between two passes. `written`: when it last wrote the job's status.
    `published`: the addresses of its workers that it has published. `placeholder_warnings`: the reasons it has reported
    why the gang cannot ask for a better slice.
    """

    written: datetime | None = None
    events: PodEvents | None = None
    published: str | None = None
    placeholder_warnings: frozenset[str] = frozenset()
