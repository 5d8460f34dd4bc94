"""What an operator remembers of a job from pass to pass. Kept by `runtime.reconciler`, read by the planner.

Nothing rests on it: who has no notes writes a status or asks for events once more than was needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True)
class PodEvents:
    """What the events of some pods said when they were `asked` for: a line for each pod's name."""

    asked: datetime
    lines: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Notes:
    """`written`: when this operator last wrote the job's status."""

    written: datetime | None = None
    events: PodEvents | None = None
