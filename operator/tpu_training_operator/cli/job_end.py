"""What the report page of a local run knows besides the history: how the job ended, and the log of who failed first.

The history is written by one worker. It may have been killed before it could, and it does not see why a peer failed.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from tpu_training_operator.api.status import Failure
from tpu_training_operator.api.text import plain
from tpu_training_operator.domain.failures.messages import failed_why, gist
from tpu_training_operator.report.ending import ENDINGS, JobEnd, JobState, Log

RESULT = "result.json"

MOST_LINES = 40
"""Of a log, before what the worker said last."""

_MOST_BYTES = 1 << 16
# The trainer's own last line of a log begins so.
_LAST_WORDS = re.compile(rf"^({'|'.join(ENDINGS)}): ")


def job_end(directory: Path) -> JobEnd | None:
    """How the run in this directory ended; None if it has not, or if nobody knows."""
    try:
        result = json.loads((directory / RESULT).read_bytes())
        state = JobState(result["state"])
        failure = Failure.read(result["failure"]) if state is JobState.FAILED and result["failure"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if failure is None:
        return JobEnd(state, gist=str(result.get("message", "")))
    # The directory may have been moved since, with all that is in it.
    log = directory / Path(result.get("logs", "")).name / failure.pod / "log.txt"
    words, before = _parts(_end_of(log))
    said = words or failure.message
    return JobEnd(
        state,
        cause=failure.reason,
        where=_where(failure),
        gist=gist(failure),
        # A worker that was killed has no last words; Kubernetes takes the end of its log for them.
        message="" if not words and before and before[-1] in said else said,
        log=Log(str(log.relative_to(directory)), before) if before else None,
    )


def _where(failure: Failure) -> str:
    after = "" if failure.step is None else f", after step {failure.step}"
    return f"slice {failure.slice} host {failure.host}, attempt {failure.attempt}{after}: {failed_why(failure)}"


def _end_of(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _MOST_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return plain(text).rstrip().splitlines()


def _parts(lines: Sequence[str]) -> tuple[str, list[str]]:
    """What the trainer said last, and the lines before it."""
    begin = max((index for index, line in enumerate(lines) if _LAST_WORDS.match(line)), default=len(lines))
    words = "\n".join(lines[begin:])
    before = list(lines[:begin])[-MOST_LINES:]
    return _LAST_WORDS.sub("", words), before
