"""Follows the progress file of worker 0. Used by `local.run`; the lines are those of `tpu_trainer.progress`."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Report:
    """One line of the progress file. `losses` are the global losses of the steps since the report before; None is a
    loss that was no finite number."""

    phase: str
    step: int
    total_steps: int
    loss: float | None = None
    losses: tuple[float | None, ...] = ()
    examples_per_second: float | None = None


@dataclass
class ProgressFollower:
    """Reads what was appended since the last look, whole lines only."""

    path: Path
    _offset: int = field(default=0, repr=False)

    def new_reports(self) -> list[Report]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [_report(json.loads(line)) for line in whole.splitlines()]


def _report(line: dict[str, Any]) -> Report:
    return Report(
        phase=line["phase"],
        step=line["step"],
        total_steps=line["totalSteps"],
        loss=line.get("loss"),
        losses=tuple(line.get("losses") or ()),
        examples_per_second=line.get("examplesPerSecond"),
    )
