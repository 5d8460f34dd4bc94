"""Follows the progress file of worker 0. Used by `local.run`; the lines are those of `tpu_trainer.progress`."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Evaluation:
    """The metrics of the model after `step` steps; None where one was no finite number."""

    step: int
    metrics: dict[str, float | None]


@dataclass(frozen=True)
class Report:
    """One line of the progress file. `losses` are the global losses of the steps since the report before; None is a
    loss that was no finite number. `evaluation`: the step that was evaluated, and the metrics after it."""

    phase: str
    step: int
    total_steps: int
    loss: float | None = None
    losses: tuple[float | None, ...] = ()
    examples_per_second: float | None = None
    evaluation: Evaluation | None = None


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
        evaluation=_evaluation(line.get("evaluation")),
    )


def _evaluation(record: dict[str, Any] | None) -> Evaluation | None:
    if record is None:
        return None
    return Evaluation(record["step"], {name: value for name, value in record.items() if name != "step"})
