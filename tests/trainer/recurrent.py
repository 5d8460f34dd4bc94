"""A GRU above a layer that needs no gradient in some passes: in an evaluation, and while it is frozen."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.trainer import tasks
from tpu_trainer import Hooks, Hyperparameters, Task


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(2, 5)
        self.gru = nn.GRU(5, 6, batch_first=True)
        self.head = nn.Linear(6, tasks.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        made, _ = self.gru(self.below(x.reshape(-1, 4, 2)))
        output: Tensor = self.head(made[:, -1])
        return output


class Unfreezing(Hooks):
    def __init__(self, model: Recurrent) -> None:
        self._below = model.below

    def train_begins(self) -> None:
        self._below.requires_grad_(False)

    def step_begins(self, batch: Any, step: int) -> None:
        if step == 5:
            self._below.requires_grad_(True)


def evaluated(hp: Hyperparameters) -> Task:
    def metrics(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        features, labels = batch
        return {"accuracy": (model(features).argmax(-1) == labels).float()}

    return Task(
        model=Recurrent(), train=tasks.examples(), loss=tasks.loss, evaluation=tasks.examples(), metrics=metrics
    )


def unfrozen(hp: Hyperparameters) -> Task:
    model = Recurrent()
    return Task(model=model, train=tasks.examples(), loss=tasks.loss, hooks=Unfreezing(model))
