"""What a worker reports on the way, and where it reports to. Made by the progress service, read by the planner."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from tpu_training_operator.api.status import ReportPhase


@dataclass(frozen=True)
class Report:
    """What the reporting worker of one attempt last said. `attempt` and `pod_uid` are those of the pod that the token
    was made for, not what the worker says of itself. Numbers that are not counts are texts of six digits.
    `exact`: the step is one that was counted, and not a part of the whole that moves every so many steps."""

    attempt: int
    pod_uid: str
    received: datetime
    phase: ReportPhase
    step: int
    total_steps: int | None = None
    examples_per_second: str | None = None
    loss: str | None = None
    metrics: Mapping[str, str] | None = None
    checkpoint_step: int | None = None
    estimated_remaining_seconds: int | None = None
    warnings: tuple[str, ...] = ()
    stacks: str | None = None
    exact: bool = True


@dataclass(frozen=True)
class Inbox:
    """All that this operator has heard of one job. `listening_since`: None where nobody listens; what was said before
    it went to an operator that is no more. `unheard`: when a report for this job last failed through no fault of a
    worker's. `between_writes`: how often the status is written for a report's sake."""

    listening_since: datetime | None = None
    unheard: datetime | None = None
    report: Report | None = None
    asked_for_stacks: datetime | None = None
    between_writes: timedelta = timedelta(seconds=5)


NOTHING_HEARD = Inbox()


@dataclass(frozen=True)
class Reporting:
    """Where workers report to: `https://<service>.<namespace>.svc:<port>`, and the certificate (PEM) to trust there."""

    url: str
    ca_certificate: str
