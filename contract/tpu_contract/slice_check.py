"""What `tpujob check-slice` asks of the workers, and the table that they answer with.

The operator starts `python -m tpu_trainer slice-check` in place of the trainer, with one argument, a `CheckMode`:

- `full`: measures all lines. Worker 0 prints the table as one line of its log, `SLICE_CHECK_MARKER` and its JSON.
- `fast`: measures for FAST_SECONDS at most, and then trains in the same processes, as `python -m tpu_trainer` does. A
  command that follows the argument is executed instead, for loops of the users' own, after a process with `fast-only`.

If no line failed, all workers end with exit code 0, or train. Otherwise those of the failed lines end with
`ExitCode.SliceUnfit`, before the first step, and all others with `ExitCode.PeerLost`, whose message names them. A line
of no host ends all of them with SliceUnfit, whose last words have `sliceCheck`, the JSON of that line.

Both read the run spec and the worker's environment. Besides these the operator sets ENV_EXPECTED_CHIPS, the JSON of an
`ExpectedChips`, and ENV_NODE_NAME (`fieldRef: spec.nodeName`); without them the peaks and the nodes are unknown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from tpu_contract.words import cut

SLICE_CHECK_MARKER = "tpu-slice-check/v1 "
"""What the log line with the table begins with."""

ENV_EXPECTED_CHIPS = "TPUJOB_EXPECTED_CHIPS"
ENV_NODE_NAME = "TPUJOB_NODE_NAME"

FAST_SECONDS = 20.0
"""How long the fast half may measure, besides the waiting for workers that have not come and the start of libraries
that the training needs, too. No measurement begins later; the lines that are missing then say so."""

MOST_LINES, LONGEST_WORD, MOST_PHASES = 256, 200, 32
"""Limits of a table: its lines, the characters of each text, and the entries of `seconds`."""


class CheckMode(StrEnum):
    FULL = "full"
    FAST = "fast"
    FAST_ONLY = "fast-only"


class SliceSection(StrEnum):
    POD = "Pod"
    NETWORK = "Network"
    STORAGE = "Storage"
    CHIPS = "Chips"
    RUN = "Run"


class LineVerdict(StrEnum):
    OK = "Ok"
    FAILED = "Failed"
    NOT_TRIED = "NotTried"


@dataclass(frozen=True)
class SliceCheckLine:
    """One thing that was checked.

    host: the worker's pod, and node: the node it runs on, "" if unknown; both are "" in a line about the whole slice,
    which is also the form of a line that is alike on all hosts. measured, expected: short texts for people. number,
    unit: the measured value for machines; of several hosts, the worst. advice: what to do about a failed line, or why
    one has no verdict.
    """

    section: SliceSection
    name: str
    verdict: LineVerdict
    measured: str = ""
    expected: str = ""
    number: float | None = None
    unit: str = ""
    host: str = ""
    node: str = ""
    advice: str = ""

    @property
    def place(self) -> str:
        """The host with its node, "" for the whole slice."""
        return f"{self.host} on {self.node}" if self.host and self.node else self.host

    def __str__(self) -> str:
        """Returns the line as one sentence, which begins with the host."""
        expected = f", expected {self.expected}" if self.expected else ""
        text = f"{self.name}: {self.measured or 'not tried'}{expected}"
        return "; ".join(part for part in (f"{self.place}: {text}" if self.host else text, self.advice) if part)


@dataclass(frozen=True)
class SliceTable:
    """The table of a slice; one that was broken off has a failed line. seconds: of each phase, in order."""

    lines: tuple[SliceCheckLine, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> tuple[SliceCheckLine, ...]:
        return tuple(line for line in self.lines if line.verdict is LineVerdict.FAILED)

    @property
    def passed(self) -> bool:
        return bool(self.lines) and not self.failed


@dataclass(frozen=True)
class ExpectedChips:
    """What the catalogue says of the slice's chips, per chip where not said otherwise. 0: unknown, so that the speed is
    measured and not judged. ici_gb_per_second: what a chip sends over the links that the slice has."""

    accelerator_type: str = ""
    chips_per_host: int = 0
    devices_per_chip: int = 1
    bf16_tflops: float = 0.0
    hbm_gb_per_second: float = 0.0
    ici_gb_per_second: float = 0.0


def line_to_json(line: SliceCheckLine) -> dict[str, Any]:
    """Returns the line as JSON has it, without what is empty."""
    values: dict[str, Any] = {name: _text(value) for name, value in asdict(line).items()}
    if line.number is not None:
        values["number"] = float(f"{line.number:.6g}")
    return {name: value for name, value in values.items() if value != ""}


def line_from_json(document: object) -> SliceCheckLine | None:
    """Reads a line; None for what is none. Unknown fields are ignored, values of another type are left out."""
    if not isinstance(document, Mapping):
        return None
    section, verdict = document.get("section"), document.get("verdict")
    if section not in tuple(SliceSection) or verdict not in tuple(LineVerdict):
        return None
    values: dict[str, Any] = {part.name: _text(document.get(part.name)) for part in fields(SliceCheckLine)}
    values |= {"section": SliceSection(section), "verdict": LineVerdict(verdict)}
    return SliceCheckLine(**values | {"number": _number(document.get("number"))})


def to_json(check: SliceTable) -> str:
    """Returns the table as one line of JSON. Failed lines come first where there are more than MOST_LINES."""
    lines = list(check.lines)
    if len(lines) > MOST_LINES:
        lines.sort(key=lambda line: line.verdict is not LineVerdict.FAILED)
    document = {
        "lines": [line_to_json(line) for line in lines[:MOST_LINES]],
        "seconds": {name: round(value, 3) for name, value in check.seconds.items()},
    }
    return json.dumps(document)


def from_json(text: str) -> SliceTable:
    """Reads a table. What is not one is an empty table; what is too large is cut."""
    document = _document(text)
    lines, seconds = document.get("lines"), document.get("seconds")
    read = map(line_from_json, lines[:MOST_LINES] if isinstance(lines, list) else ())
    phases = list(seconds.items() if isinstance(seconds, Mapping) else ())[:MOST_PHASES]
    numbers = {_text(name): number for name, value in phases if (number := _number(value)) is not None}
    return SliceTable(tuple(line for line in read if line is not None), numbers)


def expected_to_json(chips: ExpectedChips) -> str:
    return json.dumps(asdict(chips))


def expected_from_json(text: str) -> ExpectedChips:
    """Reads what `expected_to_json` of any version wrote; what is missing is unknown."""
    names = {part.name for part in fields(ExpectedChips)}
    return ExpectedChips(**{name: value for name, value in _document(text).items() if name in names})


def _document(text: str) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    return document if isinstance(document, Mapping) else {}


def _text(value: object) -> str:
    return cut(" ".join(value.split()), LONGEST_WORD) if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
