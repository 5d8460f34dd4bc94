"""How the run ended: the verdict beside its name, and, if it failed, what went wrong.

A history knows only what its own worker knows. That worker may have been killed, or have lost a peer that failed first;
who watched the job as a whole knows more, and says it in a `JobEnd`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from xml.etree.ElementTree import Element

from tpu_training_operator.html_report.history import History
from tpu_training_operator.html_report.ladder import RungRow
from tpu_training_operator.html_report.markup import lines_of, section, tag

ENDINGS = {
    "Succeeded": ("well", "Succeeded"),
    "Preempted": ("pause", "Stopped on request"),
    "UserError": ("bad", "Failed in the task's code"),
    "NotFinite": ("bad", "Loss not finite"),
    "CheckpointUnusable": ("bad", "Cannot continue its checkpoints"),
    "PeerLost": ("bad", "Lost a peer"),
    "InternalError": ("bad", "Failed in the trainer"),
    "Hung": ("bad", "Hung"),
    "StorageFailed": ("bad", "Storage failed"),
    "Diverged": ("bad", "Replicas diverged"),
    "StorageDenied": ("bad", "Storage denied"),
    "BadSpec": ("bad", "Refused the run spec"),
}
"""By the name of the trainer's exit code: the class that colours it, and the words."""


@dataclass(frozen=True)
class LogTail:
    """The end of a worker's log: up to its last words, which are the failure's message."""

    name: str
    lines: Sequence[str]


class JobState(StrEnum):
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELLED = "Cancelled"


@dataclass(frozen=True)
class JobEnd:
    """How the job ended as a whole. The rest is of the worker that failed first, and empty if none has.

    `cause`: the name of its exit code, or of its failure; `where`: the worker and the kind of its failure; `gist`: what
    was wrong, in one line; `message`: all that it said.
    """

    state: JobState
    cause: str = ""
    where: str = ""
    gist: str = ""
    message: str = ""
    log: LogTail | None = None
    rungs: Sequence[RungRow] = ()

    @property
    def failed(self) -> bool:
        return self.state is JobState.FAILED


@dataclass(frozen=True)
class Badge:
    """`kind`: the class that colours it."""

    kind: str
    words: str


def badge(history: History, end: JobEnd | None) -> Badge:
    """A success without a finite loss is none: its weights are of no use."""
    outcome, finite = history.outcome, history.recorded.ends_finite
    if end is not None and end.failed:
        kind, words = ENDINGS.get(end.cause, ("bad", "Failed"))
        return Badge("bad", words if kind == "bad" else "Failed")
    if outcome is not None:
        kind, words = ENDINGS.get(outcome.code, ("bad", outcome.code))
    elif end is not None:
        # Its worker was killed, or is a loop of the user's own that says nothing of its end.
        kind, words = "well" if end.state is JobState.SUCCEEDED else "pause", end.state.value
    else:
        kind, words = "running", "Running"
    if kind != "bad" and not finite:
        return Badge("bad", f"{words}, loss not finite")
    return Badge(kind, words)


def has_failed(history: History, end: JobEnd | None) -> bool:
    if end is not None:
        return end.failed
    return history.outcome is not None and ENDINGS.get(history.outcome.code, ("bad", ""))[0] == "bad"


def closing_words(history: History, end: JobEnd | None) -> Element | None:
    """What the run says of its end, below its name."""
    if not has_failed(history, end):
        text = _without_metrics(history)
        return tag("p", text, class_="said sentence") if text else None
    where = tag("p", end.where, class_="where") if end is not None and end.where else None
    first, rest = _in_short(_message(history, end), end)
    return tag("div", tag("p", tag("b", first), rest), where, class_="said")


def what_went_wrong(history: History, end: JobEnd | None) -> Element | None:
    """The whole error and the log before it, as far as they say more than the line below the run's name."""
    if not has_failed(history, end):
        return None
    message, log = _message(history, end), None if end is None else end.log
    told = lines_of(message, "Error message", "bad") if "\n" in message else None
    if told is None and log is None:
        return None
    return section("failure", "What went wrong", told, *([] if log is None else _log(log)))


def _message(history: History, end: JobEnd | None) -> str:
    if end is not None:
        return end.message
    return history.outcome.message if history.outcome else ""


def _in_short(message: str, end: JobEnd | None) -> tuple[str, str]:
    """What stands out, and what follows it: a message of one line is told here whole, a traceback below."""
    if message and "\n" not in message:
        first, stop, rest = message.partition(". ")
        return first + stop.rstrip(), f" {rest}" if rest else ""
    if end is not None and end.gist:
        return end.gist, ""
    return (message.splitlines() or ["It left no message."])[-1], ""


def _without_metrics(history: History) -> str:
    """The last words of a run that went well; its metrics are shown elsewhere, and there may be many."""
    text = history.outcome.message if history.outcome else ""
    if not text and not history.recorded.losses:
        return "No step has been done yet."
    names = [name for evaluation in history.recorded.evaluations[-1:] for name in evaluation.metrics]
    for name in ["loss", *names]:
        text = re.sub(rf", {re.escape(name)} [-+.\w]+(?=$|[,;])", "", text)
    return text


def _log(log: LogTail) -> list[Element]:
    title = tag("p", "The log before it: ", tag("span", log.name, class_="where"), class_="caption")
    return [title, lines_of("\n".join(log.lines), f"End of {log.name}")]
