"""recipe.onNotFinite: Skip on a device that works ahead. It gives what a host gives that waits for every step.

Features of a recipe that meet there are in tests/trainer/crossings."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.trainer import skipping_tasks
from tests.trainer.gang_processes import Launcher, start_replicas
from tests.trainer.whole_runs import run

ADAMW = {"name": "adamw", "learningRate": "0.02", "weightDecay": "1e-4"}
"""That of `gang.run_spec`."""
SHARDED = {"sharding": "Optimizer"}

CASES: dict[str, dict[str, Any]] = {
    # The state of a divided optimizer changes its order whenever a step uses other parameters than the one before.
    "unlike": SHARDED,
    # A step changes the buffer of one of two equal parts, or only reads it.
    "centred": {},
    "shifted": {},
}

COUNTING = ("adagrad", "adafactor", "counting")
"""These count their steps on the host, each replica for itself."""


@pytest.mark.parametrize(
    ("task", "replicas"), [*((task, 2) for task in CASES), *((task, 1) for task in ("shifted", *COUNTING))]
)
def test_a_skipped_step_leaves_no_trace_on_a_device(launcher: Launcher, task: str, replicas: int) -> None:
    spec = {"onNotFinite": "Skip", "warmupSteps": 0, "trainSteps": 24, **CASES.get(task, {})}
    entrypoint = f"tests.trainer.skipping_tasks:{task}"
    gang = start_replicas(launcher, "xla", replicas, optimizer="adamw", entrypoint=entrypoint, **spec)
    expected = run(lambda hp, rank: getattr(skipping_tasks, task)(hp), replicas, recipe=ADAMW, **spec)
    assert set(gang.wait()) == {0}, gang.output()
    assert sum(map(math.isnan, expected.losses)) == 6
    found = [math.nan if loss is None else loss for loss in gang.losses()]
    assert found == pytest.approx(expected.losses, abs=1e-5, nan_ok=True)
