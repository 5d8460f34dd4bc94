"""Reads what the report page of a local run shows besides the history: how the job ended, and the log of the
first worker that failed.

One worker writes the history. It may be killed before it can, and it does not know why a peer failed.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpu_training_operator.api.status import Failure, RungStatus
from tpu_training_operator.api.text import plain
from tpu_training_operator.domain.failures.messages import describe_attempt, describe_class, describe_place, gist
from tpu_training_operator.html_report.ending import ENDINGS, JobEnd, JobResult, LogTail
from tpu_training_operator.html_report.ladder import RungRow

RESULT = "result.json"

MOST_LINES = 40
"""The most lines of a log that are shown before the worker's last words."""

_MOST_BYTES = 1 << 16
# The trainer's last words in a log begin like this.
_LAST_WORDS = re.compile(rf"^({'|'.join(ENDINGS)}): ")


def job_end(directory: Path) -> JobEnd | None:
    """Reads how the run in this directory ended; None if it has not ended, or if its result cannot be read."""
    try:
        result = json.loads((directory / RESULT).read_bytes())
        state = JobResult(result["state"])
        last = Failure.read(result["failure"]) if state is JobResult.FAILED and result["failure"] else None
        # The job survived a failure of an earlier attempt; something else has ended it.
        failure = last if last is not None and last.attempt == result["attempts"] else None
        rungs = rungs_of(result.get("rungs"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if failure is None:
        return JobEnd(state, gist=str(result.get("message", "")), rungs=rungs)
    # The directory may have been moved since.
    log = directory / Path(result.get("logs", "")).name / failure.pod / "log.txt"
    words, before = _split_last_words(_read_end(log))
    message = words or failure.message
    return JobEnd(
        state,
        cause=failure.reason,
        where=_where(failure),
        gist=gist(failure),
        # For a worker that was killed, the failure's message is the end of its log, which is shown below.
        message="" if not words and before and before[-1] in message else message,
        log=LogTail(str(log.relative_to(directory)), before) if before else None,
        rungs=rungs,
    )


def rungs_of(rungs: Any) -> tuple[RungRow, ...]:
    """Returns the rows of the job's ladder. `rungs`: as in its status."""
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
    where = describe_place(replace(failure, node=None))
    return f"{where}{describe_attempt(failure)}{after}: {describe_class(failure)}"


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
    """Returns the trainer's last words, and the lines before them."""
    begin = max((index for index, line in enumerate(lines) if _LAST_WORDS.match(line)), default=len(lines))
    words = "\n".join(lines[begin:])
    before = list(lines[:begin])[-MOST_LINES:]
    return _LAST_WORDS.sub("", words), before
