"""The runs that are compared: which loop, on which model, for how long, with what switched on."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.trainer import ours
from bench.trainer.models import MODELS
from bench.trainer.names import CHECKPOINT_EVERY, OURS, PLAIN
from bench.trainer.observed import doctor_cost
from bench.trainer.process import watch
from bench.trainer.reports import check_learned, parse, steps_per_second

DOCTOR_HOSTS = 2
"""Most of what the doctor does is to compare replicas."""


@dataclass(frozen=True)
class Length:
    """Steps that are not timed, for compilations and caches, and the steps that are."""

    warm_up: int
    timed: int

    @property
    def steps(self) -> int:
        return self.warm_up + self.timed


def rate_of_loop(loop: str, model: str, length: Length) -> float:
    """Steps per second of one run."""
    if loop == OURS:
        return rate_of_feature(PLAIN, model, length)
    lines = watch("bench.trainer.contender", [loop, model, str(length.steps)], {})
    return _rate(lines, model, length)


def rate_of_feature(feature: str, model: str, length: Length) -> float:
    """Steps per second of one run of this trainer with one feature switched on; PLAIN is none."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        spec = ours.run_spec(model, length.steps, **_switched_on(feature, directory))
        return _rate(watch("tpu_trainer", [], *ours.environments(spec, directory)), model, length)


def cost_of_doctor(model: str, length: Length) -> dict[str, Any]:
    """What the doctor of host 0 says it has spent, in a gang of DOCTOR_HOSTS; waiting for the others included."""
    with tempfile.TemporaryDirectory() as name:
        spec = ours.run_spec(model, length.steps, DOCTOR_HOSTS)
        lines = watch("bench.trainer.observed", [], *ours.environments(spec, Path(name)))
    _rate(lines, model, length)
    return doctor_cost(lines, length.warm_up)


def _rate(lines: list[tuple[float, str]], model: str, length: Length) -> float:
    reports = [report for at, line in lines if (report := parse(line, at))]
    rate = steps_per_second(reports, length.warm_up)
    check_learned(reports, MODELS[model].chance)
    return rate


def _switched_on(feature: str, directory: Path) -> dict[str, Any]:
    checkpoint = {"uri": str(directory / "checkpoints"), "everySteps": CHECKPOINT_EVERY, "keep": 3}
    fields: dict[str, dict[str, Any]] = {
        PLAIN: {},
        "checkpoint": {"checkpoint": checkpoint},
        "noise-scale": {"report": {"gradientNoiseScale": True}},
        "tensorboard": {"report": {"tensorBoard": True}},
    }
    return fields[feature]
