"""`python -m tpu_trainer compile-check` runs the check for `tpujob compile-check`, and in the entry check's pod.

Its exit codes: 0 the step fits, 1 it does not fit or cannot be one program, 2 it could not be checked.

In the pod, whose process becomes this one after its two steps, it ends with 0, and the answer goes into the termination
message beside the entry check's. A first message says that the answer is unfinished, because a compiler that crashes,
or that takes more memory than the pod has, ends the pod.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TextIO

from tpu_contract.protocol import ENV_COMPILE_SECONDS, ENV_RUN_SPEC, ExitCode
from tpu_trainer.checks.compile.cache import AnswerCache
from tpu_trainer.checks.compile.check import SCHEMA, CannotCheckError, check
from tpu_trainer.contract.environment import check_run_spec, read_environment
from tpu_trainer.contract.errors import TrainerError
from tpu_trainer.contract.outcome import Outcome, write_last_words
from tpu_trainer.worker.code import install

FITS, DOES_NOT, CANNOT_SAY = range(3)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LONGEST, _MOST_FOUND = 240, 2
# The parts of an answer that the operator reads, and what it does not read of them and may be long.
_READ = (
    "schema",
    "trouble",
    "said",
    "fits",
    "refusal",
    "replicas",
    "batch",
    "memory",
    "step",
    "largestBatch",
    "found",
    "digest",
)
_UNREAD = ("collectives", "shapes")

Answer = Mapping[str, Any]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tpu_trainer compile-check", description=__doc__)
    parser.add_argument("--run-spec", type=Path, default=os.environ.get(ENV_RUN_SPEC), help=f"default: ${ENV_RUN_SPEC}")
    parser.add_argument("--largest", action="store_true", help="find the largest batch per replica that fits")
    parser.add_argument("--output", type=Path, help="where the answer goes, as JSON; default: stdout")
    parser.add_argument("--cache", type=Path, help="folder where answers of the compiler are kept, and looked for")
    parser.add_argument("--entry-check", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run_spec is None:
        parser.error(f"--run-spec is needed where {ENV_RUN_SPEC} is not set")
    path, output = Path(options.run_spec), options.output
    if options.entry_check is not None:
        return _check_in_pod(path, Outcome(ExitCode.Succeeded, **json.loads(options.entry_check)))

    def tell(answer: Answer) -> None:
        if output is not None:
            _write(answer, output)

    # If the answer goes to stdout, nothing else does.
    progress = sys.stderr if output is None else sys.stdout
    cache = AnswerCache(options.cache)
    answer = _check(path, tell, progress, find_largest=options.largest, cache=cache, installs_code=True)
    if output is None:
        print(json.dumps(answer, indent=1))
    if "trouble" in answer:
        print(f"compile-check: {answer['said']}", file=sys.stderr)
        return CANNOT_SAY
    return FITS if answer["fits"] else DOES_NOT


def become_compile_check(outcome: Outcome) -> NoReturn:
    """Replaces this process by the compile check of a job whose first steps ended with `outcome`."""
    _write_last_words(outcome, _trouble("Unfinished"))
    print(f"{outcome.message}; now the step is compiled", flush=True)
    document = {"message": outcome.message, "step": outcome.step, "places": outcome.places}
    command = [sys.executable, "-m", "tpu_trainer", "compile-check", "--entry-check", json.dumps(document)]
    os.execv(sys.executable, command)  # noqa: S606


def _check_in_pod(path: Path, outcome: Outcome) -> int:
    tell = _LastWords(outcome)
    tell.end_after(float(os.environ[ENV_COMPILE_SECONDS]))
    # The entry check has entered the code's folder already.
    print(json.dumps(_check(path, tell, sys.stdout)), flush=True)
    return ExitCode.Succeeded


class _LastWords:
    """Writes answers into the termination message, each in place of the one before."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome, self._lock, self._has_answer = outcome, threading.Lock(), False

    def __call__(self, answer: Answer) -> None:
        with self._lock:
            self._has_answer = True
            _write_last_words(self._outcome, answer)

    def end_after(self, seconds: float) -> None:
        """Ends this process on a signal, or after `seconds`, even while the main thread is in the compiler. The process
        that traces ends with it."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

        def wait() -> None:
            trouble = "TooSlow" if signal.sigtimedwait(_SIGNALS, seconds) is None else "Unfinished"
            with self._lock:
                if not self._has_answer:
                    _write_last_words(self._outcome, _trouble(trouble))
                os._exit(ExitCode.Succeeded)

        threading.Thread(target=wait, daemon=True).start()


def _write_last_words(outcome: Outcome, answer: Answer) -> None:
    write_last_words(replace(outcome, compiled=shorten(answer)), first=True)


def _check(
    path: Path,
    tell: Callable[[Answer], None],
    progress: TextIO,
    *,
    find_largest: bool = False,
    cache: AnswerCache | None = None,
    installs_code: bool = False,
) -> Answer:
    """Returns the answer, and also tells it. Never raises."""
    try:
        document = json.loads(path.read_bytes())
        if not isinstance(document, dict):
            raise CannotCheckError(f"run spec {path}: not a JSON object", "BadSpec")
        if installs_code and "code" in document:
            spec = check_run_spec(document)
            assert spec.code is not None
            install(spec.code, read_environment({**os.environ, ENV_RUN_SPEC: str(path)}), os.environ)
        # The search may be ended before it is done.
        answer = check(
            document,
            find_largest=find_largest,
            cache=cache,
            tell=tell,
            say=lambda line: print(line, file=progress, flush=True),
        )
    except CannotCheckError as error:
        answer = _trouble(error.kind, str(error))
    except TrainerError as error:
        answer = _trouble(error.code.name, str(error))
    except (OSError, ValueError, KeyError, TypeError) as error:
        answer = _trouble("BadSpec", f"run spec {path}: {error}")
    tell(answer)
    return answer


def _trouble(kind: str, said: str = "") -> dict[str, Any]:
    return {"schema": SCHEMA, "trouble": kind, "said": said}


def _write(answer: Answer, output: Path) -> None:
    unfinished = output.with_name(f"{output.name}.part")
    unfinished.write_text(json.dumps(answer, indent=1), encoding="utf-8")
    unfinished.replace(output)


def shorten(answer: Answer) -> dict[str, Any]:
    """Returns what the operator reads of an answer, short enough for a termination message."""
    short = {name: answer[name] for name in _READ if answer.get(name) is not None}
    lines = [line for line in short.get("said", "").splitlines() if line.strip()] or [""]
    # A traceback ends with what was wrong.
    short["said"] = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    short["refusal"] = short.get("refusal", "").partition("\n")[0]
    short["found"] = short.get("found", [])[:_MOST_FOUND]
    return {name: _cut(part) for name, part in short.items() if part not in ("", [])}


def _cut(value: Any) -> Any:
    """Cuts texts to the longest that fits, in ASCII, so that characters are bytes."""
    if isinstance(value, str):
        return value[:_LONGEST].encode("ascii", "replace").decode()
    if isinstance(value, Mapping):
        return {name: _cut(part) for name, part in value.items() if name not in _UNREAD}
    return [_cut(part) for part in value] if isinstance(value, list) else value
