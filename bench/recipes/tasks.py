"""What is trained, by which rules it is scaled, and when a loss of quality counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bench.recipes.data import LETTERS, TEXTS

FACTORS = (1, 2, 4, 8, 16, 32)
"""How many times the tuned batch."""


@dataclass(frozen=True)
class Quality:
    """A metric of the held-out examples. `sign`: 1 if more is better. `tolerance`: the loss that the goal allows.
    `scale`, `unit`: how it is shown."""

    metric: str
    sign: int
    tolerance: float
    scale: int
    unit: str

    def lost(self, value: float, before: float) -> float:
        return self.sign * (before - value)


ACCURACY = Quality("accuracy", 1, 0.01, 100, "points")
NATS = Quality("nats", -1, 0.02, 1, "nats")


@dataclass(frozen=True)
class Task:
    """A recipe but for its learning rate, which is tuned among `rates`. `fields`: more fields of the recipe. `chance`:
    the quality of a model that has learned nothing, which is that of a run that failed. `held_out`: the thresholds of
    the plan's warnings were chosen without it."""

    title: str
    entrypoint: str
    optimizer: Mapping[str, str]
    examples: int
    batch: int
    steps: int
    warmup: int
    rates: tuple[str, ...]
    chance: float
    quality: Quality = ACCURACY
    fields: Mapping[str, Any] = field(default_factory=dict)
    held_out: bool = False

    @property
    def is_sgd(self) -> bool:
        return self.optimizer["name"] == "sgd"

    def recipe(self, rate: str, seed: int) -> dict[str, Any]:
        return {
            "globalBatchSize": self.batch,
            "trainSteps": self.steps,
            "warmupSteps": self.warmup,
            "datasetSize": self.examples,
            "seed": seed,
            "optimizer": {**self.optimizer, "learningRate": rate},
            **self.fields,
        }


_SGD = {"name": "sgd", "momentum": "0.9", "weightDecay": "0.0001"}
_ADAMW = {"name": "adamw", "weightDecay": "0.01"}
_COSINE = {"schedule": {"name": "Cosine"}}
_LARGE = ("0.025", "0.05", "0.1", "0.2", "0.4")
_SLOW = ("0.0015", "0.003", "0.006", "0.0125", "0.025")
_SMALL = ("0.004", "0.008", "0.016", "0.032", "0.064")


def _digits(title: str, optimizer: Mapping[str, str], rates: tuple[str, ...], epochs: int = 27) -> Task:
    steps = epochs * 1437 // 32
    return Task(f"digits, {title}", "digits", optimizer, 1437, 32, steps, steps // 15, rates, 0.1)


def _text(title: str, optimizer: Mapping[str, str], rates: tuple[str, ...]) -> Task:
    return Task(f"text, {title}", "text", optimizer, TEXTS, 8, 1000, 67, rates, math.log(LETTERS), NATS, _COSINE)


TASKS = {
    "digits-sgd": _digits("SGD, 27 epochs", _SGD, _LARGE),
    "digits-sgd-cosine": replace(_digits("SGD, cosine", _SGD, _LARGE), fields=_COSINE),
    "digits-sgd-short": _digits("SGD, 5 epochs", _SGD, _LARGE, epochs=5),
    "digits-adamw": _digits("AdamW, 27 epochs", _ADAMW, _SMALL),
    "digits-adamw-short": _digits("AdamW, 5 epochs", _ADAMW, _SMALL, epochs=5),
    "tumours-sgd": Task("tumours, SGD, 20 epochs", "tumours", _SGD, 284, 8, 710, 47, _SLOW, 0.5),
    "text-sgd": replace(_text("SGD, cosine", _SGD, (*_LARGE[1:], "0.8")), held_out=True),
    "text-adamw": _text("AdamW, cosine", _ADAMW, _SMALL),
    "text-lion": _text(
        "Lion, cosine", {"name": "lion", "weightDecay": "0.01"}, ("0.0008", "0.0016", "0.0032", "0.0064")
    ),
    "digits-sgd-ten": replace(_digits("SGD, 10 epochs", _SGD, _LARGE, epochs=10), held_out=True),
}


@dataclass(frozen=True)
class Rule:
    """`scaling`: the recipe's. `knows_noise`: the recipe has the gradient noise scale that was measured with it."""

    scaling: Mapping[str, str]
    knows_noise: bool = False


AUTO, ADASCALE = "Auto", "AdaScale"
RULES: Mapping[str, Rule] = {
    "Unscaled": Rule({"learningRate": "Unscaled"}),
    "SquareRoot": Rule({"learningRate": "SquareRoot"}),
    "Linear": Rule({"learningRate": "Linear"}),
    AUTO: Rule({}),
    "Auto, noise scale": Rule({}, knows_noise=True),
    "SameLoss": Rule({"steps": "SameLoss"}, knows_noise=True),
    ADASCALE: Rule({"learningRate": "AdaScale"}),
}


def rules_of(task: Task) -> tuple[str, ...]:
    """Returns the rules that the task's optimizer has."""
    return tuple(rule for rule in RULES if rule != ADASCALE or task.is_sgd)
