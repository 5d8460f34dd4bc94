"""Runs the compile check in the entry check's pod, which becomes this process after its two steps.

The answers go into the termination message beside the entry check's, and the operator judges them. A first message is
written before anything is compiled: a compiler that takes more memory than the pod has ends the pod without another.

`python -m tpu_trainer.checks.compile.pod OUTCOME`, where OUTCOME is the entry check's, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from tpu_trainer.contract.outcome import Outcome, write_last_words
from tpu_trainer.contract.protocol import COMPILE_SPECS, ENV_COMPILE_SECONDS, ENV_RUN_SPEC, ExitCode
from tpu_trainer.contract.stop import StopFlag, StopSignal

UNFINISHED = {"trouble": "Unfinished"}

_LONGEST = 240
_MOST_FOUND = 2
_LOOK_SECONDS = 0.5


def lacking(outcome: Outcome) -> Outcome | None:
    """Returns the outcome of an entry check in an image that cannot compile; None if it can."""
    from tpu_trainer.checks.compile.check import missing

    reason = missing()
    return None if reason is None else replace(outcome, compiled=[{"trouble": "Missing", "said": _cut(reason)}])


def become(outcome: Outcome) -> NoReturn:
    """Replaces this process by the compile check of a job whose first steps ended with `outcome`."""
    write_last_words(replace(outcome, compiled=[UNFINISHED]), first=True)
    print(f"{outcome.message}; now the step is compiled", flush=True)
    document = {"message": outcome.message, "step": outcome.step, "places": outcome.places}
    os.execv(sys.executable, [sys.executable, "-m", "tpu_trainer.checks.compile.pod", json.dumps(document)])  # noqa: S606


def main(text: str) -> int:
    """Compiles the step for the job's slices and writes the outcome `text`, as JSON, with the answers in it."""
    stop = StopSignal()
    stop.install()
    outcome = Outcome(ExitCode.Succeeded, **json.loads(text))
    until = time.monotonic() + float(os.environ[ENV_COMPILE_SECONDS])
    answers: list[Mapping[str, Any]] = []
    for path in _run_specs(Path(os.environ[ENV_RUN_SPEC])):
        answers.append(_check(path, until, stop))
        print(json.dumps(answers[-1]), flush=True)
    write_last_words(replace(outcome, compiled=answers), first=True)
    return ExitCode.Succeeded


def _run_specs(first: Path) -> Iterator[Path]:
    """Yields the job's own run spec, then those of its alternatives."""
    yield first
    yield from sorted(first.parent.glob(COMPILE_SPECS))


def _check(path: Path, until: float, stop: StopFlag) -> dict[str, Any]:
    """Compiles the step of one run spec. Never raises."""
    try:
        document = json.loads(path.read_bytes())
        where = f"{document['slice']['generation']} {document['slice']['topology']}"
        # This process is in the code's folder already.
        document.pop("code", None)
        return {"slice": where, **_compile(document, until, stop)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {"trouble": "Ended", "said": _cut(f"{type(error).__name__}: {error}")}


def _compile(document: Mapping[str, Any], until: float, stop: StopFlag) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="compile-check-") as name:
        spec, written = Path(name) / "runspec.json", Path(name) / "answer.json"
        spec.write_text(json.dumps(document), encoding="utf-8")
        command = [sys.executable, "-m", "tpu_trainer", "compile-check", "--run-spec", str(spec)]
        # In a new session, because the compiler is a child of that process.
        process = subprocess.Popen(  # noqa: S603 - this Python, with files of our own
            [*command, "--output", str(written)], stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            in_time = _wait(process, until, stop)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if written.exists():
            return words_of(json.loads(written.read_bytes()))
        if stop():
            return dict(UNFINISHED)
        if not in_time:
            return {"trouble": "TooSlow"}
        code = process.returncode
        ended = f"code {code}" if code >= 0 else signal.strsignal(-code)
        return {"trouble": "Ended", "said": f"the check ended with {ended}, without an answer"}


def _wait(process: subprocess.Popen[bytes], until: float, stop: StopFlag) -> bool:
    """Waits for the process; returns whether it ended in time."""
    while not stop() and time.monotonic() < until:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_SECONDS)
            return True
    return process.poll() is not None


def words_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the operator needs of an answer of `check`, short enough for a termination message."""
    if "error" in answer:
        lines = [line for line in answer["error"].splitlines() if line.strip()] or [""]
        # A traceback ends with what was wrong.
        reason = lines[-1] if lines[0].startswith("Traceback") else lines[0]
        return {"trouble": answer["kind"], "said": _cut(reason)}
    memory, step, largest = (answer.get(name, {}) for name in ("memory", "step", "largestBatch"))
    exchanged: dict[str, int] = {}
    for collective in step.get("collectives", ()):
        exchanged[collective["kind"]] = exchanged.get(collective["kind"], 0) + collective["bytes"]
    lines = [_cut(f"{line['where']} {line['operation']} ({line['kind']})".strip()) for line in answer["found"]]
    words = {
        "fits": answer["fits"],
        "perReplica": answer["batch"]["perReplica"],
        "replicas": answer["replicas"],
        "needed": memory.get("needed"),
        "limit": memory.get("limit"),
        "flops": step.get("flops"),
        "modelFlops": step.get("modelFlops"),
        "traffic": step.get("traffic"),
        "exchanged": exchanged,
        "largest": largest.get("fits"),
        "refused": largest.get("refused"),
        "refusal": _cut(answer["refusal"].partition("\n")[0]) if answer["fits"] is None and "refusal" in answer else "",
        "found": lines[:_MOST_FOUND],
    }
    return {name: value for name, value in words.items() if value not in (None, "", [], {})}


def _cut(text: str) -> str:
    """Cuts text to the longest that fits, in ASCII, so that characters are bytes."""
    return text[:_LONGEST].encode("ascii", "replace").decode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
