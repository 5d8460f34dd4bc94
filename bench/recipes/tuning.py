"""Finds the recipe of each task on the small slice by grid search: a recipe that is not tuned proves nothing."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from bench.recipes.runs import made, tuned_run
from bench.recipes.tasks import TASKS, Task

FILE = Path(__file__).with_name("tuned.json")
SEEDS = range(100, 103)
"""Other seeds than those that are measured."""


def tune(names: Sequence[str], known: dict[str, Any], workers: int, file: Path | None) -> None:
    """Writes the rates that were found, with the numbers that they were chosen by, into FILE."""
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    places = [(name, rate) for name in names for rate in TASKS[name].rates]
    grid = {(name, rate): [tuned_run(TASKS[name], rate, seed) for seed in SEEDS] for name, rate in places}
    made([run for runs in grid.values() for run in runs], known, workers, file)
    for name in names:
        task = TASKS[name]
        means = {rate: _means(task, [known[run.key]["metrics"] for run in grid[name, rate]]) for rate in task.rates}
        best = max(task.rates, key=lambda rate: _order(task, means[rate]))
        found[name] = {
            "learningRate": best,
            "date": date.today().isoformat(),
            "python": platform.python_version(),
            "seeds": list(SEEDS),
            "grid": means,
        }
        measured = [tuned_run(task, best, seed, measures_noise=True) for seed in SEEDS]
        made(measured, known, workers, file)
        first, *others = [known[run.key]["noise"] for run in measured]
        found[name]["gradientNoiseScale"] = {
            "date": date.today().isoformat(),
            **first,
            "otherSeeds": [noise and noise["value"] for noise in others],
        }
        edge = " (at the edge of its grid)" if best in (task.rates[0], task.rates[-1]) else ""
        print(f"{name}: learning rate {best}{edge}, noise scale {found[name]['gradientNoiseScale']}", flush=True)
    FILE.write_text(json.dumps({name: found[name] for name in TASKS if name in found}, indent=1) + "\n")


def tuned() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def _means(task: Task, metrics: list[Mapping[str, float] | None]) -> dict[str, float]:
    """Returns the mean of each metric; of a rate at which a run failed, that of a model that has learned nothing."""
    if any(run is None for run in metrics):
        return {task.quality.metric: task.chance, "nats": 99.0}
    names = (task.quality.metric, "nats")
    return {name: round(statistics.fmean(run[name] for run in metrics if run), 5) for name in names}


def _order(task: Task, means: Mapping[str, float]) -> tuple[float, float]:
    """Orders by the task's own quality first; of equal accuracies the one with the lower loss is better."""
    return task.quality.sign * means[task.quality.metric], -means["nats"]
