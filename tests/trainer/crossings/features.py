"""The features of a recipe and of a task that can meet in one job, which of them cannot, and the jobs in which the
others do.

`python -m tests.trainer.crossings.features` searches for the jobs of `make test` again, which takes a minute, and
writes them to rows.txt.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.trainer.crossings.covering import covering

SOAK = os.environ.get("SOAK") == "1"

ROWS = Path(__file__).with_name("rows.txt")
"""The jobs of `make test`, which all its workers would seek for seconds: few dear ones take long to find."""

WAYS = ("torch", "compile", "xla", "chips", "spmd")
"""How the replicas run: on PyTorch, eagerly or compiled; on XLA's CPU device, a process each, a thread each in place of
a chip's process, or a virtual device each of one program."""

FEATURES: dict[str, tuple[str, ...]] = {
    "way": WAYS,
    "replicas": ("2", "1", "3"),
    "optimizer": ("sgd", "adamw", "rmsprop", "lion", "adafactor", "adagrad", "nadam"),
    "precision": ("Float32", "BFloat16Mixed", "BFloat16"),
    "accumulation": ("once", "accumulated"),
    "clip": ("unclipped", "clipped"),
    "average": ("own", "ema"),
    "broken": ("finite", "Skip", "SkipFirst"),
    "sharding": ("whole", "sharded"),
    "schedule": ("Constant", "Cosine", "Linear", "Step", "Plateau", "Own"),
    "scaling": ("fixed", "adaptive"),
    "groups": ("one", "two", "added"),
    "used": ("all", "spare", "late", "frozen", "branches", "data", "idle"),
    "buffers": ("none", "norm", "latenorm", "centre"),
    "hook": ("unhooked", "scaling", "pruning"),
    "evaluation": ("unevaluated", "evaluated"),
    "life": ("straight", "resumed", "moved", "smaller", "larger"),
    "loss": ("mean", "weighted"),
}
"""The first value of each is left out of a job's name, except for the first two features.

scaling: AdaScale sets the rates, and ends the run. broken: a loss that is infinite on one replica, in the middle of an
epoch or in the first step. used: all parameters; one not used by the loss; one that a hook unfreezes late, or freezes;
experts of one shape that take turns, in pairs by step, or by the data of a pass, so that replicas differ; one that is
unfrozen some steps before it is used. buffers: a batch norm, one that a hook puts into evaluation mode late, a running
centre that the forward pass subtracts. hook: multiplies the gradients before the update, or clamps weights after it.
life: not interrupted; continued from a checkpoint in the middle, on as many replicas, on others, or there with half or
twice the global batch.
"""


@dataclass(frozen=True)
class Rule:
    """Values that cannot meet. `says`: a part of the message with which the trainer refuses them; None where it is
    the test that cannot have them."""

    values: dict[str, str]
    why: str
    says: str | None = None


DEAR = () if SOAK else ("compile", "xla")
"""Ways on which `make test` runs no more than two replicas."""

RULES = (
    Rule(
        {"way": "spmd", "sharding": "sharded"},
        "SPMD has one process for all replicas",
        "recipe.sharding: Optimizer needs a process per replica",
    ),
    Rule(
        {"optimizer": "adafactor", "sharding": "sharded"},
        "Adafactor takes means over whole parameters",
        "Adafactor does not: the halves of a parameter, updated separately, get other values than the full parameter",
    ),
    Rule(
        {"schedule": "Plateau", "evaluation": "unevaluated"},
        "a plateau is one of a metric",
        "it reports none",
    ),
    Rule(
        {"optimizer": "adagrad", "groups": "added"},
        "torch's Adagrad makes the state of the groups that it is built with, and no other",
        "KeyError",
    ),
    *(
        Rule({"way": way, "replicas": number}, "one process makes all runs of a way, and XLA counts devices once")
        for way in ("chips", "spmd")
        for number in ("1", "3")
    ),
    *(Rule({"way": way, "replicas": "3"}, "a process that imports much more, for what Torch shows") for way in DEAR),
    *(Rule({"way": way, "used": "data"}, "replicas on XLA must run one program") for way in ("xla", "chips")),
    Rule(
        {"optimizer": "adagrad", "sharding": "sharded"},
        "torch's Adagrad makes the state of whole parameters when it is built",
        "two steps with eight numbers failed: KeyError",
    ),
)

RULES += (
    *(
        Rule({"optimizer": name, "scaling": "adaptive"}, "AdaScale is derived for SGD", "AdaScale is derived for SGD")
        for name in FEATURES["optimizer"]
        if name != "sgd"
    ),
    Rule({"schedule": "Own", "scaling": "adaptive"}, "AdaScale sets the rate", "here the task's own code sets it"),
    *(
        Rule({name: value, "scaling": "adaptive"}, why, "compares the gradients of several")
        for name, value, why in (
            ("way", "spmd", "one program has one gradient"),
            ("replicas", "1", "so has one replica with one pass"),
        )
    ),
)

SKIPPED = {"broken": "Skip", "sharding": "sharded", "precision": "Float32"}
EXCHANGED = SKIPPED | {"used": "branches"}

KNOWN: tuple[dict[str, str], ...] = (
    {"way": "xla", "replicas": "2", "optimizer": "adamw", "groups": "added"} | EXCHANGED,
    {"way": "chips", "optimizer": "adamw"} | EXCHANGED,
    {"way": "chips", "optimizer": "nadam", "broken": "Skip", "sharding": "sharded", "used": "frozen"},
    {"way": "xla", "replicas": "2", "optimizer": "adamw", "average": "ema", "evaluation": "evaluated"} | SKIPPED,
    {"way": "xla", "average": "ema", "broken": "Skip", "precision": "Float32", "used": "idle"},
    {"way": "torch", "replicas": "2", "precision": "Float32", "buffers": "latenorm", "life": "resumed"},
    {"way": "torch", "replicas": "2", "buffers": "norm", "evaluation": "evaluated", "life": "resumed"},
    {"way": "torch", "replicas": "1", "precision": "BFloat16", "accumulation": "accumulated", "hook": "unhooked"},
    {"way": "torch", "precision": "Float32", "clip": "clipped", "hook": "scaling"},
    {"way": "torch", "precision": "Float32", "clip": "clipped", "hook": "scaling", "schedule": "Own"},
    {"way": "torch", "precision": "Float32", "groups": "two", "schedule": "Constant", "life": "smaller"},
    {"way": "compile", "precision": "Float32", "used": "late"},
    {"way": "xla", "precision": "Float32", "average": "ema", "broken": "finite", "used": "late"},
    {"way": "xla", "precision": "Float32", "buffers": "latenorm"},
    {"way": "chips", "precision": "Float32", "buffers": "latenorm", "sharding": "sharded", "broken": "Skip"},
    {"way": "torch", "replicas": "3", "buffers": "centre", "evaluation": "evaluated", "life": "resumed"},
    {"way": "xla", "replicas": "2", "scaling": "adaptive", "broken": "Skip", "precision": "Float32", "life": "larger"},
)
"""More than two features at a time that have failed together."""


@dataclass(frozen=True)
class Case:
    """A job in which features meet: a value of each of FEATURES."""

    way: str
    replicas: str
    optimizer: str
    precision: str
    accumulation: str
    clip: str
    average: str
    broken: str
    sharding: str
    schedule: str
    scaling: str
    groups: str
    used: str
    buffers: str
    hook: str
    evaluation: str
    life: str
    loss: str

    @property
    def row(self) -> dict[str, str]:
        return asdict(self)

    @property
    def name(self) -> str:
        """Its way, its replicas, and what is not as in the plainest job."""
        special = [self.row[name] for name, values in [*FEATURES.items()][2:] if self.row[name] != values[0]]
        return "-".join([f"{self.way}x{self.replicas}", *special])


def case_of(row: dict[str, str]) -> Case:
    """Returns the job with these values; the features that it does not name have their first."""
    return Case(**{name: values[0] for name, values in FEATURES.items()} | row)


@functools.cache
def cases() -> tuple[Case, ...]:
    """Returns jobs in which all allowed pairs of values occur, or all triples."""
    if SOAK:
        return tuple(map(case_of, covering(FEATURES, [rule.values for rule in RULES], 3, KNOWN, cost)))
    names, *rows = (line.split() for line in ROWS.read_text().splitlines())
    return tuple(case_of(dict(zip(names, row, strict=True))) for row in rows)


def _seek() -> None:
    rows = covering(FEATURES, [rule.values for rule in RULES], 2, KNOWN, cost, changes=40_000)
    lines = [tuple(FEATURES), *sorted((tuple(row.values()) for row in rows), key=lambda row: WAYS.index(row[0]))]
    ROWS.write_text("".join(f"{' '.join(line)}\n" for line in lines))


DEARER = {"buffers": 0.5, "average": 0.4, "evaluation": 0.2, "groups": 0.2, "used": 0.2, "scaling": 0.2}
"""What another value than the first adds to the 0.6 CPU-seconds of a run on XLA or torch.compile, as measured."""


def cost(row: Mapping[str, str]) -> float:
    """Returns about what a job costs: torch's eager steps are cheap beside programs that have to be made."""
    processes = int(row["replicas"]) * (0.8 if row["way"] == "chips" else 0.5 if row["way"] == "spmd" else 1.0)
    runs = 1 if row["life"] == "straight" else 2
    each = 0.6 + sum(more for name, more in DEARER.items() if row[name] != FEATURES[name][0])
    return runs * 10 * (0.05 + processes * (0.15 if row["way"] == "torch" else each))


@functools.cache
def refused() -> tuple[tuple[Rule, Case], ...]:
    """Returns for each reason of a refusal the first rule, and the plainest job that meets it."""
    reasons = {rule.why: rule for rule in reversed(RULES) if rule.says is not None}
    return tuple(
        (rule, case_of({"replicas": "2" if {"spmd", "adaptive"} & {*rule.values.values()} else "1"} | rule.values))
        for rule in reasons.values()
    )


if __name__ == "__main__":
    _seek()
