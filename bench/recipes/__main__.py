"""Whether a scaled recipe trains as well as the tuned one (docs/scaling.md).

    python -m bench.recipes [--quick] [--tune] [--tasks digits-sgd ...] [--seeds N] [--workers N]
        [--json FILE] [--docs docs/scaling.md]

The recipes are tuned on the small slice (--tune, tuned.json). Then the project's planner scales them by every rule to
every factor, and its trainer makes the runs. Ends with 1 if a goal is missed.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from platform import python_version
from typing import Any

from bench.recipes import tables, tuning
from bench.recipes.chart import drawing
from bench.recipes.runs import made, scaled_run
from bench.recipes.tasks import FACTORS, RULES, TASKS, rules_of
from bench.recipes.verdict import Cell, cells, verdicts
from bench.trainer.tables import filled_in

EVERY_NUMBER = Path(__file__).with_name("measured.md")


@dataclass(frozen=True)
class Plan:
    tasks: tuple[str, ...]
    factors: tuple[int, ...]
    seeds: int


FULL = Plan(tuple(TASKS), FACTORS, seeds=5)
QUICK = Plan(("digits-sgd", "digits-adamw-short", "tumours-sgd"), (1, 4, 16), seeds=2)


def measured(
    plan: Plan, recipes: dict[str, Any], known: dict[str, Any], workers: int, file: Path | None
) -> tuple[list[Cell], float]:
    """Returns what was found, and the CPU seconds of all runs that it follows from, those in `known` included."""
    plans = {
        (name, rule, factor): [
            scaled_run(TASKS[name], recipes[name], seed, factor, RULES[rule]) for seed in range(plan.seeds)
        ]
        for name in plan.tasks
        for rule, factor in product(rules_of(TASKS[name]), plan.factors)
    }
    made([run for runs in plans.values() for run in runs], known, workers, file)
    seconds = {run.key: known[run.key]["cpuSeconds"] for runs in plans.values() for run in runs}
    return cells(plans, known), sum(seconds.values()) + time.process_time()


def judge(found: list[Cell]) -> int:
    """Prints every goal, and what breaks it. Returns the exit code."""
    missed = 0
    for goal, broken in verdicts(found):
        print(f"\n{'MISSED' if broken else 'holds'}: {goal}")
        for text in broken:
            print(f"  {text}")
        missed += bool(broken)
    return 1 if missed else 0


def write_docs(page: Path, texts: dict[str, str], picture: str) -> None:
    for file in (page, EVERY_NUMBER):
        document = file.read_text(encoding="utf-8")
        for name, text in texts.items():
            document = filled_in(document, name, text)
        file.write_text(document, encoding="utf-8")
    page.with_suffix(".svg").write_text(picture, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="few tasks, factors and seeds, in five minutes")
    parser.add_argument("--tune", action="store_true", help="search for the recipes again and write tuned.json")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, metavar="TASK", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--seeds", type=int, help="how many, instead of 5")
    parser.add_argument("--workers", type=int, default=2, help="processes, each with one thread; default 2")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run; runs that it has are not repeated")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write the page's tables, its drawing, measured.md")
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL
    plan = Plan(tuple(options.tasks or plan.tasks), plan.factors, options.seeds or plan.seeds)
    known = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    if options.tune:
        tuning.tune(plan.tasks, known, options.workers, options.json)
    recipes = tuning.tuned()
    found, seconds = measured(plan, recipes, known, options.workers, options.json)
    machine = {"python": python_version(), "torch": version("torch"), "scikit-learn": version("scikit-learn")}
    texts = {
        "measured": tables.measured_line(machine, plan.seeds, seconds),
        "tuned": tables.noise_table(recipes, plan.tasks),
        "warned": tables.warnings_table(found),
        "reach": tables.reach_table(found),
        "quality": tables.quality_tables(found, recipes),
    }
    for text in texts.values():
        print(f"\n{text}")
    if options.docs:
        write_docs(options.docs, texts, drawing(found))
    return judge(found)


if __name__ == "__main__":
    sys.exit(main())
