"""The runs that make up a job: one from its first step to its last, and where its life goes on otherwise, one that
continues from a checkpoint in the middle of the first."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.trainer.crossings import task
from tests.trainer.crossings.features import Case
from tests.trainer.gang_processes import run_spec
from tpu_trainer.data.order import permutation

SEED = 3
BATCH, STEPS, WARMUP, MILESTONE, EVERY, SAVED = 96, 8, 3, 6, 3, 5
"""Of the recipe as it was tuned. SAVED: after so many steps the checkpoint is taken from which a job continues."""

RECIPE_BATCH, RECIPE_STEPS = 24, 22
"""With AdaScale: what its gains are relative to, and add up to."""

PATIENCE, DROP, CLIP, AVERAGE = 1, 0.5, 0.05, 0.8
RATES = {
    "sgd": 0.2,
    "adamw": 0.01,
    "rmsprop": 0.003,
    "lion": 0.002,
    "adafactor": 0.05,
    "adagrad": 0.02,
    "nadam": 0.01,
}


@dataclass(frozen=True)
class Leg:
    """One run: `batch` examples a step, on `replicas`. `first`: whether the job begins with it."""

    case: Case
    first: bool
    batch: int
    replicas: int

    @property
    def scale(self) -> float:
        """How many times the recipe's batch."""
        return self.batch / BATCH

    def scaled(self, steps: int) -> int:
        """Returns as many steps as take the examples that `steps` take with the recipe's batch."""
        return math.ceil(steps / self.scale)

    def counted(self, steps: int) -> int:
        """Returns `scaled` steps; with AdaScale those of the recipe, which are as many as given."""
        return steps if self.adaptive else self.scaled(steps)

    @property
    def steps(self) -> int:
        return RECIPE_STEPS if self.adaptive else self.scaled(STEPS)

    @property
    def adaptive(self) -> bool:
        return self.case.scaling == "adaptive"

    @property
    def rate(self) -> float:
        return RATES[self.case.optimizer] * (RECIPE_BATCH / BATCH if self.adaptive else self.scale)

    @property
    def accumulation(self) -> int:
        return 2 if self.case.accumulation == "accumulated" else 1

    @property
    def saved(self) -> int:
        """The step of this leg, if it is the first, after which the second continues."""
        return SAVED if self.scale == 1 else SAVED - 1

    def spec(self, checkpoints: Path) -> dict[str, Any]:
        """Returns its run spec."""
        case = self.case
        parameters = {"case": json.dumps(case.row), "broken": str(broken(case))}
        spmd, torch = case.way == "spmd", case.way in ("torch", "compile")
        spec = run_spec(
            hosts=1 if case.way in ("spmd", "chips") else self.replicas,
            replicas=self.replicas,
            backend="xla-spmd" if spmd else "torch" if torch else "xla",
            hardware="TPU" if case.way == "chips" else "CPU",
            entrypoint="tests.trainer.crossings.task:task",
            seed=SEED,
            trainSteps=self.steps,
            warmupSteps=0 if case.schedule == "Constant" else self.counted(WARMUP),
            schedule=self._schedule(),
            precision=case.precision,
            sharding="Optimizer" if case.sharding == "sharded" else "Replicated",
            onNotFinite="Stop" if case.broken == "finite" else "Skip",
            parameters=parameters,
            checkpoint={"uri": str(checkpoints), "everySteps": self.saved, "keep": 9},
            job={"namespace": "crossings", "name": "job", "uid": "5f0c", "attempt": 1 if self.first else 2},
        )
        rows = self.batch // self.replicas // self.accumulation
        spec["batch"] = {"global": self.batch, "perReplica": rows, "accumulation": self.accumulation}
        spec["optimizer"] = {
            "name": case.optimizer,
            "learningRate": f"{self.rate:.6f}",
            "weightDecay": str(task.DECAY),
            **({"momentum": str(task.MOMENTUM)} if case.optimizer == "sgd" else {}),
        }
        if torch:
            execution = "Compile" if case.way == "compile" else "Eager"
            spec["torch"] = {"device": "cpu", "collectives": "gloo", "processesPerHost": 1, "execution": execution}
        if self.adaptive:
            spec["adaScaleBatchSize"] = RECIPE_BATCH
        if case.clip == "clipped":
            spec["gradientClipNorm"] = str(CLIP)
        if case.average == "ema":
            spec["emaDecay"] = str(AVERAGE)
        if case.evaluation == "evaluated":
            spec["evaluateEverySteps"] = self.scaled(EVERY)
        return spec

    def _schedule(self) -> dict[str, Any]:
        match self.case.schedule:
            case "Plateau":
                return {"name": "Plateau", "metric": "miss", "mode": "Max", "patience": PATIENCE, "factor": str(DROP)}
            case "Step":
                return {"name": "Step", "milestones": [self.counted(MILESTONE)], "factor": str(DROP)}
            case "Own":
                return {"name": "Constant"}
            case name:
                return {"name": name}


def legs(case: Case) -> list[Leg]:
    """Returns the runs of the case's job, in order."""
    replicas = int(case.replicas)
    # With AdaScale no run may have a replica alone.
    alone = 3 if case.scaling == "adaptive" else 1
    others = replicas if case.way in ("chips", "spmd") else {1: 2, 2: alone, 3: 2}[replicas]
    second = {
        "straight": None,
        "resumed": (BATCH, replicas),
        "moved": (BATCH, others),
        "smaller": (BATCH // 2, others),
        "larger": (BATCH, others),
    }[case.life]
    first = Leg(case, True, BATCH // 2 if case.life == "larger" else BATCH, replicas)
    return [first] if second is None else [first, Leg(case, False, *second)]


def broken(case: Case) -> int:
    """Returns the example that is broken: one of the second step of an epoch of the recipe's batch, or of the first, in
    a place that is one replica's alone."""
    return int(permutation(task.EXAMPLES, SEED, 0)[(0 if case.broken == "SkipFirst" else 1) * BATCH + 5])
