"""What `tpujob check-slice` asks of the workers, and the table that they answer with.

The operator starts `python -m tpu_trainer slice-check` in place of the trainer, with one argument, a `CheckMode`:

- `full`: measures all lines. Worker 0 prints the table as one line of its log, `SLICE_CHECK_MARKER` and its JSON, and
  `find_slice_check` finds it there.
- `fast`: measures the lines that take seconds, and then trains in the same processes, as `python -m tpu_trainer` does.
  A command that follows the argument is executed instead, for loops of the users' own.

If no line failed, all workers end with exit code 0, or train. Otherwise those of the failed lines end with
`ExitCode.SliceUnfit`, before the first step, and all others with `ExitCode.PeerLost`, whose message names them. A line
of no host ends all of them with SliceUnfit.

Both read the run spec and the worker's environment. Besides these the operator sets ENV_EXPECTED_CHIPS, the JSON of an
`ExpectedChips`, and ENV_NODE_NAME (`fieldRef: spec.nodeName`); without them the peaks and the nodes are unknown.

The last words of a worker that ends with `ExitCode.SliceUnfit` have `sliceCheck`, the JSON of its failed line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from tpu_contract.words import cut

SLICE_CHECK_MARKER = "tpu-slice-check/v1 "
"""What the log line with the table begins with."""

ENV_EXPECTED_CHIPS = "TPUJOB_EXPECTED_CHIPS"
ENV_NODE_NAME = "TPUJOB_NODE_NAME"

FAST_SECONDS = 20.0
"""How long the fast half may take once all workers have met."""

MOST_LINES = 256
LONGEST_WORD = 200
"""Limits of a table: its lines, the characters of each text, and entries of `seconds` and `versions` (MOST_ENTRIES)."""

MOST_ENTRIES = 32
_LONGEST_DOCUMENT = 1 << 22


class CheckMode(StrEnum):
    FULL = "full"
    FAST = "fast"


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
    one was not tried.
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
        text = f"{self.name}: {self.measured or self.verdict.value}{expected}"
        return "; ".join(part for part in (f"{self.place}: {text}" if self.host else text, self.advice) if part)


@dataclass(frozen=True)
class SliceTable:
    """The table of a slice. seconds: of each phase, in order. complete: no phase was broken off."""

    lines: tuple[SliceCheckLine, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    accelerator_type: str = ""
    complete: bool = False

    @property
    def failed(self) -> tuple[SliceCheckLine, ...]:
        return tuple(line for line in self.lines if line.verdict is LineVerdict.FAILED)

    @property
    def passed(self) -> bool:
        return self.complete and not self.failed


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
    values = {name: _text(value) if isinstance(value, str) else value for name, value in _values(line)}
    if line.number is not None:
        values["number"] = float(f"{line.number:.6g}")
    return {name: value for name, value in values.items() if value not in ("", None)}


def line_from_json(document: object) -> SliceCheckLine | None:
    """Reads a line; None for what is none. Unknown fields are ignored, values of another type are left out."""
    if not isinstance(document, Mapping):
        return None
    section, verdict = document.get("section"), document.get("verdict")
    if section not in tuple(SliceSection) or verdict not in tuple(LineVerdict):
        return None
    texts = {name: _text(document.get(name)) for name in ("name", "measured", "expected", "unit", "host", "node")}
    return SliceCheckLine(
        section=SliceSection(section),
        verdict=LineVerdict(verdict),
        number=_number(document.get("number")),
        advice=_text(document.get("advice")),
        **texts,
    )


def to_json(check: SliceTable) -> str:
    """Returns the table as one line of JSON. Failed lines come first where there are more than MOST_LINES."""
    lines: Iterable[SliceCheckLine] = check.lines
    if len(check.lines) > MOST_LINES:
        lines = sorted(check.lines, key=lambda line: line.verdict is not LineVerdict.FAILED)[:MOST_LINES]
    document = {
        "acceleratorType": check.accelerator_type,
        "complete": check.complete,
        "lines": [line_to_json(line) for line in lines],
        "seconds": {name: round(value, 3) for name, value in check.seconds.items()},
        "versions": dict(check.versions),
    }
    return json.dumps(document)


def from_json(text: str) -> SliceTable:
    """Reads a table. What is not one is an empty table, which is not complete; what is too large is cut."""
    document: object = None
    if len(text) <= _LONGEST_DOCUMENT:
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            document = None
    if not isinstance(document, Mapping):
        return SliceTable()
    lines = document.get("lines")
    read = map(line_from_json, lines[:MOST_LINES] if isinstance(lines, list) else ())
    seconds = {name: _number(value) for name, value in _entries(document.get("seconds"))}
    return SliceTable(
        lines=tuple(line for line in read if line is not None),
        seconds={name: value for name, value in seconds.items() if value is not None},
        versions={name: _text(value) for name, value in _entries(document.get("versions")) if isinstance(value, str)},
        accelerator_type=_text(document.get("acceleratorType")),
        complete=document.get("complete") is True,
    )


def find_slice_check(log: str) -> SliceTable | None:
    """Returns the last table in a worker's log; None without one."""
    for line in reversed(log.splitlines()):
        _, marker, document = line.partition(SLICE_CHECK_MARKER)
        if marker:
            return from_json(document)
    return None


def expected_to_json(chips: ExpectedChips) -> str:
    return json.dumps(asdict(chips))


def expected_from_json(text: str) -> ExpectedChips:
    """Reads what `expected_to_json` wrote; what is missing or of another type is unknown."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, Mapping):
        return ExpectedChips()

    def known(name: str) -> float:
        return max(0.0, _number(document.get(name)) or 0.0)

    return ExpectedChips(
        _text(document.get("accelerator_type")),
        int(known("chips_per_host")),
        int(known("devices_per_chip")) or 1,
        known("bf16_tflops"),
        known("hbm_gb_per_second"),
        known("ici_gb_per_second"),
    )


def _values(line: SliceCheckLine) -> Iterable[tuple[str, Any]]:
    return ((part.name, getattr(line, part.name)) for part in fields(line))


def _entries(value: object) -> list[tuple[str, Any]]:
    named = value.items() if isinstance(value, Mapping) else ()
    return [(_text(name), entry) for name, entry in named][:MOST_ENTRIES]


def _text(value: object) -> str:
    return cut(" ".join(value.split()), LONGEST_WORD) if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
