"""Histories as a trainer might have left them: made up, but by rule, and the same every time."""

import json
import math
import random
from collections.abc import Mapping
from typing import Any

from tpu_training_operator.html_report.ending import JobEnd
from tpu_training_operator.html_report.history import History, parse_history
from tpu_training_operator.html_report.page import render

SPLIT = {"start": 41.0, "input": 96.0, "host": 118.0, "device": 812.0, "checkpoint": 9.5, "evaluate": 62.0}
SUCCEEDED = {"code": "Succeeded", "message": "trained 5000 steps, loss 0.352"}
RUN_SPEC = {
    "schema": "runspec/v1",
    "job": {"namespace": "default", "name": "small", "uid": "5f0c", "attempt": 1},
    "entrypoint": "tests.trainer.tasks:small",
    "backend": "torch",
    "hardware": "CPU",
    "slice": {"generation": "v5e", "topology": "2x4", "slices": 1, "hosts": 1, "replicas": 8},
    "batch": {"global": 16, "perReplica": 2},
    "trainSteps": 24,
    "warmupSteps": 5,
    "seed": 3,
    "optimizer": {"name": "sgd", "learningRate": "0.3", "weightDecay": "1e-4", "momentum": "0.9"},
    "parameters": {},
}


def document(
    recorded: Mapping[str, Any] | None = None,
    spec: Mapping[str, Any] | None = None,
    outcome: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> bytes:
    """A history file; `recorded` and `spec` are laid over a run that has just begun."""
    found = {
        "schema": "history/v1",
        "uid": "5f0c",
        "runSpec": RUN_SPEC | dict(spec or {}),
        "written": "2026-11-21T16:00:00+00:00",
        "outcome": outcome,
        "environment": environment or {"torch": "2.9.0"},
        "recorded": {"attempts": [attempt(1, 0, 0)]} | dict(recorded or {}),
    }
    return json.dumps(found).encode()


def history(recorded: Mapping[str, Any] | None = None, **more: Any) -> History:
    return parse_history(document(recorded, **more))


def page_of(recorded: Mapping[str, Any] | None = None, end: JobEnd | None = None, **more: Any) -> str:
    return render(history(recorded, **more), end)


def attempt(number: int, first: int, last: int, outcome: str | None = None) -> dict[str, Any]:
    return {"number": number, "first": first, "last": last, "split": SPLIT if last else {}, "outcome": outcome}


def warned(check: str, message: str, *steps: int) -> dict[str, Any]:
    return {"check": check, "first": steps[0], "last": steps[-1], "times": len(steps), "message": message}


def losses_of(values: list[float]) -> list[dict[str, Any]]:
    """One point a step, as a trainer records them."""
    finite = [value if math.isfinite(value) else None for value in values]
    return [
        {"step": step, "count": 1, "mean": value, "low": value, "high": value, "broken": int(value is None)}
        for step, value in enumerate(finite, 1)
    ]


def run_of(steps: int, every: int = 10, broken: tuple[int, ...] = ()) -> dict[str, Any]:
    """What a training of `steps` steps recorded; `broken` steps have a loss that is not finite."""
    draw = random.Random(7)
    values = [0.35 + 2 * math.exp(-6 * step / steps) * draw.uniform(0.85, 1.15) for step in range(1, steps + 1)]
    stretches = []
    for last in range(every, steps + every, every):
        step = min(last, steps)
        seconds = (step - last + every) * draw.uniform(0.19, 0.22) + (20 if last == every else 0)
        split = {"input": 0.08 * seconds, "host": 0.15 * seconds, "device": 0.77 * seconds}
        rate = 0.4 * min(1.0, step / (0.05 * steps)) * (1 + math.cos(math.pi * step / steps)) / 2
        stretches.append(
            {"step": step, "steps": step - last + every, "seconds": seconds, "split": split, "learning_rate": rate}
        )
    return {
        "losses": losses_of([math.nan if step in broken else loss for step, loss in enumerate(values, 1)]),
        "stretches": stretches,
        "attempts": [attempt(1, 0, steps)],
        "examples_per_second": 4940.0,
        "mfu": 0.413,
        "noise_scale": 13_600.0,
    }


def typical() -> dict[str, Any]:
    """Two attempts, evaluations, two kinds of warnings."""
    evaluations = []
    for step in range(500, 5001, 500):
        done = 1 - math.exp(-4 * step / 5000)
        metrics = {"evaluation_loss": 2.1 - 1.6 * done, "accuracy": 0.1 + 0.85 * done, "top5": 0.5 + 0.49 * done}
        evaluations.append({"step": step, "metrics": metrics})
    waits = "the device waited for input in 9 % of the training time; decode fewer bytes per example"
    shapes = "step 412 compiled again (2.1 s): the last batch had the shape [28, 64] and not [32, 64]; drop or pad it"
    return run_of(5000) | {
        "evaluations": evaluations,
        "warnings": [warned("InputBound", waits, 900, 1800, 2700), warned("RecompilationAfterWarmUp", shapes, 412)],
        "attempts": [attempt(1, 0, 2130, "Preempted"), attempt(2, 2130, 5000, "Succeeded")],
    }
