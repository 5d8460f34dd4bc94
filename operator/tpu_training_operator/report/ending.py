"""How the run ended: the verdict beside its name, and, if it failed, what went wrong.

A history knows only what its own worker knows. That worker may have been killed, or have lost a peer that failed first;
who watched the job as a whole knows more, and says it in a `JobEnd`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from tpu_training_operator.report.blocks import lines_of, section
from tpu_training_operator.report.history import History
from tpu_training_operator.report.markup import tag

ENDINGS = {
    "Succeeded": ("well", "Succeeded"),
    "Preempted": ("pause", "Stopped on request"),
    "UserError": ("bad", "Failed in the task's code"),
    "NotFinite": ("bad", "Loss not finite"),
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
class Log:
    """The end of a worker's log: up to its last words, which are the failure's message."""

    name: str
    lines: Sequence[str]


@dataclass(frozen=True)
class JobEnd:
    """How the job ended as a whole. The rest is of the worker that failed first; empty unless `failed`.

    `cause`: the name of its exit code, or of its failure; `where`: the worker and the kind of its failure; `gist`: what
    was wrong, in one line; `message`: all that it said.
    """

    failed: bool
    cause: str = ""
    where: str = ""
    gist: str = ""
    message: str = ""
    log: Log | None = None


@dataclass(frozen=True)
class Verdict:
    """`kind`: the class that colours it."""

    kind: str
    words: str


def verdict(history: History, end: JobEnd | None) -> Verdict:
    """A success without a finite loss is none: its weights are of no use."""
    outcome, finite = history.outcome, history.recorded.ends_finite
    if end is not None and end.failed:
        kind, words = ENDINGS.get(end.cause, ("bad", "Failed"))
        return Verdict("bad", words if kind == "bad" else "Failed")
    if outcome is None:
        return Verdict("running", "Running") if finite else Verdict("bad", "Running, loss not finite")
    kind, words = ENDINGS.get(outcome.code, ("bad", outcome.code))
    if kind != "bad" and not finite:
        return Verdict("bad", f"{words}, loss not finite")
    return Verdict(kind, words)


def failed(history: History, end: JobEnd | None) -> bool:
    if end is not None:
        return end.failed
    return history.outcome is not None and ENDINGS.get(history.outcome.code, ("bad", ""))[0] == "bad"


def said(history: History, end: JobEnd | None) -> Element | None:
    """What the run says of its end, below its name."""
    if end is not None and end.failed:
        return tag(
            "p", tag("b", end.gist), " " if end.where else None, tag("span", end.where, class_="where"), class_="said"
        )
    message = history.outcome.message if history.outcome else ""
    if not message and not history.recorded.losses:
        message = "No step has been done yet."
    # A traceback has a section of its own, and its last line says what was wrong.
    *before, last = message.splitlines() or [""]
    if before:
        return tag("p", tag("b", last), class_="said")
    return tag("p", last, class_="said") if last else None


def what_went_wrong(history: History, end: JobEnd | None) -> Element | None:
    """The whole error and the log before it, as far as they say more than the line below the run's name."""
    if not failed(history, end):
        return None
    if end is not None:
        message, log = end.message, end.log
    else:
        message, log = history.outcome.message if history.outcome else "", None
    told = lines_of(message, "Error message", "bad") if "\n" in message else None
    if told is None and log is None:
        return None
    return section("failure", "What went wrong", told, *([] if log is None else _log(log)))


def _log(log: Log) -> list[Element]:
    title = tag("p", "The log before it: ", tag("span", log.name, class_="where"), class_="caption")
    return [title, lines_of("\n".join(log.lines), f"End of {log.name}")]
