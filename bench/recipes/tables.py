"""The results as tables, for the terminal, docs/scaling.md and measured.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from bench.recipes.tasks import RULES, TASKS, rules_of
from bench.recipes.verdict import Cell
from bench.scale.tables import markdown

WARNED = "⚠"


def quality_tables(found: Sequence[Cell], recipes: Mapping[str, Any]) -> str:
    """Returns one table a task: the mean and the standard deviation over the seeds, by rule and factor. The header has
    those of the tuned recipe, which is the same run under every rule."""
    names = list(dict.fromkeys(cell.task for cell in found))
    return "\n\n".join(_quality(name, [cell for cell in found if cell.task == name], recipes[name]) for name in names)


def _quality(name: str, found: Sequence[Cell], recipe: Mapping[str, Any]) -> str:
    task = TASKS[name]
    by_place = {(cell.rule, cell.factor): cell for cell in found}
    rules = [rule for rule in RULES if (rule, 1) in by_place]
    factors = [factor for factor in dict.fromkeys(cell.factor for cell in found) if factor != 1]
    tuned = f"{task.title}, rate {recipe['learningRate']}: {_entry(by_place[rules[0], 1])}"
    rows = [[tuned, *(f"{factor}x" for factor in factors)]]
    rows += [[rule, *(_entry(by_place[rule, factor]) for factor in factors)] for rule in rules]
    return markdown(rows)


def _entry(cell: Cell) -> str:
    quality = TASKS[cell.task].quality
    digits = 1 if quality.scale == 100 else 3
    mean, spread = statistics.fmean(cell.values), statistics.pstdev(cell.values)
    text = f"{quality.scale * mean:.{digits}f}±{quality.scale * spread:.{digits}f}"
    return f"{text if cell.holds else f'**{text}**'}{f' {WARNED}' if cell.warned else ''}"


def reach_table(found: Sequence[Cell]) -> str:
    """Returns the largest factor up to which every mean is within the tolerance, by task and rule."""
    by_place = {(cell.task, cell.rule, cell.factor): cell for cell in found}
    factors = dict.fromkeys(cell.factor for cell in found)
    rows = [["task", *RULES]]
    for name in dict.fromkeys(cell.task for cell in found):
        of_rules = [[by_place[name, rule, factor] for factor in factors] for rule in rules_of(TASKS[name])]
        reached = [[cell.factor for cell in takewhile(lambda cell: cell.holds, own)][-1] for own in of_rules]
        unknown = [""] * (len(RULES) - len(reached))
        rows.append([TASKS[name].title, *(f"{factor}x" for factor in reached), *unknown])
    return markdown(rows)


def warnings_table(found: Iterable[Cell]) -> str:
    """Returns how often the plan warned of a loss beyond the tolerance, and how often of none, by rule: over the tasks
    that the thresholds were chosen with, and over those held out."""
    columns = ("lost", "warned", "needless")
    rows = [["rule", *columns, *(f"held out: {column}" for column in columns)]]
    cells = [cell for cell in found if cell.factor > 1]
    for rule in RULES:
        own = [cell for cell in cells if cell.rule == rule]
        halves = ([cell for cell in own if TASKS[cell.task].held_out is held_out] for held_out in (False, True))
        rows.append([rule, *(entry for half in halves for entry in _warned(half))])
    return markdown(rows)


def _warned(found: Sequence[Cell]) -> tuple[str, str, str]:
    lost = [cell for cell in found if not cell.holds]
    needless = sum(cell.warned and cell.holds for cell in found)
    return (
        f"{len(lost)} of {len(found)}",
        str(sum(cell.warned for cell in lost)),
        f"{needless} of {len(found) - len(lost)}",
    )


def noise_table(recipes: Mapping[str, Any], names: Iterable[str]) -> str:
    """Shows the tuned recipes and their noise scales."""
    rows = [["task", "batch", "learning rate", "noise scale", "with other seeds"]]
    for name in names:
        recipe, noise = recipes[name], recipes[name]["gradientNoiseScale"]
        others = ", ".join(map(str, noise["otherSeeds"]))
        scale = f"{noise['value']} ± {noise['error']:g}"
        rows.append([TASKS[name].title, str(TASKS[name].batch), recipe["learningRate"], scale, others])
    return markdown(rows)


def measured_line(machine: Mapping[str, Any], seeds: int, cpu_seconds: float) -> str:
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", "torch", "scikit-learn"))
    return f"Measured with {seeds} seeds in {cpu_seconds / 60:.0f} minutes of one core; {versions}."
