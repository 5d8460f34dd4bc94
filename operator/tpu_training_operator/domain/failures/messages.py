"""Failures as text: a worker's last words, shortened to fit the status or one line, and the failure in a sentence.

The trainer writes JSON into its termination message. For a loop of the user's own, which writes nothing, the kubelet
puts the end of the container's log there (`terminationMessagePolicy: FallbackToLogsOnError`).
"""

import re

from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.api.status import Failure
from tpu_training_operator.api.text import one_line
from tpu_training_operator.domain.cluster_state.observed import WorkerPod

LONGEST_MESSAGE = 1000
"""Characters of a failure's message; the status allows 1024."""
_LONGEST_LINE = 300
_LONGEST_PLACE = 100

_FRAME = re.compile(r'^ +File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<function>.*)$')
# Frames of Python's own files, of methods that it generates, of installed packages and of the trainer.
_NOT_THE_USERS = re.compile(r"^<(frozen|string)|/(site|dist)-packages/|/lib/python3[.\d]*/|/tpu_(contract|trainer)/")
_ENDED = re.compile(r"^(the worker was [^:]*\(exit code \d+\)): ")
_LEFT_OUT = "..."


def step_reached(pod: WorkerPod) -> int | None:
    return None if pod.trainer_message is None else pod.trainer_message.step


def with_ending(what: str, words: str, separator: str = ": ") -> str:
    """Joins what happened and as much of the end of `words` as fits."""
    room = LONGEST_MESSAGE - len(what) - len(separator)
    return f"{what}{separator}{shorten(words, room)}" if words and room > 0 else shorten(what)


def shorten(text: str, room: int = LONGEST_MESSAGE) -> str:
    """Shortens the text to `room` characters, cut between lines unless a single line is too long.

    A traceback ends with what was wrong, so the end is kept. Frames outside the user's code are dropped first.
    """
    if len(text) <= room:
        return text
    lines = _without_foreign_frames(text.splitlines())
    tail: list[str] = []
    left = room - len(_LEFT_OUT) - 1
    for line in reversed(lines):
        left -= len(line) + 1
        if left < -1:
            break
        tail.insert(0, line)
    if not tail:
        return text[-max(0, room) :] if room > 0 else ""
    return "\n".join(tail if len(tail) == len(lines) else [_LEFT_OUT, *tail])


def find_error(text: str) -> str:
    """Returns the error at the end of a traceback and its place in the user's code, or else the last line.

    The last line of a worker that was killed shows where it was, not what was wrong.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    frames = [(index, frame) for index, line in enumerate(lines) if (frame := _FRAME.match(line))]
    error = next((line for line in lines[frames[-1][0] :] if not line.startswith(" ")), None) if frames else None
    if error is None:
        ended = _ENDED.match(lines[0]) if len(lines) > 1 else None
        return one_line(f"{ended[1]}; its last line: {lines[-1]}" if ended else lines[-1], _LONGEST_LINE)
    users = [frame for _, frame in frames if not _NOT_THE_USERS.search(frame["file"])]
    where = f" ({users[-1]['file'].rpartition('/')[2]}:{users[-1]['line']})" if users else ""
    where = where if len(where) <= _LONGEST_PLACE else ""
    return one_line(error, _LONGEST_LINE - len(where)) + where


def _without_foreign_frames(lines: list[str]) -> list[str]:
    """Drops frames outside the user's code. A frame is a line with the place and the lines indented below it."""
    user_lines, is_foreign = [], False
    for line in lines:
        if frame := _FRAME.match(line):
            is_foreign = bool(_NOT_THE_USERS.search(frame["file"]))
        elif not line.startswith("    "):
            is_foreign = False
        if not is_foreign:
            user_lines.append(line)
    return user_lines


def describe_place(failure: Failure) -> str:
    """Returns the place of the failed worker, such as "slice 0 host 2 on node-1"."""
    what = "the entry check" if failure.attempt == 0 else f"slice {failure.slice} host {failure.host}"
    return what + (f" on {failure.node}" if failure.node else "")


def describe_attempt(failure: Failure) -> str:
    """Returns a suffix such as ", attempt 2"; empty for the entry check, which comes before the first attempt."""
    return f", attempt {failure.attempt}" if failure.attempt else ""


def describe_class(failure: Failure) -> str:
    """Returns class, reason and exit code, such as "Infrastructure (Killed, exit code 137)". A reason that equals the
    class is left out."""
    details = [failure.reason] if failure.reason != failure.failure_class else []
    if failure.exit_code is not None:
        details.append(f"exit code {failure.exit_code}")
    return f"{failure.failure_class} ({', '.join(details)})" if details else str(failure.failure_class)


def gist(failure: Failure) -> str:
    """Returns the message in one line. A hang's message starts with the finding; the stacks follow."""
    if failure.failure_class is FailureClass.HANG:
        return failure.message.partition("\n")[0]
    return find_error(failure.message)


def describe(failure: Failure) -> str:
    """Describes in one sentence which worker failed, where and how."""
    node = f" on {failure.node}" if failure.node else ""
    what = "the entry check" if failure.attempt == 0 else f"slice {failure.slice} host {failure.host}"
    where = f"{what} ({failure.pod}{node})"
    return f"{where} failed with {describe_class(failure)}: {gist(failure)}"
