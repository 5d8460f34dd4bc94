"""The result of one worker, from which the exit code, the termination message and the last log line are made."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tpu_trainer.contract import ExitCode
from tpu_trainer.errors import TrainerError


@dataclass(frozen=True)
class Outcome:
    """`step`, `metrics` and `examples_per_second` only as far as they were reached."""

    code: ExitCode
    message: str
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    examples_per_second: float | None = None

    @property
    def well(self) -> bool:
        """The run is done, or was stopped as asked: nothing failed."""
        return self.code in (ExitCode.Succeeded, ExitCode.Preempted)


def outcome_of(error: Exception, step: int | None = None) -> Outcome:
    """The outcome a failure leads to; its message is one line, or a traceback where code raised.

    An exception that is not a TrainerError escaped from the trainer itself.
    """
    if not isinstance(error, TrainerError):
        return Outcome(ExitCode.InternalError, _traceback(error), step)
    raised = error.__cause__ if error.code is ExitCode.UserError else None
    step = step if error.step is None else error.step
    return Outcome(error.code, _traceback(raised) if raised else str(error), step)


# Of several failures on a host the one that says most: a lost peer is what the others see of a failure
# elsewhere.
_TELLING = (
    ExitCode.UserError,
    ExitCode.BadSpec,
    ExitCode.NotFinite,
    ExitCode.Diverged,
    ExitCode.StorageDenied,
    ExitCode.StorageFailed,
    ExitCode.Hung,
    ExitCode.InternalError,
    ExitCode.PeerLost,
    ExitCode.Preempted,
    ExitCode.Succeeded,
)


def host_outcome(outcomes: Sequence[Outcome], died: bool) -> Outcome:
    """One outcome for the host's replicas; `died`: at least one process ended before its time."""
    failures = [outcome for outcome in outcomes if not outcome.well]
    if failures or (outcomes and not died):
        return min(failures or outcomes, key=lambda outcome: _TELLING.index(outcome.code))
    return Outcome(ExitCode.InternalError, "a replica's process ended without a word: killed, or crashed natively")


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()
