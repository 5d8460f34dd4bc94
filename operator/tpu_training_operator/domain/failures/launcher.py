"""Recovers what a launcher such as torchrun hides: it exits with code 1 whatever happened, and its own text comes last.

The process that failed first may have left its last words in the termination message (`tpu_trainer.callbacks` does).
Otherwise torchrun's closing lines contain the exit code of that process, and sometimes its traceback.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from signal import Signals

_ROOT = "Root Cause (first observed failure):"
_ROOT_FIELDS = ("rank", "exitcode", "traceback")
# torchrun was asked to stop and ended its processes: "...SignalException: Process 7 got signal: 15".
_STOP_SIGNAL = re.compile(r"SignalException: Process \d{1,20} got signal: (\d{1,3})$")
# The agent's first line about the end of its processes.
_AGENT_SAYS = re.compile(r"torch/distributed/elastic/.{0,80}(?: failed \(exitcode: |Sending process \d{1,20} closing)")
_TRACEBACK = "Traceback (most recent call last):"
# torch.distributed prefixes every line of a process's traceback with it.
_RANK = re.compile(r"^\[rank(\d{1,9})\]: ?")
_SIGNALLED = 128
_LONGEST_LAST_LINE = 400


@dataclass(frozen=True)
class Launched:
    """The end of the process that failed first: its exit code, 128 + N after signal N, and its last words."""

    exit_code: int
    words: str


@lru_cache(maxsize=256)
def read_launcher(text: str) -> Launched | None:
    """Reads torchrun's closing lines; None for any other text."""
    lines = text.splitlines()
    roots = [index for index, line in enumerate(lines) if line.strip() == _ROOT]
    if not roots:
        return _read_stop_signal(lines)
    fields = _fields(lines[roots[-1] + 1 :])
    code = re.match(r"-?\d{1,10}", fields.get("exitcode", ""))
    if code is None:
        return None
    number, rank = int(code[0]), fields.get("rank", "?").partition(" ")[0]
    above = lines[: next((index for index, line in enumerate(lines) if _AGENT_SAYS.search(line)), 0)]
    # Of a program that records its errors (`@record`); "To enable traceback see ..." for any other.
    recorded = fields.get("traceback", "")
    words = recorded if recorded.startswith(_TRACEBACK) else _printed_traceback(above, rank)
    exit_code = number if number >= 0 else _SIGNALLED - number
    return Launched(exit_code, words or f"rank {rank} {_describe_end(number, above)}")


def without_ranks(text: str) -> str:
    """Removes the rank that torch.distributed puts before every line of a traceback."""
    return "\n".join(_RANK.sub("", line) for line in text.splitlines()) if "[rank" in text else text


def _read_stop_signal(lines: Sequence[str]) -> Launched | None:
    signal = next((match[1] for line in lines if (match := _STOP_SIGNAL.search(line))), None)
    if signal is None:
        return None
    return Launched(_SIGNALLED + int(signal), f"torchrun got signal {signal} and ended its processes")


def _fields(lines: Sequence[str]) -> Mapping[str, str]:
    """Reads the fields below the title. The last one, the traceback, may have several lines."""
    fields: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if line.startswith("="):
            break
        if colon and name.strip() in _ROOT_FIELDS and "traceback" not in fields:
            fields[name.strip()] = value.strip()
        elif "traceback" in fields:
            fields["traceback"] += f"\n{line.removeprefix('  ')}"
    return fields


def _printed_traceback(above: Sequence[str], rank: str) -> str:
    """Returns the last traceback above the agent's lines, of that rank if lines name ranks; empty if there is none."""
    marked = [line for line in above if (prefix := _RANK.match(line)) and prefix[1] == rank]
    lines = [_RANK.sub("", line) for line in marked or above]
    starts = [index for index, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    return "\n".join(lines[starts[-1] :]) if starts else ""


def _describe_end(code: int, above: Sequence[str]) -> str:
    """Describes an end without a traceback.

    A program that refuses its arguments, or calls sys.exit with a text, gives its reason in its last line.
    """
    if code >= 0:
        last = next((line.strip() for line in reversed(above) if line.strip()), "")
        if last:
            return f"exited with code {code}; the last line before that: {last[:_LONGEST_LAST_LINE]}"
        return f"exited with code {code}; its output is in the log, above torchrun's own lines"
    try:
        return f"was ended by {Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
