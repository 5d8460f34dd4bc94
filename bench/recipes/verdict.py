"""What a rule has made of a recipe at a factor, and whether that is what the goal asks for."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.recipes.runs import PlannedRun
from bench.recipes.tasks import ADASCALE, AUTO, TASKS, Task

FAR = 3
"""A single run that lost more than this many times the tolerance must not end without a warning."""

_UP_TO = 16


@dataclass(frozen=True)
class Cell:
    """The runs of a rule at a factor, one for each seed. `lost`: of each run, against the mean of the tuned recipe;
    `plan`, `runs`: the warnings of the plan, and of each run."""

    task: str
    rule: str
    factor: int
    values: Sequence[float]
    lost: Sequence[float]
    plan: Sequence[str]
    runs: Sequence[Sequence[str]]

    @property
    def tolerances(self) -> float:
        """The mean loss, in tolerances."""
        return statistics.fmean(self.lost) / TASKS[self.task].quality.tolerance

    @property
    def holds(self) -> bool:
        return self.tolerances <= 1

    @property
    def warned(self) -> bool:
        """Whether the plan has warned with a number."""
        return any(re.search(r"\d", warning) for warning in self.plan)

    def __str__(self) -> str:
        quality = TASKS[self.task].quality
        lost = f"{quality.scale * statistics.fmean(self.lost):.3g} {quality.unit} lost"
        return f"{self.task}, {self.rule}, {self.factor}x: {lost}, {'with' if self.warned else 'WITHOUT'} a warning"


def cells(plans: Mapping[tuple[str, str, int], Sequence[PlannedRun]], known: Mapping[str, Any]) -> list[Cell]:
    """`plans`: by task, rule and factor, a run for each seed."""
    values = {key: [_value(TASKS[key[0]], known[run.key]) for run in runs] for key, runs in plans.items()}
    found = []
    for (name, rule, factor), runs in plans.items():
        before, own = statistics.fmean(values[name, rule, 1]), values[name, rule, factor]
        lost = [TASKS[name].quality.lost(value, before) for value in own]
        said = [known[run.key]["warnings"] for run in runs]
        found.append(Cell(name, rule, factor, own, lost, runs[0].warnings, said))
    return found


def _value(task: Task, result: Mapping[str, Any]) -> float:
    return task.chance if result["metrics"] is None else float(result["metrics"][task.quality.metric])


def verdicts(found: Sequence[Cell]) -> Iterator[tuple[str, list[str]]]:
    """Yields the goals, each with what breaks it."""
    default = [cell for cell in found if cell.rule == AUTO and cell.factor > 1]
    broken = [str(cell) for cell in default if cell.factor <= _UP_TO and not (cell.holds or cell.warned)]
    yield f"{AUTO}: up to {_UP_TO}x every mean is within the tolerance, or the plan has warned", broken
    lost = [str(cell) for cell in found if cell.rule == ADASCALE and not cell.holds]
    yield f"{ADASCALE}: every mean is within the tolerance", lost
    far = [text for cell in default for text in _silently_far(cell)]
    yield f"{AUTO}: no run that lost more than {FAR} tolerances ends without a warning", far


def _silently_far(cell: Cell) -> Iterable[str]:
    limit = FAR * TASKS[cell.task].quality.tolerance
    if cell.warned:
        return
    for lost, warnings in zip(cell.lost, cell.runs, strict=True):
        if lost > limit and not warnings:
            yield str(cell)
            return
