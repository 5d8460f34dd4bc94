"""What the report page of a local run knows besides the history: how the job ended, and the log of who failed first.

The history is written by one worker. It may have been killed before it could, and it does not see why a peer failed.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpu_training_operator.api.status import Failure, RungStatus
from tpu_training_operator.api.text import plain
from tpu_training_operator.domain.failures.messages import failed_when, failed_where, failed_why, gist
from tpu_training_operator.html_report.ending import ENDINGS, JobEnd, JobState, LogTail
from tpu_training_operator.html_report.ladder import RungRow

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
        last = Failure.read(result["failure"]) if state is JobState.FAILED and result["failure"] else None
        # After a failure of an earlier attempt the job went on; something else has ended it.
        failure = last if last is not None and last.attempt == result["attempts"] else None
        rungs = rungs_of(result.get("rungs"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if failure is None:
        return JobEnd(state, gist=str(result.get("message", "")), rungs=rungs)
    # The directory may have been moved since, with all that is in it.
    log = directory / Path(result.get("logs", "")).name / failure.pod / "log.txt"
    words, before = _split_last_words(_read_end(log))
    said = words or failure.message
    return JobEnd(
        state,
        cause=failure.reason,
        where=_where(failure),
        gist=gist(failure),
        # A worker that was killed has no last words; Kubernetes takes the end of its log for them.
        message="" if not words and before and before[-1] in said else said,
        log=LogTail(str(log.relative_to(directory)), before) if before else None,
        rungs=rungs,
    )


def rungs_of(rungs: Any) -> tuple[RungRow, ...]:
    """Of the job's ladder; `rungs`: as in its status."""
    return tuple(_rungs(rungs))


def _rungs(rungs: Any) -> Iterator[RungRow]:
    for rung in map(RungStatus.read, rungs if isinstance(rungs, list) else ()):
        yield RungRow(
            slice=rung.slice,
            chips=rung.chips,
            batch=rung.global_batch_size,
            learning_rate=rung.learning_rate,
            steps=rung.steps,
            verdict=str(rung.verdict),
            rate=_number(rung.examples_per_second),
            efficiency=_number(rung.efficiency),
            failed=[str(gate) for gate in rung.gates if not gate.passed],
        )


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _where(failure: Failure) -> str:
    after = "" if failure.step is None else f", after step {failure.step}"
    where = failed_where(replace(failure, node=None))
    return f"{where}{failed_when(failure)}{after}: {failed_why(failure)}"


def _read_end(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _MOST_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return plain(text).rstrip().splitlines()


def _split_last_words(lines: Sequence[str]) -> tuple[str, list[str]]:
    """What the trainer said last, and the lines before it."""
    begin = max((index for index, line in enumerate(lines) if _LAST_WORDS.match(line)), default=len(lines))
    words = "\n".join(lines[begin:])
    before = list(lines[:begin])[-MOST_LINES:]
    return _LAST_WORDS.sub("", words), before
