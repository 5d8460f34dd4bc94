"""Shows how the run ended: a badge beside its name and, if it failed, what went wrong.

One worker writes the history. It may have been killed, or have lost a peer that failed first; a `JobEnd` adds what is
known about the job as a whole.
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
    rungs: Sequence[RungRow] = ()

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
    outcome, finite = history.outcome, history.recorded.ends_finite
    if end is not None and end.failed:
        kind, words = ENDINGS.get(end.cause, ("bad", "Failed"))
        return Badge("bad", words if kind == "bad" else "Failed")
    if outcome is not None:
        kind, words = ENDINGS.get(outcome.code, ("bad", outcome.code))
    elif end is not None:
        # The worker was killed, or is a user's own loop that does not record its end.
        kind, words = "well" if end.state is JobResult.SUCCEEDED else "pause", end.state.value
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
    """Returns the run's last words, which are shown below its name."""
    if not has_failed(history, end):
        text = _without_metrics(history)
        return tag("p", text, class_="said sentence") if text else None
    where = tag("p", end.where, class_="where") if end is not None and end.where else None
    first, rest = _in_short(_message(history, end), end)
    return tag("div", tag("p", tag("b", first), rest), where, class_="said")


def what_went_wrong(history: History, end: JobEnd | None) -> Element | None:
    """Shows the whole error and the log before it; None if the line below the run's name has it all."""
    if not has_failed(history, end):
        return None
    message, log = _message(history, end), None if end is None else end.log
    lines = lines_of(message, "Error message", "bad") if "\n" in message else None
    if lines is None and log is None:
        return None
    return section("failure", "What went wrong", lines, *([] if log is None else _log(log)))


def _message(history: History, end: JobEnd | None) -> str:
    if end is not None:
        return end.message
    return history.outcome.message if history.outcome else ""


def _in_short(message: str, end: JobEnd | None) -> tuple[str, str]:
    """Returns the emphasised part of the message and the rest of its line. Longer messages are shown elsewhere."""
    if message and "\n" not in message:
        first, stop, rest = message.partition(". ")
        return first + stop.rstrip(), f" {rest}" if rest else ""
    if end is not None and end.gist:
        return end.gist, ""
    return (message.splitlines() or ["It left no message."])[-1], ""


def _without_metrics(history: History) -> str:
    """Returns the last words of a successful run without its metrics, which are shown elsewhere."""
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
