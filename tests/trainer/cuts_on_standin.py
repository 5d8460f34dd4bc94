"""Runs all SCENARIOS on the stand-in device, and prints what each replica has done, as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.trainer import standin_tpu, tasks
from tests.trainer.gang_processes import run_spec
from tests.trainer.recorded import recorded
from tpu_trainer import Hooks, Hyperparameters, SummaryWriter, Task, log
from tpu_trainer.gang.backends import Backend
from tpu_trainer.optim import sharding

WORLD = 2
STOPS_AFTER = 5

FOLDER = Path(os.environ.get("TEST_FOLDER", "."))
"""A scenario's is one below it."""


class Watching(Hooks):
    """Holds a tensor of its own, which its state has, and looks at numbers as users do: in all replicas alike."""

    def __init__(self, stops: bool, alone: bool) -> None:
        self.seen: Tensor | None = None
        self._stops, self._alone, self._writer = stops, alone, SummaryWriter()

    def after_step(self, batch: Any, loss: Tensor, step: int) -> None:
        self.seen = loss.detach().clone() if self.seen is None else self.seen + loss.detach()
        if step % 6 == 0:
            self._writer.add_scalar("seen", self.seen)
            self._writer.add_histogram("loss", loss)
        if self._alone and standin_tpu.rank() == 0:
            float(loss)
        # One replica alone is asked.
        if self._stops and step == STOPS_AFTER and standin_tpu.rank() == 1:
            (FOLDER / "stopped" / "stop-1").touch()

    def state(self) -> dict[str, Any]:
        return {} if self.seen is None else {"seen": self.seen}

    def load(self, state: Any) -> None:
        self.seen = state["seen"].to("tpu")


def task(hp: Hyperparameters) -> Task:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        value = tasks.loss(model, batch)
        log("half", value / 2)
        return value

    def metrics(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        features, labels = batch
        return {"error": nn.functional.cross_entropy(model(features), labels, reduction="none")}

    model = tasks.Network()
    model.add_module("norm", nn.BatchNorm1d(8))
    return Task(
        model=model,
        train=tasks.examples(),
        loss=loss,
        evaluation=TensorDataset(*tasks.examples()[:37]),
        metrics=metrics,
        hooks=Watching("stops" in hp.parameters, "alone" in hp.parameters),
        finish=lambda model: None,
    )


class Counting:
    """An evaluator; of 33 examples the first replica has a batch more than the second."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._sum = model, torch.zeros(2)

    def begins(self) -> None:
        self._model.eval()
        self._sum = torch.zeros(2, device="tpu")

    def batch(self, batch: tuple[Tensor, Tensor], index: int, rows: int) -> None:
        features, labels = batch
        error = nn.functional.cross_entropy(self._model(features), labels)
        self._sum += torch.stack([error * rows, torch.full_like(error, rows)])

    def ends(self, backend: Backend) -> dict[str, float]:
        self._model.train()
        _, sums = backend.reduce([], self._sum)
        (here,) = backend.to_host([sums])
        return {"error": (here[0] / here[1]).item()}


def with_evaluator(hp: Hyperparameters) -> Task:
    plain = task(hp)
    evaluation = TensorDataset(*tasks.examples()[:33])
    return dataclasses.replace(plain, evaluation=evaluation, metrics=None, evaluator=Counting(plain.model))


def unlike(hp: Hyperparameters) -> Task:
    """One replica uses a parameter less than the other."""
    plain = task(hp)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        features, labels = batch
        head = model.head(features) if standin_tpu.rank() else model.head(features).detach() + model.first.weight.sum()
        return nn.functional.cross_entropy(head, labels)

    return dataclasses.replace(plain, loss=loss)


def spec(folder: Path, **changes: Any) -> dict[str, Any]:
    document = run_spec(
        **{
            "replicas": WORLD,
            "hardware": "TPU",
            "entrypoint": "tests.trainer.cuts_on_standin:task",
            "torch": {"device": "tpu", "collectives": "tpu_dist", "processesPerHost": WORLD, "execution": "Fuse"},
            "trainSteps": 12,
            "evaluateEverySteps": 4,
            "checkpoint": {
                "uri": str(folder / "kept"),
                "everySteps": 3,
                "keep": 2,
                "keepBest": {"metric": "error", "mode": "Min"},
            },
            **changes,
        }
    )
    return {name: value for name, value in document.items() if value is not None}


MUCH: dict[str, Any] = {
    "optimizer": "adamw",
    "emaDecay": "0.9",
    "onNotFinite": "Skip",
    "gradientClipNorm": "1.0",
    "batch": {"global": 16, "perReplica": 4, "accumulation": 2},
}

SCENARIOS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"entrypoint": "tests.trainer.tasks:small", "trainSteps": 24, "checkpoint": None}],
    "everything": [{}],
    "accumulation, average, clipping, skipping, noise scale": [
        {
            "optimizer": "adamw",
            "emaDecay": "0.9",
            "onNotFinite": "Skip",
            "gradientClipNorm": "1.0",
            "batch": {"global": 16, "perReplica": 4, "accumulation": 2},
            "report": {"gradientNoiseScale": True},
        }
    ],
    "sharded": [{"optimizer": "adamw", "sharding": "Optimizer"}],
    "evaluator": [{"entrypoint": "tests.trainer.cuts_on_standin:with_evaluator"}],
    "eager": [{"torch": {"device": "tpu", "collectives": "tpu_dist", "processesPerHost": WORLD}}],
    "stopped": [{"parameters": {"stops": "yes"}}, {}],
    "alone": [{"parameters": {"alone": "yes"}}],
    "unlike": [{"entrypoint": "tests.trainer.cuts_on_standin:unlike"}],
}
"""By name, the runs that follow each other with one folder of checkpoints."""


def run(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    outcomes, events = standin_tpu.run_replicas(spec(folder, **changes), folder, WORLD)
    losses = recorded(folder).losses
    for leftover in ("history.json", "stop-1"):
        (folder / leftover).unlink(missing_ok=True)
    return {
        "codes": [outcome.code.name for outcome in outcomes],
        "messages": [outcome.message for outcome in outcomes],
        "losses": losses,
        "events": events,
        "mode": standin_tpu.TPU.eager_mode.name,
    }


def main() -> None:
    standin_tpu.install()
    torch.set_num_threads(1)
    # The network's weights have 64 elements.
    sharding.SMALLEST = 64
    found = {}
    for name, runs in SCENARIOS.items():
        folder = FOLDER / name
        folder.mkdir()
        found[name] = [run(folder, changes) for changes in runs]
    (FOLDER / "found.json").write_text(json.dumps({"runs": found, "stray": standin_tpu.STRAY}))


if __name__ == "__main__":
    main()
