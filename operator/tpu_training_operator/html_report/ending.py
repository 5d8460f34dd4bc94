"""Shows how the run ended: a badge beside its name and, if it failed, what went wrong.

One worker writes the history. It may have been killed, or have lost a peer that failed first; a `JobEnd` adds what is
known about the job as a whole.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tpu_training_operator.api.status import RungStatus
from tpu_training_operator.html_report.history import History

ENDINGS = {
    "Succeeded": ("well", "Succeeded"),
    "Preempted": ("pause", "Stopped on request"),
    "UserError": ("bad", "Failed in the task's code"),
    "NotFinite": ("bad", "Loss not finite"),
    "CheckpointUnusable": ("bad", "Cannot continue its checkpoints"),
    "PeerLost": ("bad", "Lost a peer"),
    "InternalError": ("bad", "Failed in the trainer"),
    "Hung": ("bad", "Hung"),
    "SliceUnfit": ("bad", "Slice did not pass its check"),
    "StorageFailed": ("bad", "Storage failed"),
    "Diverged": ("bad", "Replicas diverged"),
    "StorageDenied": ("bad", "Storage denied"),
    "BadSpec": ("bad", "Refused the run spec"),
}
"""The CSS class and the text for each name of a trainer's exit code."""


@dataclass(frozen=True)
class LogTail:
    """The end of a worker's log, before its last words, which are the failure's message."""

    name: str
    lines: Sequence[str]


class JobResult(StrEnum):
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELLED = "Cancelled"


@dataclass(frozen=True)
class JobEnd:
    """How the job ended as a whole (`state`), and the worker that failed first; its fields are empty if none failed.

    `cause`: the name of its exit code, or of its failure; `where`: the worker and the kind of its failure; `gist`: what
    was wrong, in one line; `message`: its whole message.
    """

    state: JobResult
    cause: str = ""
    where: str = ""
    gist: str = ""
    message: str = ""
    log: LogTail | None = None
    rungs: Sequence[RungStatus] = ()

    @property
    def failed(self) -> bool:
        return self.state is JobResult.FAILED


@dataclass(frozen=True)
class Badge:
    """The state beside the run's name. `kind`: its CSS class."""

    kind: str
    words: str


def badge(history: History, end: JobEnd | None) -> Badge:
    """Returns the run's badge. A success without a finite loss counts as bad: its weights are useless."""
    if end is not None and end.failed:
        kind, words = ENDINGS.get(end.cause, ("bad", "Failed"))
        return Badge("bad", words if kind == "bad" else "Failed")
    if history.outcome is not None:
        kind, words = ENDINGS.get(history.outcome, ("bad", history.outcome))
    elif end is not None:
        # The worker was killed, or is a user's own loop that does not record its end.
        kind, words = "well" if end.state is JobResult.SUCCEEDED else "pause", end.state.value
    else:
        kind, words = "running", "Running"
    if kind != "bad" and not history.ends_finite:
        return Badge("bad", f"{words}, loss not finite")
    return Badge(kind, words)


def has_failed(history: History, end: JobEnd | None) -> bool:
    if end is not None:
        return end.failed
    return history.outcome is not None and ENDINGS.get(history.outcome, ("bad", ""))[0] == "bad"


def closing_words(history: History, end: JobEnd | None) -> tuple[str, str]:
    """Returns the run's last words, which are shown below its name; of a failure its emphasised part, and the rest of
    that line."""
    if not has_failed(history, end):
        return _without_metrics(history), ""
    message = _message(history, end)
    if message and "\n" not in message:
        first, stop, rest = message.partition(". ")
        return first + stop.rstrip(), f" {rest}" if rest else ""
    return (end.gist if end else "") or (message.splitlines() or ["It left no message."])[-1], ""


def failure(history: History, end: JobEnd | None) -> tuple[str, LogTail | None]:
    """Returns a failure's message, unless the line below the run's name has it all, and the log before it."""
    if not has_failed(history, end):
        return "", None
    message = _message(history, end)
    return message if "\n" in message else "", end.log if end else None


def _message(history: History, end: JobEnd | None) -> str:
    return history.message if end is None else end.message


def _without_metrics(history: History) -> str:
    """Returns the last words of a successful run without its metrics, which are shown elsewhere."""
    text = history.message
    if not text and not history.losses:
        return "No step has been done yet."
    names = [name for evaluation in history.evaluations[-1:] for name in evaluation.metrics]
    for name in ["loss", *names]:
        text = re.sub(rf", {re.escape(name)} [-+.\w]+(?=$|[,;])", "", text)
    return text
