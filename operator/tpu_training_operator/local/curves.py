"""Reads the loss of every step and the metrics of every evaluation from the files in which the trainer records them.

The status keeps only the newest numbers. The trainer appends one JSON object a line to `TPUJOB_PROGRESS_FILE`.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from tpu_training_operator.api.text import plain_json


@dataclass(frozen=True)
class _Line:
    """One recorded line. `losses`: of the steps up to `step`, None if not finite; `evaluation` has its own step."""

    step: int
    losses: tuple[float | None, ...] = ()
    evaluation: dict[str, float | None] | None = None
    checkpoint_step: Annotated[int | None, Field(alias="checkpointStep")] = None


_LINE = TypeAdapter(_Line)


@dataclass(frozen=True)
class Curves:
    """Losses and metrics by step, in order; None if not finite. `checkpoint_step`: the newest step that was reported as
    saved."""

    losses: dict[int, float | None] = field(default_factory=dict)
    evaluations: dict[int, dict[str, float | None]] = field(default_factory=dict)
    checkpoint_step: int | None = None


def read_curves(files: Iterable[Path]) -> Curves:
    """Reads the files of all attempts, the earliest first. For each step, the last attempt that reached it counts."""
    losses: dict[int, float | None] = {}
    evaluations: dict[int, dict[str, float | None]] = {}
    saved: int | None = None
    for line in (line for file in files if file.exists() for line in _lines(file)):
        first = line.step - len(line.losses) + 1
        losses |= {first + index: loss for index, loss in enumerate(line.losses)}
        saved = saved if line.checkpoint_step is None else line.checkpoint_step
        step = (line.evaluation or {}).get("step")
        if line.evaluation and step is not None and isfinite(step):
            evaluations[int(step)] = {name: value for name, value in line.evaluation.items() if name != "step"}
    return Curves(dict(sorted(losses.items())), dict(sorted(evaluations.items())), saved)


def _lines(file: Path) -> Iterator[_Line]:
    for line in file.read_bytes().splitlines():
        try:
            yield _LINE.validate_python(plain_json(json.loads(line)))
        except (ValidationError, ValueError, RecursionError):
            # A user's own loop may write anything here.
            continue
